"""A stopped generation: everything that another model needs to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvgraft import cache as caches
from kvgraft.errors import CacheError
from kvgraft.models.handle import ModelHandle, ModelSource

if TYPE_CHECKING:
    from kvgraft.handoff.repair import Repair

__all__ = ["GenerationState", "Span"]

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Span:
    """A stretch of a cache, and how often its rows were mapped.

    Attributes:
        n_tokens: Length.
        mapped: 0 for rows that the model computed itself, 1 for rows mapped from
            such, and so on: each mapping adds its error to the one before.
    """

    n_tokens: int
    mapped: int


def cut(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """The part of ``spans`` between two positions."""
    out, at = [], 0
    for span in spans:
        n = min(stop, at + span.n_tokens) - max(start, at)
        if n > 0:
            out.append(Span(n, span.mapped))
        at += span.n_tokens
    return out


def join(spans: Iterable[Span]) -> list[Span]:
    """Neighbours of one kind made one span; empty ones dropped."""
    out: list[Span] = []
    for span in spans:
        if span.n_tokens <= 0:
            continue
        if out and out[-1].mapped == span.mapped:
            out[-1] = Span(out[-1].n_tokens + span.n_tokens, span.mapped)
        else:
            out.append(span)
    return out


def last_mapped_position(spans: Iterable[Span], limit: int) -> int:
    """Position after the last row that was mapped ``limit`` times or more; 0 if none was."""
    at, end = 0, 0
    for span in spans:
        at += span.n_tokens
        if span.mapped >= limit:
            end = at
    return end


def spans_of(cache: Sequence[Any]) -> list[Span]:
    """How the rows of a cache came to be, by its mark; all computed if it has none."""
    n = caches.n_tokens(cache)
    seen = caches.provenance_of(cache)
    if seen is None:
        return join([Span(n, 0)])
    spans = [Span(seen.start, 0), Span(seen.n_tokens, seen.generations), Span(n, 0)]
    return join(cut(spans, 0, n))


@dataclass
class GenerationState:
    """A generation at rest.

    ``tokens`` is the conversation; ``cache`` is only a shortcut, and may hold
    all of it, all but the last token, less, or be absent: the tokens are enough
    to go on with any model that shares the tokenizer.

    Attributes:
        handle: The model that generated.
        tokens: Ids of the whole conversation, prompt and reply.
        cache: mlx-lm prompt cache of the first tokens, or ``None``.
        sampler: As for ``mlx_lm.generate``; ``None`` for greedy.
        logits_processors: As for ``mlx_lm.generate``. They see the ids of the
            whole conversation, whoever generated them.
        rng_key: MLX's random key for the next token, as two words; ``None``
            leaves the running sequence alone.
        spans: How the rows of the cache came to be; rows beyond them were
            computed by the model itself. Taken from the cache's mark if not given.
        max_kv_size: Limit of the cache, as for ``make_prompt_cache``; kept when
            the conversation has to be read again.
        repair: A native cache in the making, if one was begun.
    """

    handle: ModelHandle
    tokens: list[int]
    cache: list[Any] | None = None
    sampler: Sampler | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    rng_key: tuple[int, int] | None = None
    spans: list[Span] = field(default_factory=list)
    repair: Repair | None = None
    max_kv_size: int | None = None

    @classmethod
    def of(
        cls,
        model: ModelSource | ModelHandle,
        tokens: Sequence[int],
        cache: list[Any] | None = None,
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
    ) -> GenerationState:
        """The state of a generation that some other loop ran.

        Args:
            model: The model.
            tokens: All ids so far, the last emitted one included; at least one.
            cache: Its prompt cache. Used and, at a hand-off, used up.
            sampler: See the class.
            logits_processors: See the class.

        Raises:
            CacheError: If there are no tokens, or the cache holds more of them.
        """
        state = cls(
            ModelHandle.of(model), [int(t) for t in tokens], cache, sampler,
            tuple(logits_processors or ()),
        )  # fmt: skip
        if not state.tokens:
            raise CacheError("There are no tokens to go on from.")
        if state.n_cached > len(state.tokens):
            raise CacheError(
                f"The cache holds {state.n_cached} tokens, but only {len(state.tokens)} ids are "
                "given: give the ids of the whole conversation."
            )
        state.settle()
        return state

    @property
    def n_cached(self) -> int:
        """Tokens that the cache holds."""
        return 0 if self.cache is None else caches.n_tokens(self.cache)

    @property
    def unread(self) -> list[int]:
        """Tokens after the cache: the prompt for a loop of your own that gets the cache."""
        return self.tokens[self.n_cached :]

    @property
    def n_mapped(self) -> int:
        """Rows of the cache that were mapped rather than computed."""
        return sum(span.n_tokens for span in self.spans if span.mapped)

    def settle(self) -> None:
        """Make ``spans`` cover the cache, whatever was read or cut since."""
        n = self.n_cached
        if self.cache:
            self.max_kv_size = caches.size_limit(self.cache) or self.max_kv_size
            self.spans = self.spans or spans_of(self.cache)
        known = sum(span.n_tokens for span in self.spans)
        self.spans = join([*cut(self.spans, 0, n), Span(n - known, 0)])

    def rewind(self, n_tokens: int) -> None:
        """Keep only the first ``n_tokens`` rows of the cache.

        A cache that cannot be cut (a ring that wrapped) is dropped: the tokens
        remain, and are read again.
        """
        if self.cache is not None and n_tokens < self.n_cached:
            if n_tokens <= 0 or not caches.trim(self.cache, n_tokens):
                self.cache = None
        if self.repair is not None and (self.cache is None or not self.repair.rewind(n_tokens)):
            self.repair = None
        self.settle()
