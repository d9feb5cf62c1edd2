"""A stopped generation: everything that another model needs to continue it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvgraft import cache as caches
from kvgraft.cache import MappedRange
from kvgraft.errors import CacheError
from kvgraft.models.handle import ModelHandle, ModelSource

__all__ = ["GenerationState", "LogitsProcessor", "Sampler"]

Sampler = Callable[[mx.array], mx.array]
"""As for ``mlx_lm.generate``: log probabilities ``[1, vocab]`` to token ids ``[1]``."""

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""As for ``mlx_lm.generate``: token ids so far and logits ``[1, vocab]`` to new logits."""


@dataclass(frozen=True, eq=False)
class GenerationState:
    """A generation at rest.

    ``tokens`` is the conversation; ``cache`` only saves time, and may hold all of
    it, all but the last token, less, or be absent: the tokens are enough to
    continue with any model that shares the tokenizer.

    A state is not changed but replaced, by :meth:`with_cache` and :meth:`rewound`.
    The cache that it refers to is mlx-lm's, and grows when a model continues
    from it; a hand-off that uses it up leaves the list empty.

    Attributes:
        handle: The model that generated.
        tokens: Ids of the whole conversation, prompt and reply.
        cache: mlx-lm prompt cache of the first tokens, or ``None``.
        sampler: As for ``mlx_lm.generate``; ``None`` for greedy decoding.
        logits_processors: As for ``mlx_lm.generate``. They see the ids of the
            whole conversation, no matter which model generated them.
        rng_key: MLX's random key for the next token, as two words; ``None``
            leaves the running sequence alone.
        max_kv_size: Size limit, as for ``make_prompt_cache``; taken from ``cache``
            if that has one, and kept when the conversation is re-prefilled.
    """

    handle: ModelHandle
    tokens: list[int]
    cache: list[Any] | None = None
    sampler: Sampler | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    rng_key: tuple[int, int] | None = None
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        if self.cache and (limit := caches.size_limit(self.cache)):
            object.__setattr__(self, "max_kv_size", limit)

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
            cache: Its prompt cache. A generation or hand-off from this state
                changes it.
            sampler: See the class.
            logits_processors: See the class.

        Raises:
            CacheError: If there are no tokens, or the cache holds more of them.
        """
        state = cls(
            ModelHandle.of(model), [int(t) for t in tokens], None if cache is None else list(cache),
            sampler, tuple(logits_processors or ()),
        )  # fmt: skip
        if not state.tokens:
            raise CacheError("There are no tokens to continue from.")
        if state.n_cached > len(state.tokens):
            raise CacheError(
                f"The cache holds {state.n_cached} tokens, but only {len(state.tokens)} ids are "
                "given: give the ids of the whole conversation."
            )
        return state

    @property
    def n_cached(self) -> int:
        """Tokens that the cache holds."""
        return caches.n_tokens(self.cache or ())

    @property
    def unread(self) -> list[int]:
        """Tokens after the cache: the prompt for a loop of your own that gets the cache."""
        return self.tokens[self.n_cached :]

    @property
    def mapped_ranges(self) -> tuple[MappedRange, ...]:
        """Which tokens of the cache were mapped, and how often; all others are native."""
        mark = caches.provenance_of(self.cache or ())
        held = None if mark is None else mark.first(self.n_cached)
        return () if held is None else held.ranges

    @property
    def n_mapped(self) -> int:
        """Tokens of the cache that were mapped rather than computed."""
        return sum(part.n_tokens for part in self.mapped_ranges)

    def with_cache(self, cache: list[Any] | None) -> GenerationState:
        """The same state with another cache of its first tokens, or none."""
        return replace(self, cache=cache)

    def rewound(self, n_tokens: int) -> GenerationState:
        """The same state with only the first ``n_tokens`` in the cache, which is cut in place.

        A cache that cannot be cut (a ring buffer that wrapped) is dropped: the
        tokens remain, and are re-prefilled.
        """
        if not self.cache or n_tokens >= self.n_cached:
            return self
        keep = n_tokens > 0 and caches.trim(self.cache, n_tokens)
        return self if keep else self.with_cache(None)
