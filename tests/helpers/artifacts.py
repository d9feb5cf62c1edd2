"""Compare artifacts, and make folders and files that are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import mappers
import mlx.core as mx

from kvgraft.mapper.mapper import Mapper
from kvgraft.ops.quantized import dequantize


def weights_of(mapper: Mapper) -> dict[tuple[int, str], mx.array]:
    """Every array, read and dropped again."""
    out = {}
    for described in mapper.layers:
        m = mapper.read_layer(described.target_layer)
        for kind in ("keys", "values"):
            part = getattr(m, kind)
            out[m.target_layer, kind] = dequantize(part.weight)
            out[m.target_layer, f"{kind} bias"] = part.bias
    return out


def assert_same_mapper(a: Mapper, b: Mapper) -> None:
    for name in ("source", "target", "content_space", "source_model", "target_model", "fit"):
        assert getattr(a, name) == getattr(b, name), name
    assert len(a.layers) == len(b.layers)
    for x, y in zip(a.layers, b.layers):
        assert x.target_layer == y.target_layer
        for kind in ("keys", "values"):
            mine, yours = getattr(x, kind), getattr(y, kind)
            assert (mine.sources, mine.heads, mine.shape) == (
                yours.sources,
                yours.heads,
                yours.shape,
            )
            assert mine.storage == yours.storage
        assert x.scores.keys() == y.scores.keys()
        for name, score in x.scores.items():
            assert score == y.scores[name] or (math.isnan(score) and math.isnan(y.scores[name]))
    mine, yours = weights_of(a), weights_of(b)
    assert all(mappers.same(mine[key], yours[key]) for key in mine)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("mapper-*.safetensors"))


def model_folder(path: Path) -> None:
    """A model's folder."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    mx.save_safetensors(str(path / "model.safetensors"), {"model.norm.weight": mx.zeros(3)})


def folder_of(*names: str) -> Callable[[Path], None]:
    """Makes a folder of JSON files with these names."""

    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_text("{}")

    return make


def file_of(data: bytes) -> Callable[[Path], None]:
    """Makes a file of these bytes."""
    return lambda path: path.write_bytes(data) and None


def tensors_of(metadata: dict[str, str], *names: str) -> Callable[[Path], None]:
    """Makes a safetensors file of small tensors with these names."""
    return lambda path: mx.save_safetensors(
        str(path), {name: mx.zeros((1, 2)) for name in names}, metadata
    )
