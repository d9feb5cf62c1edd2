"""What is measured of one arm, token by token, and its interval over documents."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.stats import DegenerateDataWarning

from kvgraft.models.attention_hook import AttentionCall, attention_weights

__all__ = [
    "Interval",
    "TokenScores",
    "Variance",
    "attention_cosines",
    "bootstrap",
    "distance_bins",
    "score_tokens",
    "share_kept",
]

_RESAMPLES = 9999


@dataclass(frozen=True)
class TokenScores:
    """One arm on one document.

    Attributes:
        nll: ``[scored]`` nats.
        top: ``[scored]`` most likely next tokens.
        kl: ``[scored]`` KL divergence from the native arm's prediction to this
            one's, nats; empty if there was nothing to compare with.
    """

    nll: NDArray[np.float32]
    top: NDArray[np.int64]
    kl: NDArray[np.float32]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return {
            "nll": [_number(x) for x in self.nll],
            "top": [int(x) for x in self.top],
            "kl": [_number(x) for x in self.kl],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TokenScores:
        """Inverse of :meth:`to_dict`."""
        return cls(
            np.array([_float(x) for x in data["nll"]], np.float32),
            np.array(data["top"], np.int64),
            np.array([_float(x) for x in data["kl"]], np.float32),
        )

    @classmethod
    def broken(cls, n: int) -> TokenScores:
        """Scores of an arm without a finite cache."""
        nothing = np.full(n, np.nan, np.float32)
        return cls(nothing, np.full(n, -1, np.int64), nothing)


def _number(x: Any) -> float | None:
    return round(float(x), 5) if np.isfinite(x) else None


def _float(x: float | None) -> float:
    return float("nan") if x is None else x


def score_tokens(
    logits: mx.array, tokens: Sequence[int], native: mx.array | None = None
) -> tuple[TokenScores, mx.array]:
    """Compare predictions with what follows, and with the native predictions.

    Args:
        logits: ``[n, vocabulary]``, row ``i`` predicts ``tokens[i]``.
        tokens: ``n`` token ids.
        native: ``[n, vocabulary]`` log-probabilities of the native arm.

    Returns:
        The scores, and the log-probabilities in float32.
    """
    x = logits.astype(mx.float32)
    log_p = x - mx.logsumexp(x, axis=-1, keepdims=True)
    ids = mx.array(list(tokens))
    nll = -mx.take_along_axis(log_p, ids[:, None], axis=-1)[:, 0]
    top = mx.argmax(log_p, axis=-1)
    if native is None:
        kl = mx.zeros(0)
    else:
        # Where the native probability underflows to 0 the term is 0, not 0 * inf.
        p = mx.exp(native)
        kl = mx.where(p > 0, p * (native - log_p), 0.0).sum(axis=-1)
    mx.eval(nll, top, kl, log_p)
    return TokenScores(np.array(nll), np.array(top).astype(np.int64), np.array(kl)), log_p


@dataclass(frozen=True)
class Interval:
    """A mean over documents and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def to_list(self) -> list[float]:
        """``[mean, low, high]``."""
        return [round(self.mean, 5), round(self.low, 5), round(self.high, 5)]


