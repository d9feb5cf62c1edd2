"""The caches that are compared: native, mapped, and the controls.

Every arm is the same target reading the same tokens; only what it is told about
the tokens before differs. A mapped cache is worth something if it does better
than the caches that should be worth nothing: none, another document's, a random
map's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from kvgraft import cache as caches
from kvgraft.evaluate.checkpoint import SourceLayers
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.geometry import ModelGeometry
from kvgraft.ops.quantized import Weight, dequantize

__all__ = [
    "ALONE",
    "MAPPED",
    "NATIVE",
    "NONE",
    "PLAIN",
    "RANDOM",
    "RAW",
    "WRONG",
    "Pairs",
    "assemble",
    "copy_of",
    "map_pairs",
    "random_mapper",
    "raw_layers",
    "raw_pairs",
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
"""Native tokens at start and end of a hand-off without more: only the last one."""

Pairs = list[tuple[mx.array, mx.array]]
"""``(keys, values)`` per layer, ``[B, H, N, D]``, keys with RoPE."""


def with_ends(head: int, tail: int) -> str:
    """Name of the arm with the first ``head`` and the last ``tail`` tokens native.

    The last token always is.
    """
    return MAPPED if (head, tail) == PLAIN else f"{MAPPED}, {head} head + {tail} tail native"


def short_name(name: str) -> str:
    """An arm's name without what all of them share."""
    return name.removeprefix("target, ").replace("mapped cache, ", "mapped, ")


def copy_of(cache: Sequence[Any]) -> Pairs:
    """The keys and values of a cache that is going to be written to."""
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


def assemble(geometry: ModelGeometry, native: Pairs, mapped: Pairs, head: int, end: int) -> Any:
    """A cache of ``end`` tokens, of which the first ``head`` are native.

    Those are exact: by causality no token's keys depend on what follows it.
    """
    joined = [
        (mx.concatenate([a[:, :, :head], b[:, :, head:end]], axis=2) if head else b[:, :, :end])
        for pair_a, pair_b in zip(native, mapped, strict=True)
        for a, b in zip(pair_a, pair_b, strict=True)
    ]
    return caches.build_cache(geometry, list(zip(joined[::2], joined[1::2], strict=True)))


def timed_extend(model: Any, cache: list[Any], tokens: Sequence[int]) -> float:
    """Let the target read tokens on top of a cache; the seconds it took."""
    if not tokens:
        return 0.0
    start = time.perf_counter()
    model(mx.array([list(tokens)]), cache=cache)
    mx.eval([(entry.keys, entry.values) for entry in cache])
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
        """Nothing to bring near: the noise is made."""


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
