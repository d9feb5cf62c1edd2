"""The share of each source layer in a map."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.evaluate.checkpoint import SourceLayers
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.rope import strip_rope
from kvgraft.ops.quantized import dequantize

__all__ = ["source_shares"]


def source_shares(mapper: Mapper, capture: SourceLayers) -> dict[str, list[list[float]]]:
    """Share of each source layer in each target layer's map.

    The squared weights times the variance of what they multiply, summed over a source
    layer's features. Features are correlated, so this is only indicative.

    Args:
        mapper: The mapper.
        capture: Keys and values of the source on some text, ``{layer: ([B, H, N,
            D], …)}``, keys with RoPE.

    Returns:
        ``{"keys" | "values": [target layer][source layer]}``; rows sum to 1.
    """
    source = mapper.source
    n_tokens = next(iter(capture.values()))[0].shape[2]
    positions = mx.arange(n_tokens)
    variance: dict[tuple[int, str], mx.array] = {}
    for i in mapper.source_layers:
        keys, values = capture[i]
        if mapper.content_space:
            keys = strip_rope(keys, positions, source.layers[i].rope)
        for kind, x in (("keys", keys), ("values", values)):
            variance[i, kind] = mx.var(x[0].astype(mx.float32), axis=1)  # [heads, dim]
    out: dict[str, list[list[float]]] = {"keys": [], "values": []}
    for described in sorted(mapper.layers, key=lambda m: m.target_layer):
        m = mapper.read_layer(described.target_layer)
        for kind, part in (("keys", m.keys), ("values", m.values)):
            assert part.weight is not None
            squares = (dequantize(part.weight).astype(mx.float32) ** 2).sum(axis=2)  # [heads, in]
            plan = part.heads or (None,) * part.shape[0]
            row = np.zeros(len(source.layers))
            at = 0
            for s in part.sources:
                size = 0
                for h, group in enumerate(plan):
                    v = variance[s, kind]
                    v = (v if group is None else v[mx.array(list(group))]).reshape(-1)
                    size = int(v.size)
                    share: Any = (squares[h, at : at + size] * v).sum().item()
                    row[s] += share
                at += size
            total = row.sum()
            out[kind].append([float(x) for x in (row / total if total > 0 else row)])
    return out
