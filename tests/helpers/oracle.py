"""The operation once more, in NumPy float64, sharing no code with kvgraft.

Rotations are complex multiplications, sums are explicit loops over heads: slow,
and different enough from ``kvgraft.ops.reference`` that a shared mistake is unlikely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.rope import RopeSpec, RopeTable
from kvgraft.ops.quantized import dequantize


def to_numpy(x: mx.array) -> np.ndarray:
    """Any float array as float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def angles(spec: RopeSpec, positions: np.ndarray) -> np.ndarray:
    """``[N, dims/2]`` angles in float64 from the spec's definition."""
    half = spec.dims // 2
    if spec.freqs is not None:
        inverse = 1.0 / np.array(spec.freqs, dtype=np.float64)
    else:
        inverse = float(spec.base) ** (-np.arange(half) / half)
    return positions.astype(np.float64)[..., None] * spec.scale * inverse


def turn(x: np.ndarray, phase: np.ndarray, dims: int, traditional: bool) -> np.ndarray:
    """Multiply the pairs of ``x`` ``[..., N, D]`` by complex numbers ``[..., N, dims/2]``."""
    out = x.astype(np.float64).copy()
    if traditional:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    else:
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
    z = (out[..., first] + 1j * out[..., second]) * phase
    out[..., first], out[..., second] = z.real, z.imag
    return out


def strip(keys: np.ndarray, positions: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Keys without rotation and magnitude."""
    if spec.dims == 0:
        return keys.astype(np.float64)
    phase = np.exp(-1j * angles(spec, positions)) / spec.magnitude
    return turn(keys, phase, spec.dims, spec.traditional)


def rotate(keys: np.ndarray, positions: np.ndarray, spec: RopeSpec) -> np.ndarray:
    """Keys with rotation and magnitude."""
    if spec.dims == 0:
        return keys.astype(np.float64)
    phase = np.exp(1j * angles(spec, positions)) * spec.magnitude
    return turn(keys, phase, spec.dims, spec.traditional)


def turn_by_table(x: np.ndarray, table: RopeTable | None) -> np.ndarray:
    """Turn by the cosines and sines of a table, so that only arithmetic is compared."""
    if table is None:
        return x.astype(np.float64)
    phase = to_numpy(table.cos) + 1j * to_numpy(table.sin)
    if phase.ndim == 3:
        phase = phase[:, None]
    return turn(x, phase, table.dims, table.traditional)


def map_layer(
    sources: Sequence[np.ndarray],
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    heads: Sequence[Sequence[int]] | None = None,
    strip: Sequence[RopeTable | None] | None = None,
    rotate: RopeTable | None = None,
) -> np.ndarray:
    """``[..., H_t, N, D_t]`` float64; arguments as in ``kvgraft.ops.reference.map_layer``."""
    tables = strip if strip is not None else [None] * len(sources)
    content = [turn_by_table(s, t) for s, t in zip(sources, tables, strict=True)]
    n_heads, _, out_dim = weight.shape
    lead = content[0].shape[:-3]
    n_tokens = content[0].shape[-2]
    out = np.zeros((*lead, n_heads, n_tokens, out_dim))
    for h in range(n_heads):
        if bias is not None:
            out[..., h, :, :] += bias[h]
        row = 0
        for layer in content:
            for g in range(layer.shape[-3]) if heads is None else heads[h]:
                width = layer.shape[-1]
                out[..., h, :, :] += layer[..., g, :, :] @ weight[h, row : row + width].astype(
                    np.float64
                )
                row += width
        assert row == weight.shape[1], "the weights have rows that no feature feeds"
    return turn_by_table(out, rotate)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Squared error over squared norm."""
    scale = float((want**2).sum())
    return float(((got - want) ** 2).sum()) / scale if scale else float((got**2).sum())


def map_cache_layer(
    mapper: Mapper, source_kv: dict[int, Any], target_layer: int, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One target layer by equation 3, angles from the specs' definition; no batch axis."""
    m = mapper.read_layer(target_layer)

    def one(part: LinearMap, index: int) -> np.ndarray:
        arrays = [to_numpy(source_kv[s][index]) for s in part.sources]
        if index == 0 and mapper.content_space:
            specs = [mapper.source.layers[s].rope for s in part.sources]
            arrays = [strip(a, positions, spec) for a, spec in zip(arrays, specs)]
        weight = to_numpy(dequantize(part.weight))
        out = map_layer(arrays, weight, to_numpy(part.bias), heads=part.heads)
        if index == 0 and mapper.content_space:
            out = rotate(out, positions, mapper.target.layers[target_layer].rope)
        return out

    return one(m.keys, 0), one(m.values, 1)
