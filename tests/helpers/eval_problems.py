"""Evaluations whose outcome is known."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from kvgraft.evaluate.results import EvalConfig
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry

SMALL = EvalConfig(
    documents=3,
    prefix=40,
    scored=12,
    native_starts=(0, 4),
    native_ends=(1, 6),
    needle_lengths=(256,),
    needle_depths=(0.2, 0.9),
    needle_samples=1,
    speed_lengths=(16, 48),
    repeats=1,
)


def identity(path: Path) -> Mapper:
    """A map that changes nothing, from a model to itself."""
    loaded = load_model(path)
    geometry = read_geometry(loaded.model)

    def one(layer: int, kind: str) -> LinearMap:
        g = geometry.layers[layer]
        d = getattr(g, f"{kind}_dim")
        eye = np.eye(g.n_kv_heads * d, dtype=np.float32)
        weight = eye.reshape(-1, g.n_kv_heads, d).transpose(1, 0, 2)
        return LinearMap.of([layer], mx.array(weight), mx.zeros((g.n_kv_heads, d)))

    layers = [LayerMap(i, one(i, "key"), one(i, "value")) for i in range(len(geometry.layers))]
    who = loaded.identity()
    return Mapper(geometry, geometry, layers, source_model=who, target_model=who)
