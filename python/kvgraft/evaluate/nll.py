"""Loss of a continuation after a prefix whose cache came from somewhere.

The question every arm answers: given the same document, how well does the model
predict the tokens after position ``prefix`` when the cache of what came before
is its own, mapped, or missing? (Heo et al., arXiv:2608.03893, perplexity
protocol; the molt mappers choose k by the same number.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraft.errors import FitError
from kvgraft.models.forward import continuation_nll
from kvgraft.progress import Progress

__all__ = ["ArmResult", "prefix_nll", "run_arms"]

Cache = list[Any]
"""An mlx-lm prompt cache: one cache object per entry."""


@dataclass(frozen=True)
class ArmResult:
    """Loss of one arm over all documents.

    Attributes:
        name: The arm.
        per_document: Mean NLL in nats per token, one per document.
        n_tokens: Scored tokens in all.
    """

    name: str
    per_document: tuple[float, ...]
    n_tokens: int

    @property
    def nll(self) -> float:
        """Mean over documents, nats per token."""
        return float(np.mean(self.per_document))

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)

    def gap(self, other: ArmResult) -> tuple[float, float]:
        """Mean and standard error of this arm's NLL minus ``other``'s, paired by document."""
        d = np.array(self.per_document) - np.array(other.per_document)
        return float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d))) if len(d) > 1 else 0.0


def prefix_nll(
    model: Any,
    make_cache: Callable[[Sequence[int]], Cache | None],
    tokens: Sequence[int],
    prefix: int,
) -> np.ndarray:
    """NLL of ``tokens[prefix:]`` with the cache that ``make_cache`` gives.

    ``make_cache`` gets ``tokens[:prefix - 1]``: the last token of the prefix is
    always read by the model itself, as it is in a hand-off.
    """
    cache = make_cache(tokens[: prefix - 1])
    return continuation_nll(model, cache, tokens[prefix - 1 :])


def run_arms(
    arms: dict[str, tuple[Any, Callable[[Sequence[int]], Cache | None]]],
    documents: Sequence[Sequence[int]],
    prefix: int,
    progress: Progress | None = None,
) -> dict[str, ArmResult]:
    """Score every arm on the same tokens of the same documents.

    Args:
        arms: ``{name: (model, make_cache)}``; see :func:`prefix_nll`.
        documents: Token ids, each longer than ``prefix``.
        prefix: Tokens before the scored part.
        progress: Called with documents done and in all.

    Raises:
        FitError: If there are no documents or one is too short.
    """
    if not documents or prefix < 2:
        raise FitError("Give at least one document and a prefix of two tokens or more.")
    short = min(len(d) for d in documents)
    if short <= prefix:
        raise FitError(f"A document has {short} tokens; the prefix alone takes {prefix}.")
    losses: dict[str, list[float]] = {name: [] for name in arms}
    scored = 0
    for i, tokens in enumerate(documents):
        for name, (model, make_cache) in arms.items():
            losses[name].append(float(prefix_nll(model, make_cache, tokens, prefix).mean()))
        scored += len(tokens) - prefix
        if progress is not None:
            progress(i + 1, len(documents))
    return {name: ArmResult(name, tuple(v), scored) for name, v in losses.items()}
