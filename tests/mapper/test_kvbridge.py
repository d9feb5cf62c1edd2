"""kvbridge's artifacts, read."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import mappers
import mlx.core as mx
import pytest

import kvgraft
from kvgraft.errors import (
    ChecksumError,
    FormatError,
    PairMismatchError,
    VersionError,
)
from kvgraft.mapper import kvbridge
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.quantized import dequantize

BRIDGE_SOURCE = mappers.geometry(4, rope=mappers.LLAMA3)
BRIDGE_TARGET = mappers.geometry(3, rope=RopeSpec(16, base=1e6))


def bridge(folder, mapper: Mapper, dtype: mx.Dtype = mx.float32) -> None:
    """Write a mapper as kvbridge's own code lays it out."""
    folder.mkdir()
    arrays = {}
    for m in mapper.layers:
        for stem, part in (("key", m.keys), ("value", m.values)):
            arrays[f"{stem}_weight.{m.target_layer}"] = part.weight.astype(dtype)
            arrays[f"{stem}_bias.{m.target_layer}"] = part.bias.astype(dtype)
    name = str(dtype).removeprefix("mlx.core.")
    metadata = {"format": "kvbridge", "schema": "1", "storage_dtype": name}
    mx.save_safetensors(str(folder / "mapper.safetensors"), arrays, metadata)
    from kvgraft.files.reading import sha256_of

    def signature(geometry, model_id: str) -> dict[str, Any]:
        return {
            "model_id": model_id,
            "revision": "main",
            "tokenizer_hash": "0",
            "num_layers": len(geometry.layers),
            "num_kv_heads": geometry.layers[0].n_kv_heads,
            "head_dim": geometry.layers[0].key_dim,
            "attention_kind": "dense",
            "architecture": "qwen3",
        }

    manifest = {
        "format": "kvbridge",
        "schema_version": 1,
        "weights_sha256": sha256_of(folder / "mapper.safetensors"),
        "storage_dtype": name,
        "source_signature": signature(mapper.source, "org/a"),
        "target_signature": signature(mapper.target, "org/b"),
        "fit_config": {"top_k": 2, "ridge_alpha": 0.01, "content_space": mapper.content_space},
        "selected_layers": [list(m.keys.sources) for m in mapper.layers],
        "selection_scores": [],
        "fit_key_r2": [0.9, 0.8, 0.7],
        "fit_value_r2": [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_kvbridges_artifact_opens_with_geometries(tmp_path, dtype):
    made = mappers.mapper(BRIDGE_SOURCE, BRIDGE_TARGET, dtype=dtype)
    bridge(tmp_path / "b", made, dtype)
    mapper = kvbridge.read(tmp_path / "b", source=BRIDGE_SOURCE, target=BRIDGE_TARGET)
    assert not any(m.is_loaded for m in mapper.layers)
    for m in made.layers:
        got = mapper.read_layer(m.target_layer)
        assert mappers.same(dequantize(m.keys.weight), got.keys.weight)
        assert mappers.same(m.values.bias, got.values.bias)
    assert mapper.layers[1].r2_k == 0.8 and math.isnan(mapper.layers[1].r2_v)
    assert mapper.fit["lambda_convention"] == "gram" and mapper.fit["kvbridge"]
    source_kv = mappers.cache(BRIDGE_SOURCE, 30)
    again = kvgraft.load_mapper(mapper.save(tmp_path / "ours"))
    a, b = (kvgraft.transfer_cache(source_kv, m) for m in (made, again))
    assert all(mappers.same(x, y) for i in a for x, y in zip(a[i], b[i]))


def test_kvbridges_artifact_refused(tmp_path):
    bridge(tmp_path / "b", mappers.mapper(BRIDGE_SOURCE, BRIDGE_TARGET))

    def read(**options: Any) -> None:
        kvbridge.read(
            tmp_path / "b", **{"source": BRIDGE_SOURCE, "target": BRIDGE_TARGET} | options
        )

    def edit(**entries: Any) -> None:
        path = tmp_path / "b/manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    with pytest.raises(PairMismatchError, match="source .org/a. has 4 layers"):
        read(source=mappers.geometry(5))
    with pytest.raises(PairMismatchError, match="target .org/b. .* head_dim 16"):
        read(target=mappers.geometry(3, dim=8))
    shutil.copytree(tmp_path / "b", tmp_path / "kept")
    for entries, kind, message in (
        ({"weights_sha256": "0"}, ChecksumError, "not the file"),
        ({"schema_version": 2}, VersionError, "schema version 2"),
        ({"format": "x"}, FormatError, "not the manifest"),
        ({"storage_dtype": "float8"}, FormatError, "float8 are unknown"),
        ({"storage_dtype": "bfloat16"}, FormatError, "says BF16"),
        ({"selected_layers": [[0, 1], [0, 9], [0, 1]]}, FormatError, "contradicts itself"),
        ({"selected_layers": [[0, 1]]}, FormatError, "doesn't describe"),
        ({"fit_config": {}}, FormatError, "lacks the entry 'content_space'"),
        ({"fit_key_r2": [1]}, FormatError, "can't be read"),
    ):
        edit(**entries)
        with pytest.raises(kind, match=message):
            read()
        shutil.copy(tmp_path / "kept/manifest.json", tmp_path / "b")
    read()
