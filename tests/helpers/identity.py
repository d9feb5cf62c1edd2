"""An exact mapper: a model's cache onto itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.probe import read_geometry


def identity_mapper(model: Any, *, values: float = 1.0) -> Mapper:
    """Maps a model's cache onto itself, head by head; ``values`` scales the values."""
    geometry = read_geometry(model)
    layers = []
    for i, g in enumerate(geometry.layers):
        plan = [[h] for h in range(g.n_kv_heads)]

        def scaled(
            dim: int, by: float, i: int = i, plan: Sequence[Sequence[int]] = plan
        ) -> LinearMap:
            eye = by * mx.broadcast_to(mx.eye(dim), (len(plan), dim, dim))
            return LinearMap.of([i], eye, mx.zeros((len(plan), dim)), plan)

        layers.append(LayerMap(i, scaled(g.key_dim, 1.0), scaled(g.value_dim, values)))
    return Mapper(geometry, geometry, layers)