def bootstrap(per_document: Sequence[float] | NDArray[Any], seed: int = 0) -> Interval:
    """Mean over documents with its 95 % bootstrap interval (SciPy's BCa).

    Documents, not tokens, are resampled: the tokens of one document are alike. The
    interval is bias-corrected and accelerated (Efron 1987), which for few documents is
    less too narrow than plain percentiles. Where BCa is not defined: fewer than three
    documents give the percentile interval, equal values or a single one an interval of
    no width, and values that are not all finite ``(mean, mean, mean)``.

    Args:
        per_document: One value per document.
        seed: Of the resampling; the same seed gives the same interval.
    """
    x = np.asarray(per_document, dtype=np.float64)
    mean = float(x.mean()) if len(x) else float("nan")
    if len(x) < 2 or not np.isfinite(x).all() or np.ptp(x) == 0:
        return Interval(mean, mean, mean)
    methods: tuple[Any, ...] = ("BCa", "percentile") if len(x) > 2 else ("percentile",)
    for method in methods:
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", DegenerateDataWarning)
            found = stats.bootstrap(
                (x,),
                np.mean,
                n_resamples=_RESAMPLES,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if np.isfinite(found.low) and np.isfinite(found.high):
            break
    return Interval(mean, float(found.low), float(found.high))


def share_kept(kept: float, benefit: float) -> float | None:
    """Share of the context's benefit that a cache keeps.

    Args:
        kept: Loss without context minus loss with the cache, nats per token.
        benefit: Loss without context minus native loss.

    Returns:
        1 for a cache as good as the native one, 0 for one as bad as none, negative for
        a worse one; ``None`` if the context has no benefit.
    """
    return kept / benefit if benefit > 0 else None


def distance_bins(scored: int) -> list[tuple[int, int]]:
    """Ranges ``[a, b)`` of distances from the border, each about twice the one before."""
    edges = [0]
    width = 4
    while edges[-1] < scored:
        edges.append(min(scored, edges[-1] + width))
        width = edges[-1]
    if len(edges) > 2 and edges[-1] - edges[-2] < (edges[-2] - edges[-3]) / 2:
        del edges[-2]
    return list(zip(edges, edges[1:]))


class Variance:
    """Squared error and variance of the heads of one layer, summed over documents.

    R² of a head is the share of the variance of all its dimensions together
    that the map explains, against the mean over all documents.
    """

    def __init__(self) -> None:
        self.n = 0
        self.error = np.zeros(0)
        self.total = np.zeros((0, 0))
        self.squares = np.zeros(0)

    def add(self, mapped: NDArray[Any], native: NDArray[Any]) -> None:
        """Add one document: ``[heads, tokens, dim]`` mapped and native."""
        y = native.astype(np.float64)
        if not self.n:
            self.error = np.zeros(len(y))
            self.squares = np.zeros(len(y))
            self.total = np.zeros((len(y), y.shape[2]))
        self.n += y.shape[1]
        self.error += ((mapped.astype(np.float64) - y) ** 2).sum(axis=(1, 2))
        self.squares += (y**2).sum(axis=(1, 2))
        self.total += y.sum(axis=1)

    def to_list(self) -> list[list[float]]:
        """Sums of one or more documents, JSON-ready; see :meth:`merge`."""
        return [[float(self.n)], self.error.tolist(), self.squares.tolist(), *self.total.tolist()]

    def merge(self, stored: Sequence[Sequence[float]]) -> None:
        """Add the sums of other documents."""
        n, error, squares, total = stored[0][0], stored[1], stored[2], stored[3:]
        if not self.n:
            self.error = np.zeros(len(error))
            self.squares = np.zeros(len(error))
            self.total = np.zeros(np.shape(total))
        self.n += int(n)
        self.error = self.error + np.asarray(error)
        self.squares = self.squares + np.asarray(squares)
        self.total = self.total + np.asarray(total)

    def r2(self) -> list[float]:
        """R² by head; NaN for one that does not vary."""
        variance = self.squares - (self.total**2).sum(axis=1) / max(self.n, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(variance > 1e-12 * self.squares, 1 - self.error / variance, np.nan)
        return [float(x) for x in out]


def attention_cosines(call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
    """Cosine of a layer's attention output with mapped against native keys and values.

    Queries and the new tokens' own keys and values are native in both, so it is
    this layer's map alone that is measured (the number that predicts retention
    in Heo et al., arXiv:2608.03893, section 5).

    Args:
        call: Attention of the layer in a native run.
        keys: ``[kv heads, prefix, head_dim]`` mapped keys of the prefix.
        values: ``[kv heads, prefix, value_dim]`` mapped values.

    Returns:
        ``[heads]`` means over the new tokens. Lazy.
    """
    prefix = keys.shape[1]

    def joined(mapped: mx.array, native: mx.array) -> mx.array:
        return mx.concatenate([mapped.astype(native.dtype), native[:, prefix:]], axis=1)

    native = _attend(call, call.keys, call.values)
    mapped = _attend(call, joined(keys, call.keys), joined(values, call.values))
    dot = (native * mapped).sum(axis=-1)
    norms = mx.sqrt((native**2).sum(axis=-1) * (mapped**2).sum(axis=-1))
    return (dot / mx.maximum(norms, 1e-20)).mean(axis=-1).reshape(-1)


def _attend(call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
    """``[kv heads, queries per head, new tokens, value_dim]`` float32."""
    n_kv, n_tokens = keys.shape[0], keys.shape[1]
    q = call.queries.astype(mx.float32)
    new = q.shape[1]
    q = q.reshape(n_kv, -1, new, q.shape[2])
    k, v = keys.astype(mx.float32)[:, None], values.astype(mx.float32)[:, None]
    logits = call.scale * (q @ k.swapaxes(-1, -2))
    at = mx.arange(n_tokens - new, n_tokens)
    logits = mx.where(mx.arange(n_tokens)[None] <= at[:, None], logits, -mx.inf)
    return attention_weights(logits, call.sinks) @ v
