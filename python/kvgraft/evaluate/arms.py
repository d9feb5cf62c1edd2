"""The caches that are compared: native, mapped, and the controls.

Every arm is the same target reading the same tokens; only the cache of the tokens before
differs. A useful map does better than the controls: no cache, another document's, and a
random map's. (Heo et al., arXiv:2608.03893, perplexity protocol.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from kvgraft import cache as caches
from kvgraft.errors import EvaluationError
from kvgraft.evaluate.checkpoint import SourceLayers
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.forward import continuation_nll, extend_cache
from kvgraft.models.geometry import ModelGeometry
from kvgraft.ops.quantized import Weight, dequantize
from kvgraft.progress import Progress

__all__ = [
    "ALONE",
    "MAPPED",
    "NATIVE",
    "NONE",
    "PLAIN",
    "RANDOM",
    "RAW",
    "WRONG",
    "ArmResult",
    "Pairs",
    "assemble",
    "copy_of",
    "map_pairs",
    "random_mapper",
    "raw_layers",
    "raw_pairs",
    "run_arms",
    "short_name",
    "timed_extend",
    "with_ends",
]

NATIVE = "target, its own cache"
MAPPED = "target, mapped cache"
NONE = "target, no context"
WRONG = "target, wrong document's cache"
RANDOM = "target, random map"
RAW = "target, source's cache as it is"
ALONE = "source alone"

PLAIN = (0, 1)
"""Native start and end of the plain hand-off: only the last token is native."""

Pairs = list[tuple[mx.array, mx.array]]
"""``(keys, values)`` per layer, ``[B, H, N, D]``, keys with RoPE."""


def with_ends(native_start: int, native_end: int) -> str:
    """Name of the arm with the first and the last tokens native, the very last included."""
    if (native_start, native_end) == PLAIN:
        return MAPPED
    return f"{MAPPED}, {native_start} head + {native_end} tail native"


def short_name(name: str) -> str:
    """An arm's name without what all of them share."""
    return name.removeprefix("target, ").replace("mapped cache, ", "mapped, ")


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


def run_arms(
    arms: dict[str, tuple[Module, Callable[[Sequence[int]], list[Any] | None]]],
    documents: Sequence[Sequence[int]],
    prefix: int,
    progress: Progress | None = None,
) -> dict[str, ArmResult]:
    """Score every arm on the same tokens of the same documents.

    Args:
        arms: ``{name: (model, make_cache)}``; ``make_cache`` gets the first ``prefix - 1``
            tokens of a document (the last token of the prefix is always read by the model
            itself, as in a hand-off) and returns a prompt cache of them, or ``None``.
        documents: Token ids, each longer than ``prefix``.
        prefix: Tokens before the scored part.
        progress: Called with documents done and in all.

    Raises:
        EvaluationError: If there are no documents or one is too short.
    """
    if not documents or prefix < 2:
        raise EvaluationError("Give at least one document and a prefix of two tokens or more.")
    short = min(len(d) for d in documents)
    if short <= prefix:
        raise EvaluationError(f"A document has {short} tokens; the prefix alone takes {prefix}.")
    losses: dict[str, list[float]] = {name: [] for name in arms}
    scored = 0
    for i, tokens in enumerate(documents):
        for name, (model, make_cache) in arms.items():
            cache = make_cache(tokens[: prefix - 1])
            losses[name].append(float(continuation_nll(model, cache, tokens[prefix - 1 :]).mean()))
        scored += len(tokens) - prefix
        if progress is not None:
            progress(i + 1, len(documents))
    return {name: ArmResult(name, tuple(v), scored) for name, v in losses.items()}


def copy_of(cache: Sequence[Any]) -> Pairs:
    """A copy of a cache's keys and values, for a cache that is going to be extended."""
    snapshot = caches.read_cache(cache)
    pairs = [(mx.contiguous(k), mx.contiguous(v)) for k, v in snapshot.layers]
    mx.eval(pairs)
    return pairs


