"""The demonstration: one conversation moves between two models, with numbers beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

from kvgraft.cache.map import map_cache
from kvgraft.errors import EvaluationError
from kvgraft.evaluate.arms import ALONE, MAPPED, NATIVE, NONE, ArmResult, run_arms
from kvgraft.evaluate.metrics import share_kept
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import prefill
from kvgraft.models.loading import LoadedModel
from kvgraft.models.probe import read_geometry
from kvgraft.progress import Progress

__all__ = ["Answer", "Demo", "Timing", "conclusions"]


@dataclass(frozen=True)
class Timing:
    """Seconds, each the median of several runs in one process.

    Attributes:
        n_tokens: Tokens in the cache.
        source_prefill: The source reads them.
        mapping: The source's cache becomes the target's.
        target_prefill: The target reads them itself.
    """

    n_tokens: int
    source_prefill: float
    mapping: float
    target_prefill: float

    @property
    def ratio(self) -> float:
        """How many times faster mapping is than re-prefill."""
        return self.target_prefill / self.mapping


@dataclass(frozen=True)
class Answer:
    """How each arm answers one question after the conversation."""

    question: str
    expected: str | None
    replies: dict[str, str]

    def right(self, arm: str) -> bool:
        """Whether the arm's first line holds the expected answer."""
        line = self.replies[arm].strip().split("\n")[0]
        return self.expected is not None and self.expected in line


class Demo:
    """Two models and a mapper, loaded.

    Args:
        source: The model whose cache is mapped.
        target: The model that continues from the mapped cache.
        mapper: Mapper from source to target.
    """

    def __init__(self, source: LoadedModel, target: LoadedModel, mapper: Mapper) -> None:
        self.source, self.target, self.mapper = source, target, mapper
        self.target_geometry = read_geometry(target.model)

    def map_cache(self, source_cache: Sequence[Any]) -> list[Any]:
        """Map a cache of the source, keeping the mapper's weights in memory."""
        return map_cache(
            source_cache,
            self.mapper,
            self.target.model,
            target_geometry=self.target_geometry,
            unload_after=False,
        )

    def time_switch(self, tokens: Sequence[int], repeats: int) -> Timing:
        """Time both prefills and the map; one warm-up run of each is not counted."""
        source_seconds, source_cache = _median_time(
            lambda: prefill(self.source.model, tokens), repeats
        )
        mapping_seconds, _ = _median_time(lambda: self.map_cache(source_cache), repeats)
        target_seconds, _ = _median_time(lambda: prefill(self.target.model, tokens), repeats)
        return Timing(len(tokens), source_seconds, mapping_seconds, target_seconds)

    def ask(
        self,
        context: Sequence[int],
        question_tokens: Sequence[int],
        question: str,
        expected: str | None,
        max_tokens: int,
    ) -> Answer:
        """Greedy replies of every arm to a question after ``context``.

        Each arm reads the question itself, or where there is none the last token
        of the context; the rest comes out of a cache.
        """
        held = list(context) if question_tokens else list(context[:-1])
        unread = list(question_tokens) or list(context[-1:])
        source_cache = prefill(self.source.model, held)
        caches: dict[str, tuple[LoadedModel, list[Any] | None]] = {
            # Mapped before the source's own reply writes into the same cache.
            MAPPED: (self.target, self.map_cache(source_cache)),
            ALONE: (self.source, source_cache),
            NATIVE: (self.target, prefill(self.target.model, held)),
            NONE: (self.target, None),
        }
        replies = {
            name: self._reply(*caches[name], unread, max_tokens)
            for name in (ALONE, NATIVE, MAPPED, NONE)
        }
        return Answer(question, expected, replies)

    def score(
        self,
        documents: Sequence[Sequence[int]],
        prefix: int,
        progress: Progress | None = None,
    ) -> dict[str, ArmResult]:
        """Held-out loss of every arm after ``prefix`` tokens of each document."""
        read: dict[tuple[int, ...], list[Any]] = {}

        def by_source(tokens: Sequence[int]) -> list[Any]:
            # Two arms need the source's cache of a document: the second uses it up.
            key = tuple(tokens)
            if key not in read:
                read.clear()
                read[key] = prefill(self.source.model, tokens)
            return read[key]

        arms: dict[str, tuple[Module, Callable[[Sequence[int]], list[Any] | None]]] = {
            MAPPED: (self.target.model, lambda t: self.map_cache(by_source(t))),
            ALONE: (self.source.model, by_source),
            NATIVE: (self.target.model, lambda t: prefill(self.target.model, t)),
            NONE: (self.target.model, lambda t: None),
        }
        results = run_arms(arms, documents, prefix, progress)
        return {name: results[name] for name in (ALONE, NATIVE, MAPPED, NONE)}

    def _reply(
        self, loaded: LoadedModel, cache: list[Any] | None, question: Sequence[int], limit: int
    ) -> str:
        stops = set(loaded.tokenizer.eos_token_ids)
        out: list[int] = []
        for token, _ in generate_step(
            mx.array(list(question)), loaded.model, max_tokens=limit, prompt_cache=cache
        ):
            if token in stops:
                break
            out.append(int(token))
        return str(loaded.tokenizer.decode(out))


def _median_time(work: Callable[[], list[Any]], repeats: int) -> tuple[float, list[Any]]:
    """Median seconds of ``repeats`` runs after one that is not counted, and the last result."""
    if repeats < 1:
        raise EvaluationError("Timing needs at least one run.")
    work()
    seconds = []
    result: list[Any] = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def conclusions(arms: dict[str, ArmResult]) -> list[str]:
    """What the losses mean, one sentence each.

    Args:
        arms: What :meth:`Demo.score` returned.
    """
    native, mapped, none = arms[NATIVE], arms[MAPPED], arms[NONE]
    kept = share_kept(none.nll - mapped.nll, none.nll - native.nll)
    lines = []
    if kept is None:
        lines.append("The context does not help the target on this text: nothing can be concluded.")
    else:
        lines.append(f"The mapped cache keeps {100 * kept:.0f} % of the context's benefit.")
        if kept <= 0:
            lines.append("It is worse than no context: re-prefill instead.")
    if arms[ALONE].nll < mapped.nll:
        lines.append(
            "The source alone predicts this text better than the target does from the mapped "
            "cache: switch to save memory or time, not for better text."
        )
    lines.append("A mapped cache is an approximation. Where exact recall matters, re-prefill.")
    return lines