def map_pairs(source: SourceLayers, mapper: Mapper, geometry: ModelGeometry, keep: bool) -> Pairs:
    """Map a source cache, evaluated.

    Args:
        source: ``{layer: (keys, values)}``.
        mapper: The mapper.
        geometry: The target's geometry.
        keep: Leave the mapper's weights in memory.
    """
    mapped = iter_transfer(source, mapper, unload_after=not keep, dtype=geometry.mx_dtype)
    pairs = [(k, v) for _, k, v in mapped]
    mx.eval(pairs)
    return pairs


def assemble(
    geometry: ModelGeometry, native: Pairs, mapped: Pairs, native_start: int, end: int
) -> list[Any]:
    """A cache of ``end`` tokens, of which the first ``native_start`` are native.

    Those are exact: by causality no token's keys depend on what follows it. Both caches are
    given, so that one map and one prefill serve all lengths that are compared.
    """
    at = native_start
    joined = [
        (mx.concatenate([a[:, :, :at], b[:, :, at:end]], axis=2) if at else b[:, :, :end])
        for pair_a, pair_b in zip(native, mapped, strict=True)
        for a, b in zip(pair_a, pair_b, strict=True)
    ]
    return caches.build_cache(geometry, list(zip(joined[::2], joined[1::2], strict=True)))


def timed_extend(model: Module, cache: list[Any], tokens: Sequence[int]) -> float:
    """Extend a cache in one forward pass, in place; the seconds it took."""
    if not tokens:
        return 0.0
    start = time.perf_counter()
    extend_cache(model, tokens, cache, step=len(tokens))
    return time.perf_counter() - start


def random_mapper(mapper: Mapper, seed: int) -> Mapper:
    """A mapper of the same shape whose weights are noise of the same size.

    Each head's weights are normal with the root mean square that the fitted
    ones have; biases are kept. Made layer by layer when they are read.
    """

    def bare(m: LayerMap) -> LayerMap:
        m = m.copy()
        m.unload()
        return m

    store = _RandomStore(mapper, seed)
    return replace(mapper, layers=[bare(m) for m in mapper.layers], store=store)


class _RandomStore:
    def __init__(self, mapper: Mapper, seed: int) -> None:
        self._mapper = mapper
        self._seed = seed

    def fill(self, layer: LayerMap) -> None:
        like = self._mapper.read_layer(layer.target_layer)
        for kind, (part, fitted) in enumerate(
            ((layer.keys, like.keys), (layer.values, like.values))
        ):
            assert fitted.weight is not None
            key = mx.random.key(self._seed * 1_000_003 + 2 * layer.target_layer + kind)
            part.weight = _noise_like(fitted.weight, key)
            part.bias = fitted.bias
            mx.eval(part.weight, part.bias)

    def read_ahead(self, layer: LayerMap) -> None:
        """Nothing to read: the noise is generated."""


def _noise_like(weight: Weight, key: mx.array) -> mx.array:
    w = dequantize(weight).astype(mx.float32)
    size = mx.sqrt((w**2).mean(axis=(1, 2), keepdims=True))
    noise = mx.random.normal(w.shape, key=key) * size
    largest: Any = mx.abs(noise).max().item()
    return noise.astype(mx.float16 if largest < 6e4 else mx.float32)


def raw_layers(source: ModelGeometry, target: ModelGeometry) -> list[int] | None:
    """The source layer at each target layer's relative depth, where shapes allow.

    ``None`` if a layer's heads or dimensions differ, so that the source's cache
    could not be given to the target at all.
    """
    n_s, n_t = len(source.layers), len(target.layers)
    at = [round(t * (n_s - 1) / max(n_t - 1, 1)) for t in range(n_t)]
    for t, s in enumerate(at):
        a, b = source.layers[s], target.layers[t]
        if (a.n_kv_heads, a.key_dim, a.value_dim) != (b.n_kv_heads, b.key_dim, b.value_dim):
            return None
    return at


def raw_pairs(source: SourceLayers, layers: Sequence[int], geometry: ModelGeometry) -> Pairs:
    """The source's keys and values as they are, for the control without any map."""
    dtype = geometry.mx_dtype
    return [(source[s][0].astype(dtype), source[s][1].astype(dtype)) for s in layers]
