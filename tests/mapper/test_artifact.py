"""Artifacts on disk: round trips, damage, interrupted writes, the right pair."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import mappers
import mlx.core as mx
import numpy as np
import pytest
import safetensors
import yaml
from mlx_lm.models.cache import KVCache, save_prompt_cache

from kvgraft import _ext
from kvgraft.errors import (
    ArtifactWriteError,
    ChecksumError,
    FormatError,
    GeometryError,
    KvgraftError,
    MapperNotFoundError,
    PairMismatchError,
    TruncatedFileError,
    VersionError,
)
from kvgraft.files import atomic
from kvgraft.files.safetensors import Writer
from kvgraft.mapper.config import from_config
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.verify import verify_artifact
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.quantized import AffineWeight, dequantize

DOCS = Path(__file__).parents[2] / "docs"
HELPERS = str(Path(__file__).parents[1] / "helpers")
SCHEMA = json.loads((DOCS / "mapper_config.schema.json").read_text())
GROUPS = [[0, 1], [2, 3]]


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


@pytest.fixture(autouse=True)
def flushed(monkeypatch):
    """Inodes that were flushed to disk, in order; really doing it takes most of a test's time."""
    inodes: list[Any] = []
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.append(os.fstat(fd).st_ino))
    return inodes


# --------------------------------------------------------------- round trips


@pytest.mark.parametrize("form", ["folder", "sharded", "file"])
@pytest.mark.parametrize(
    "mapper",
    [
        mappers.mapper(),
        mappers.mapper(dtype=mx.float16),
        mappers.mapper(dtype=mx.bfloat16, content_space=False),
        mappers.mapper(bits=8),
        mappers.mapper(bits=4),
        mappers.mapper(mappers.geometry(4, heads=4), heads=GROUPS),
        mappers.mapper(heads=[[0], [1]], separate=True),
        mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True, k=3),
    ],
    ids=["f32", "f16", "bf16", "8bit", "4bit", "grouped", "local", "mixed"],
)
def test_what_is_loaded_is_what_was_saved(tmp_path, mapper, form):
    path = tmp_path / ("a.safetensors" if form == "file" else "a")
    out = mapper.save(path, **({"shard_bytes": 3000} if form == "sharded" else {}))
    assert out == path
    loaded = Mapper.load(path)
    assert not any(m.is_loaded for m in loaded.layers)
    assert_same_mapper(mapper, loaded)
    assert loaded.quality == mapper.quality == Quality()
    if form == "file":
        assert os.listdir(tmp_path) == ["a.safetensors"]
    else:
        assert os.listdir(tmp_path) == ["a"]
        assert verify_artifact(path).ok
        shards = [n for n in os.listdir(path) if n.endswith(".safetensors")]
        assert (len(shards) > 1) == (form == "sharded")


def test_a_mapper_of_some_layers_out_of_order(tmp_path):
    mapper = mappers.mapper()
    mapper.layers = [mapper.layers[2], mapper.layers[0]]
    assert_same_mapper(mapper, Mapper.load(mapper.save(tmp_path / "a")))


def test_saving_twice_gives_the_same_bytes(tmp_path):
    mapper = mappers.mapper(bits=4)
    first = tree(mapper.save(tmp_path / "a"))
    again = tree(Mapper.load(tmp_path / "a").save(tmp_path / "b"))
    assert first == again and set(first) == {
        "mapper.safetensors",
        "mapper_config.json",
        "README.md",
        "index.json",
    }


def test_another_safetensors_reader_sees_the_documented_tensors(tmp_path):
    mapper = mappers.mapper()
    mapper.save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a/mapper.safetensors", "numpy") as file:
        names = {
            f"layers.{layer}.{kind}.{part}"
            for layer in range(3)
            for kind in ("keys", "values")
            for part in ("weight", "bias")
        }
        assert set(file.keys()) == names
        for m in mapper.layers:
            for kind in ("keys", "values"):
                got = file.get_tensor(f"layers.{m.target_layer}.{kind}.weight")
                assert np.array_equal(got, np.array(getattr(m, kind).weight))
        assert json.loads(file.metadata()["config"]) == json.loads(
            (tmp_path / "a/mapper_config.json").read_text()
        )
    arrays = mx.load(str(tmp_path / "a/mapper.safetensors"))
    assert mappers.same(arrays["layers.1.values.bias"], mapper.layers[1].values.bias)


def test_quantised_tensors_have_the_documented_names(tmp_path):
    mapper = mappers.mapper(bits=4)
    mapper.save(tmp_path / "a.safetensors")
    arrays = mx.load(str(tmp_path / "a.safetensors"))
    stem = "layers.0.keys.weight"
    full = mx.dequantize(
        *(arrays[f"{stem}.{p}"] for p in ("packed", "scales", "biases")), group_size=32, bits=4
    )
    assert mappers.same(full.swapaxes(-1, -2), dequantize(mapper.layers[0].keys.weight))


def test_shards_keep_to_their_size_and_the_index_says_where(tmp_path):
    mapper = mappers.mapper(mappers.geometry(6, dim=32), mappers.geometry(5, dim=32))
    largest = max(m.keys.weight.nbytes for m in mapper.layers)
    mapper.save(tmp_path / "a", shard_bytes=3 * largest)
    index = json.loads((tmp_path / "a/mapper.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"mapper-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, 6)]
    for name, file in index["weight_map"].items():
        assert name in mx.load(str(tmp_path / "a" / file))
    total = 0
    for file in files:
        size = sum(a.nbytes for a in mx.load(str(tmp_path / "a" / file)).values())
        assert 0 < size <= 3 * largest
        total += size
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16", "8bit", "4bit"])
@pytest.mark.parametrize("start", [{}, {"dtype": mx.bfloat16}, {"bits": 8}])
def test_weights_are_stored_as_asked(tmp_path, weights, start):
    mapper = mappers.mapper(**start)
    Mapper.load(mapper.save(tmp_path / "start")).save(
        tmp_path / "a", weights=weights, group_size=32
    )
    loaded = Mapper.load(tmp_path / "a")
    bits = {"8bit": 8, "4bit": 4}.get(weights)
    dtype = "float16" if bits else weights
    kept = Storage(dtype, bits, 32 if bits else None)
    # A step of the format: half of it is the worst rounding.
    step = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7, "8bit": 1 / 127, "4bit": 1 / 7}
    before = weights_of(mapper)
    for key, after in weights_of(loaded).items():
        want = before[key].astype(mx.float32)
        if "bias" in key[1]:
            assert after.dtype == mx.float32 and mx.array_equal(after, want)
        else:
            limit = step[weights] * mx.abs(want).max().item()
            assert mx.abs(after.astype(mx.float32) - want).max().item() <= limit
    assert all(m.keys.storage == kept and m.values.storage == kept for m in loaded.layers)


def test_quantised_weights_stay_bit_for_bit_what_they_were(tmp_path):
    mapper = mappers.mapper(bits=8)
    mapper.save(tmp_path / "a")
    m = Mapper.load(tmp_path / "a").read_layer(1)
    for kind in ("keys", "values"):
        mine, yours = getattr(mapper.layers[1], kind).weight, getattr(m, kind).weight
        assert isinstance(yours, AffineWeight) and (yours.bits, yours.group_size) == (8, 32)
        assert mappers.same(mine.packed, yours.packed) and mappers.same(mine.scales, yours.scales)


def test_four_bits_take_about_a_quarter(tmp_path):
    mapper = mappers.mapper(mappers.geometry(8, dim=64), mappers.geometry(4, dim=64), k=4)
    sizes = {}
    for weights in ("float16", "4bit"):
        mapper.save(tmp_path / f"{weights}.safetensors", weights=weights)
        sizes[weights] = sum(p.storage.nbytes(p.shape)
                             for m in Mapper.load(tmp_path / f"{weights}.safetensors").layers
                             for p in (m.keys, m.values))  # fmt: skip
    assert 0.27 < sizes["4bit"] / sizes["float16"] < 0.30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "float32, float16, bfloat16, 8bit, 4bit; not 'int3'"),
        ({"weights": "4bit", "group_size": 128}, "64 inputs don't divide into groups of 128"),
        ({"weights": "8bit", "group_size": 16}, "Use a group size of 32, 64 or 128"),
    ],
)
def test_impossible_storage_is_refused_before_any_work(tmp_path, options, message):
    with pytest.raises(GeometryError, match=message):
        mappers.mapper().save(tmp_path / "a", **options)
    assert os.listdir(tmp_path) == []


def test_weights_beyond_float16_are_refused(tmp_path):
    mapper = mappers.mapper()
    mapper.layers[1].keys.weight = mapper.layers[1].keys.weight * 1e6
    with pytest.raises(GeometryError, match="layer 1, keys: .* beyond float16's range"):
        mapper.save(tmp_path / "a", weights="float16")
    assert os.listdir(tmp_path) == []
    mapper.save(tmp_path / "a", weights="bfloat16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_failed_fit_is_not_written(tmp_path, value, kind):
    mapper = mappers.mapper()
    bad = getattr(mapper.layers[2].values, kind)
    bad[0, 0] = value
    with pytest.raises(GeometryError, match="layer 2, values: .* NaN or infinity"):
        mapper.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_nonfinite_is_found_wherever_it_is(dtype):
    limit = float(mx.finfo(dtype).max)
    x = mx.array(np.linspace(-1, 1, 1001), dtype=dtype)
    x[3], x[4] = limit, -limit
    assert _ext.all_finite(x)
    assert _ext.all_finite(mx.zeros((0,), dtype=dtype))
    for value in (math.inf, -math.inf, math.nan):
        y = mx.array(x)
        y[500] = value
        assert not _ext.all_finite(y)
    negative_nan = {4: 0xFFC00000, 2: 0xFFFF}[dtype.size]
    bits = mx.uint32 if dtype.size == 4 else mx.uint16
    assert not _ext.all_finite(mx.array([negative_nan], dtype=bits).view(dtype))


@pytest.mark.parametrize(
    "change",
    [lambda m: m.layers.clear(), lambda m: setattr(m.layers[0].keys, "sources", (9, 9))],
    ids=["no layers", "wrong source"],
)
def test_a_mapper_that_contradicts_itself_is_not_written(tmp_path, change):
    mapper = mappers.mapper()
    change(mapper)
    with pytest.raises(GeometryError):
        mapper.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_unserialisable_information_is_refused_by_name(tmp_path):
    mapper = mappers.mapper()
    mapper.fit["text"] = {"files": [{1, 2}]}
    with pytest.raises(FormatError, match=r"mapper\.fit\.text\.files\[0\] is a set"):
        mapper.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_numbers_of_other_libraries_are_written(tmp_path):
    mapper = mappers.mapper()
    mapper.fit = {"a": np.float32(0.5), "b": np.int64(3), "c": mx.array(2.0), "d": (1, None)}
    mapper.quality = Quality.from_record({"nll": {"gap": float("inf")}})
    loaded = Mapper.load(mapper.save(tmp_path / "a"))
    assert loaded.fit == {"a": 0.5, "b": 3, "c": 2.0, "d": [1, None]}
    assert loaded.quality.record == {"nll": {"gap": None}}


def test_progress_reaches_the_end(tmp_path):
    seen = []
    mappers.mapper().save(tmp_path / "a", progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 12 and seen[-1][0] == seen[-1][1]
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


# ------------------------------------------------------------------- the card


def test_the_card_says_what_was_measured(tmp_path):
    mapper = mappers.mapper()
    mapper.save(tmp_path / "a")
    text = (tmp_path / "a/README.md").read_text()
    assert "**Not evaluated.**" in text
    mapper.quality = Quality.from_record(
        {"nll": {"native": 2.5, "mapped": 2.75}, "verdict": "ship | warn"}
    )
    mapper.save(tmp_path / "a")
    text = (tmp_path / "a/README.md").read_text()
    assert "Not evaluated" not in text
    assert "| nll.mapped | 2.75 |" in text and r"| verdict | ship \| warn |" in text


def test_the_cards_front_matter_is_what_the_hub_reads(tmp_path):
    mapper = mappers.mapper()
    mapper.target_model = replace(mapper.target_model, name="/home/me/small model")
    mapper.save(tmp_path / "a")
    _, front, _ = (tmp_path / "a/README.md").read_text().split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["library_name"] == "mlx" and "mlx" in data["tags"]
    assert data["base_model"] == ["org/large"]  # a local path is no base model


# ----------------------------------------------------------------- the schema


@pytest.mark.parametrize(
    "mapper",
    [
        mappers.mapper(bits=4),
        mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True),
        replace(mappers.mapper(heads=[[1], [0]]), source_model=None, target_model=None),
    ],
)
def test_configurations_satisfy_the_schema(tmp_path, mapper):
    mapper.save(tmp_path / "a")
    config = json.loads((tmp_path / "a/mapper_config.json").read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(config, SCHEMA)


def test_the_documents_example_satisfies_the_schema_and_opens():
    text = (DOCS / "artifact.md").read_text()
    example = json.loads(re.findall(r"```json\n(.*?)```", text, re.S)[0])
    jsonschema.validate(example, SCHEMA)
    mapper = from_config(example, "the example", Mapper)
    assert mapper.layers[0].keys.storage == Storage("float16", 4, 32)
    assert mapper.source.layers[0].rope.freqs[-1] == math.inf


def _edits() -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
    def layer(c):
        return c["layers"][0]

    return [
        ("no format", lambda c: c.pop("format")),
        ("foreign format", lambda c: c.update(format="other")),
        ("no version", lambda c: c.pop("format_version")),
        ("version text", lambda c: c.update(format_version="1")),
        ("version true", lambda c: c.update(format_version=True)),
        ("no layers entry", lambda c: c.pop("layers")),
        ("zero layers", lambda c: c.update(layers=[])),
        ("no geometry", lambda c: c["source"].pop("geometry")),
        ("content_space text", lambda c: c.update(content_space="yes")),
        ("model dtype", lambda c: c["target"]["geometry"].update(dtype="int8")),
        ("no heads", lambda c: c["source"]["geometry"]["layers"][0].update(n_kv_heads=0)),
        ("odd dims", lambda c: c["source"]["geometry"]["layers"][0]["rope"].update(dims=7)),
        ("no base", lambda c: c["source"]["geometry"]["layers"][0]["rope"].pop("base")),
        ("negative layer", lambda c: layer(c).update(target_layer=-1)),
        ("no sources", lambda c: layer(c)["keys"].update(sources=[])),
        ("source text", lambda c: layer(c)["keys"].update(sources=["0", "1"])),
        ("shape of two", lambda c: layer(c)["keys"].update(shape=[2, 64])),
        ("empty group", lambda c: layer(c)["keys"].update(heads=[[], []])),
        ("weights dtype", lambda c: layer(c)["values"]["weights"].update(dtype="float8")),
        ("bits alone", lambda c: layer(c)["values"]["weights"].update(bits=4)),
        ("three bits", lambda c: layer(c)["values"]["weights"].update(bits=3, group_size=32)),
        ("score text", lambda c: layer(c).update(scores=[1])),
        ("fit a list", lambda c: c.update(fit=[])),
    ]


@pytest.mark.parametrize(("name", "edit"), _edits(), ids=[n for n, _ in _edits()])
def test_what_the_schema_refuses_the_reader_refuses(tmp_path, name, edit):
    mappers.mapper().save(tmp_path / "a")
    path = tmp_path / "a/mapper_config.json"
    config = json.loads(path.read_text())
    jsonschema.validate(config, SCHEMA)
    edit(config)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(config)
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError) as caught:
        open_mapper(tmp_path / "a")
    assert "mapper_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["layers"][0]["keys"].update(sources=[0, 7]), "contradicts itself"),
        (lambda c: c["layers"][1].update(target_layer=0), "contradicts itself: .* twice"),
        (lambda c: c["source"]["geometry"]["layers"][0]["rope"].update(dims=32), "more than its"),
        (lambda c: c.update(format_version=2), "version 2; this release reads 1. Upgrade"),
        (lambda c: c.update(format_version=0), "version 0; .* Fit or convert"),
    ],
)
def test_contradictions_and_versions(tmp_path, edit, message):
    mappers.mapper().save(tmp_path / "a")
    path = tmp_path / "a/mapper_config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    kind = VersionError if "version" in message else FormatError
    with pytest.raises(kind, match=message):
        open_mapper(tmp_path / "a")


def test_unknown_entries_are_ignored(tmp_path):
    mappers.mapper().save(tmp_path / "a.safetensors")
    arrays, metadata = mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)
    config = json.loads(metadata["config"])
    config["later"] = {"x": 1}
    config["layers"][0]["keys"]["later"] = 1
    mx.save_safetensors(
        str(tmp_path / "b.safetensors"), arrays, {**metadata, "config": json.dumps(config)}
    )
    assert_same_mapper(
        open_mapper(tmp_path / "a.safetensors"), open_mapper(tmp_path / "b.safetensors")
    )


# --------------------------------------------------------------------- damage


@pytest.fixture
def folder(tmp_path):
    return mappers.mapper(dtype=mx.float16).save(tmp_path / "a")


@pytest.fixture
def sharded(tmp_path):
    return mappers.mapper(dtype=mx.float16).save(tmp_path / "a", shard_bytes=9000)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("mapper-*.safetensors"))


def test_nothing_there(tmp_path):
    for call in (open_mapper, verify_artifact):
        with pytest.raises(MapperNotFoundError, match="no mapper at .* Give the folder"):
            call(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):  # for callers that know only that one
        open_mapper(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["mapper.safetensors", "mapper_config.json"])
def test_a_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FormatError, match=f"{name}.* again|{name} is missing"):
        open_mapper(folder)


def test_a_missing_part(sharded):
    parts(sharded)[1].unlink()
    with pytest.raises(MapperNotFoundError, match="mapper-00002-of-0000. is missing|is missing"):
        open_mapper(sharded)
    report = verify_artifact(sharded)
    assert not report.ok and "missing" in {f.status for f in report.files}


def test_a_part_alone_is_refused(sharded):
    with pytest.raises(FormatError, match="is part 1/.* Give the folder"):
        open_mapper(parts(sharded)[0])


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
@pytest.mark.parametrize("with_index", [True, False])
def test_truncated_weights(folder, keep, with_index):
    path = folder / "mapper.safetensors"
    size = path.stat().st_size
    os.truncate(path, keep if isinstance(keep, int) and keep >= 0 else int(size * abs(keep)) - 1)
    if not with_index:
        (folder / "index.json").unlink()
    with pytest.raises(TruncatedFileError, match="mapper.safetensors"):
        open_mapper(folder)
    with pytest.raises(TruncatedFileError, match="mapper.safetensors"):
        open_mapper(path)


def test_trailing_bytes(folder):
    path = folder / "mapper.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 10)
    with pytest.raises(ChecksumError, match="index.json says"):
        open_mapper(folder)
    with pytest.raises(FormatError, match="10 bytes after its last tensor"):
        open_mapper(path)


def test_one_altered_byte_is_found_by_verify(folder):
    path = folder / "mapper.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert open_mapper(folder).layers  # headers are intact
    report = verify_artifact(folder)
    assert not report.ok
    assert {f.name: f.status for f in report.files}["mapper.safetensors"] == "altered"
    assert "NOT OK" in str(report) and "mapper.safetensors was altered" in str(report)
    with pytest.raises(ChecksumError, match="mapper.safetensors was altered"):
        open_mapper(folder, verify=True)


def test_an_altered_index_is_found_by_verify(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["files"]["mapper_config.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(index))
    assert [type(e) for e in verify_artifact(folder).errors] == [ChecksumError]


def test_a_missing_index_is_an_error_of_verify_only(folder):
    (folder / "index.json").unlink()
    open_mapper(folder)
    report = verify_artifact(folder)
    assert [type(e) for e in report.errors] == [MapperNotFoundError]


def test_weights_that_the_index_leaves_out(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    del index["files"]["mapper.safetensors"]
    path.write_text(json.dumps(index))
    report = verify_artifact(folder)
    assert not report.ok and "mapper.safetensors is not listed" in str(report)


def test_an_edited_card_is_no_damage(folder):
    with open(folder / "README.md", "a") as file:
        file.write("license: mit\n")
    report = open_mapper(folder, verify=True) and verify_artifact(folder)
    assert report.ok and "edited" in {f.status for f in report.files}
    (folder / "README.md").unlink()
    assert open_mapper(folder).layers


def test_verify_of_good_artifacts(folder, tmp_path):
    report = verify_artifact(folder)
    assert report.ok and report.kind == "folder"
    assert {f.status for f in report.files} == {"ok"} and len(report.files) == 3
    assert "OK" in str(report) and "org/large" in str(report) and "never evaluated" in str(report)
    mapper = open_mapper(folder)
    mapper.quality = Quality.from_record({"verdict": "ship"})
    mapper.save(tmp_path / "a.safetensors")
    report = verify_artifact(tmp_path / "a.safetensors")
    assert report.ok and "no checksum" in str(report) and "never evaluated" not in str(report)
    assert open_mapper(folder, verify=True).layers


def test_parts_that_changed_names(sharded):
    one, two = parts(sharded)[:2]
    (sharded / "index.json").unlink()
    one.rename(sharded / "tmp")
    two.rename(one)
    (sharded / "tmp").rename(two)
    with pytest.raises(FormatError, match="doesn't hold the tensors that .*index.json lists"):
        open_mapper(sharded)


def test_a_part_of_another_mapper(sharded, tmp_path):
    other = mappers.mapper(seed=5, dtype=mx.float16)
    other.fit["rows"] = 1
    other.save(tmp_path / "b", shard_bytes=9000)
    (sharded / "index.json").unlink()
    shutil.copy(parts(tmp_path / "b")[1], parts(sharded)[1])
    with pytest.raises(FormatError, match="another configuration"):
        open_mapper(sharded)


def test_the_weights_of_another_mapper_of_the_same_shape(folder, tmp_path):
    """Only the checksum can tell: the configurations are alike."""
    mappers.mapper(seed=5, dtype=mx.float16).save(tmp_path / "b")
    shutil.copy(tmp_path / "b/mapper.safetensors", folder)
    assert open_mapper(folder).layers
    assert [type(e) for e in verify_artifact(folder).errors] == [ChecksumError]


@pytest.mark.parametrize(
    "file", ["../b/mapper-00001-of-00002.safetensors", "/etc/passwd", "..", "", "x.safetensors", 3]
)
def test_part_names_that_lead_elsewhere(sharded, file):
    path = sharded / "mapper.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.0.keys.weight"] = file
    path.write_text(json.dumps(index))
    (sharded / "index.json").unlink()
    with pytest.raises(FormatError, match="no part of a mapper|weight_map that can be read"):
        open_mapper(sharded)


def test_checksum_names_that_lead_elsewhere(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["files"]["../../etc/passwd"] = {"size": 1, "sha256": ""}
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match="no part of a mapper"):
        open_mapper(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mapper_config.json", "{"),
        ("mapper_config.json", ""),
        ("mapper_config.json", "\xff\xfe"),
        ("mapper_config.json", "[" * 100_000),
        ("mapper_config.json", '{"format": "kvgraft", "format": "kvgraft"}'),
        ("mapper_config.json", "[]"),
        ("mapper_config.json", "null"),
        ("index.json", "{]"),
        ("index.json", "[]"),
        ("index.json", '{"files": {"mapper.safetensors": {}}}'),
        ("index.json", '{"files": {"mapper.safetensors": {"size": "x", "sha256": 1}}}'),
        ("mapper.safetensors.index.json", "{}"),
        ("mapper.safetensors.index.json", "nonsense"),
        ("mapper.safetensors.index.json", '{"weight_map": []}'),
    ],
)
def test_unreadable_json(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=name):
        open_mapper(folder)
    assert not verify_artifact(folder).ok


def rewrite(path: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    arrays, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(path), arrays, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("layers.1.keys.bias"), "describes tensor 'layers.1.keys.bias', which"),
        (lambda a: a.update(extra=mx.zeros(3)), "holds tensor 'extra', which"),
        (
            lambda a: a.update({"layers.0.keys.bias": mx.zeros((2, 16))}),
            r"'layers.0.keys.bias' is F32 \(2, 16\), .* says F16",
        ),
        (
            lambda a: a.update({"layers.0.keys.weight": a["layers.0.keys.weight"][:, :32]}),
            r"is F16 \(2, 32, 16\), .* says F16 \(2, 64, 16\)",
        ),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["folder", "file"])
def test_tensors_that_the_configuration_does_not_describe(folder, change, message, whole):
    path = folder / "mapper.safetensors"
    rewrite(path, change)
    (folder / "index.json").unlink()
    with pytest.raises(FormatError, match=message):
        open_mapper(folder if whole else path)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nan_in_the_weights(folder, value):
    def poison(arrays):
        arrays["layers.1.values.weight"][1, 5, 5] = value

    rewrite(folder / "mapper.safetensors", poison)
    (folder / "index.json").unlink()
    mapper = open_mapper(folder)
    mapper.load_layer(0)
    for read in (mapper.load_layer, mapper.read_layer):
        with pytest.raises(FormatError, match="'layers.1.values.weight' holds NaN or infinity"):
            read(1)
    assert not mapper.layers[1].is_loaded
    report = verify_artifact(folder / "mapper.safetensors")
    assert not report.ok and "NaN" in str(report)


def raw_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{broken", b"", "header of .* is not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "a key appears twice"),
        ({"a": 1}, b"", "describes tensor 'a' in a way"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "describes tensor 'a' in a way"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"0000", "in a way"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"0000", "in a way"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"0000", "in a way"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000", "takes 8"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"0" * 8, "a gap"),
        (
            {x: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for x in "ab"},
            b"0000",
            "an overlap",
        ),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ that isn't text"),
        ({"__metadata__": ["a"]}, b"", "__metadata__ that isn't text"),
        ({"__metadata__": {"format": "kvgraft", "config": "{"}}, b"", "configuration in .* JSON"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, header, data, message):
    with pytest.raises(FormatError, match=message):
        open_mapper(raw_header(tmp_path / "x.safetensors", header, data))


def test_no_prefix_and_no_flipped_header_byte_escapes(tmp_path):
    """Whatever the damage: a typed error, or a mapper that verify then judges."""
    mapper = mappers.mapper(mappers.geometry(2, 1, 4), mappers.geometry(1, 1, 4), k=1)
    mapper.fit, mapper.source_model, mapper.target_model = {}, None, None
    path = mapper.save(tmp_path / "a") / "mapper.safetensors"
    (tmp_path / "a/index.json").unlink()
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    rng = np.random.default_rng(0)
    with open(path, "r+b") as file:
        sizes = {*range(20), *range(header - 3, header + 3), *rng.integers(len(data), size=60)}
        for size in sorted(map(int, sizes), reverse=True):
            file.truncate(size)
            with pytest.raises(TruncatedFileError):
                open_mapper(path)
        opened = 0
        for at in {*range(16), *map(int, rng.integers(header, size=250))}:
            flipped = bytearray(data)
            flipped[at] ^= 1 << int(rng.integers(8))
            file.seek(0)
            file.write(flipped)
            file.flush()
            try:
                open_mapper(path).read_layer(0)
                opened += 1
            except KvgraftError:
                pass
            # The folder has the configuration twice, and the copies disagree.
            try:
                assert open_mapper(tmp_path / "a").source == mapper.source
            except FormatError:
                pass
    assert 0 < opened < 130


# ------------------------------------------------------------ foreign things


def _torch_pickle(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)


def _prompt_cache(path: Path) -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
    save_prompt_cache(str(path), [cache], {"model": "x"})


def _model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    mx.save_safetensors(str(path / "model.safetensors"), {"model.norm.weight": mx.zeros(3)})


def _folder(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).write_text("{}")

    return make


def _bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def _tensors(metadata: dict[str, str], *names: str) -> Callable[[Path], None]:
    return lambda path: mx.save_safetensors(
        str(path), {name: mx.zeros((1, 2)) for name in names}, metadata
    )


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a", _folder(), "it is empty"),
        ("a", _folder("notes.txt", "x"), "no mapper_config.json, only notes.txt, x"),
        ("a", _folder("mapper.safetensors"), "mapper_config.json is missing"),
        ("a", _folder("adapter_config.json"), "LoRA adapters"),
        ("a", _folder("ladder__tier0__to__tier2.pt"), "a pickle. It can run code"),
        ("a", _folder("manifest.json"), "only manifest.json"),
        ("a", _model, r"it is a model \(qwen2\), not a mapper"),
        ("a.pt", _torch_pickle, "PyTorch's .pt .* ask its author for safetensors"),
        ("a.pt", _bytes(b"\x80\x02}q\x00." + b"\0" * 20), "Python pickle"),
        ("a.gguf", _bytes(b"GGUF\x03\0\0\0" + b"\0" * 20), "GGUF"),
        ("a", _bytes(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        ("a", _bytes(b"<!DOCTYPE html><html>"), "web page"),
        ("a.npy", _bytes(b"\x93NUMPY\x01\x00" + b"\0" * 20), "NumPy array"),
        ("a.json", _bytes(b'{"format": "kvgraft"}'), "JSON text. Give the folder"),
        ("a", _bytes(b""), "has only 0 bytes"),
        ("a", _bytes(bytes(range(1, 200))), "not a safetensors file"),
        ("a.safetensors", _prompt_cache, "prompt cache"),
        ("a.safetensors", _tensors({}, "0.w_k", "0.b_k"), "VeloxQuant mapper; give the folder"),
        ("a.safetensors", _tensors({"format": "kvbridge"}, "x"), "kvbridge.read"),
        ("a.safetensors", _tensors({}, "key_weight.0"), "kvbridge.read"),
        ("a.safetensors", _tensors({}, "model.layers.0.weight"), "weights of a model"),
        ("a.safetensors", _tensors({}, "model.layers.0.lora_a"), "LoRA"),
        ("a.safetensors", _tensors({"k": "16"}, "w"), "holds no kvgraft configuration"),
    ],
)
def test_foreign_things_are_named(tmp_path, name, make, message):
    path = tmp_path / name
    make(path)
    with pytest.raises(FormatError, match=message) as caught:
        open_mapper(path)
    assert str(path) in str(caught.value)


def test_a_kvbridge_folder_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "kvbridge", "schema_version": 1}')
    with pytest.raises(FormatError, match="it is a kvbridge artifact.*kvbridge.read"):
        open_mapper(tmp_path)


# --------------------------------------------------- laziness, memory, changes


def test_loading_reads_headers_only(folder):
    path = folder / "mapper.safetensors"
    mx.clear_cache()
    before = mx.get_active_memory()
    mapper = open_mapper(folder)
    assert mx.get_active_memory() == before
    # Weights that turn to zeros unseen would show that they had been read already.
    data = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(header)
        file.write(b"\0" * (len(data) - header))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert mx.abs(mapper.read_layer(0).keys.weight).max().item() == 0


def test_unloading_gives_the_memory_back(tmp_path):
    big = mappers.mapper(mappers.geometry(4, 4, 64), mappers.geometry(4, 4, 64), k=4)
    size = big.layers[0].keys.weight.nbytes
    mapper = open_mapper(big.save(tmp_path / "a"))
    del big
    before = mx.get_active_memory()
    for _ in range(3):
        for layer in range(4):
            mapper.load_layer(layer)
            assert mx.get_active_memory() - before >= 2 * size
            mapper.layers[layer].unload()
            assert mx.get_active_memory() - before < size / 10


def test_saving_holds_one_layer_at_a_time(tmp_path):
    big = mappers.mapper(mappers.geometry(8, 4, 64), mappers.geometry(8, 4, 64), k=4)
    layer = 2 * big.layers[0].keys.weight.nbytes
    big.save(tmp_path / "a")
    mapper = open_mapper(tmp_path / "a")
    del big
    before = mx.get_active_memory()
    for weights in (None, "float16", "4bit"):
        mx.reset_peak_memory()
        mapper.save(tmp_path / "b", weights=weights)
        # A layer, one map of it being converted, and buffers of the sixteen-fold smaller.
        assert mx.get_peak_memory() - before < 2.5 * layer
        assert not any(m.is_loaded for m in mapper.layers)


def test_a_file_that_is_replaced_is_not_mixed_with_the_old_one(folder):
    mapper = open_mapper(folder)
    mapper.load_layer(0)
    mappers.mapper(seed=3, dtype=mx.float16).save(folder)
    with pytest.raises(FormatError, match="changed since it was opened. Load the mapper again"):
        mapper.load_layer(1)
    assert open_mapper(folder).load_layer(1).is_loaded


def test_a_file_that_goes_away(folder):
    mapper = open_mapper(folder)
    shutil.rmtree(folder)
    with pytest.raises(MapperNotFoundError, match="is gone since it was opened"):
        mapper.load_layer(1)


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    from kvgraft.files import safetensors as module

    mapper = open_mapper(folder)
    path = folder / "mapper.safetensors"
    monkeypatch.setattr(module, "_stamp", lambda stat: module_stamp)
    module_stamp = mapper.store._found["layers.0.keys.weight"].stamp
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(TruncatedFileError, match="ended while tensor"):
        mapper.load_layer(2)


def test_threads_read_one_mapper(tmp_path):
    mapper = mappers.mapper(mappers.geometry(8), mappers.geometry(8))
    want = weights_of(mapper)
    loaded = open_mapper(mapper.save(tmp_path / "a"))
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(5):
                got = weights_of(loaded)
                wrong.extend(key for key in want if not mappers.same(want[key], got[key]))
                loaded.unload_all()
                for layer in range(8):
                    loaded.load_layer(layer)
        except Exception as error:  # shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# --------------------------------------------------------- writing in place


def test_saving_over_its_own_file(folder):
    mapper = open_mapper(folder)
    mapper.load_layer(1)
    before = weights_of(mapper)
    mapper.save(folder, weights="8bit", group_size=32)
    assert mapper.layers[0].keys.on_disk.bits == 8
    mapper.unload_all()
    after = weights_of(mapper)
    assert after.keys() == before.keys()
    assert mapper.read_layer(0).keys.weight.bits == 8
    mapper.save(folder.parent / "elsewhere", weights="float32")
    assert mapper.layers[0].keys.on_disk.bits == 8


def test_saving_over_its_own_single_file(tmp_path):
    mapper = open_mapper(mappers.mapper().save(tmp_path / "a.safetensors"))
    mapper.quality = Quality.from_record({"verdict": "ship"})
    mapper.save(tmp_path / "a.safetensors")
    assert mapper.read_layer(2).is_loaded
    assert open_mapper(tmp_path / "a.safetensors").quality.record == {"verdict": "ship"}
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_what_the_user_kept_in_the_folder_stays(folder):
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text("ref")
    (folder / "report.html").write_text("<p>")
    mappers.mapper(seed=1).save(folder, shard_bytes=3000)
    assert (folder / ".git/HEAD").read_text() == "ref"
    assert (folder / "report.html").exists()
    assert not (folder / "mapper.safetensors").exists()  # the old form is gone
    assert verify_artifact(folder).ok
    assert os.listdir(folder.parent) == ["a"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a", _model),
        ("a", _folder("thesis.txt")),
        ("a", _folder("mapper_config.json")),
        ("a.safetensors", _tensors({}, "model.layers.0.weight")),
        ("a.safetensors", _bytes(b"precious")),
    ],
)
def test_what_is_no_artifact_is_not_overwritten(tmp_path, name, make):
    path = tmp_path / name
    make(path)
    before = tree(path) if path.is_dir() else path.read_bytes()
    with pytest.raises(FormatError, match="exists and is not overwritten"):
        mappers.mapper().save(path)
    assert (tree(path) if path.is_dir() else path.read_bytes()) == before
    assert os.listdir(tmp_path) == [name]


def test_a_folder_where_a_file_should_be_and_the_reverse(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "b").write_text("x")
    with pytest.raises(ArtifactWriteError, match="is a folder; a file is to be written"):
        mappers.mapper().save(tmp_path / "a.safetensors")
    with pytest.raises(ArtifactWriteError, match="is a file; a folder is to be written"):
        mappers.mapper().save(tmp_path / "b")
    with pytest.raises(ArtifactWriteError, match="Cannot write"):
        mappers.mapper().save(tmp_path / "b" / "c")


def test_files_are_flushed_before_they_take_their_name(tmp_path, flushed, monkeypatch):
    """What a loss of power leaves can't be tested; the order that rules it can."""
    swap = atomic._swap
    monkeypatch.setattr(atomic, "_swap", lambda a, b: (flushed.append("swap"), swap(a, b)))
    mappers.mapper().save(tmp_path / "a")
    flushed.clear()
    mappers.mapper().save(tmp_path / "a")
    folder = tmp_path / "a"
    assert set(flushed[:4]) == {p.stat().st_ino for p in folder.iterdir()}
    assert flushed[4:] == [folder.stat().st_ino, "swap", tmp_path.stat().st_ino]


def test_a_folder_that_cant_be_flushed_after_the_swap_is_in_place(tmp_path, monkeypatch):
    error = OSError(errno.EINVAL, "Invalid argument")
    monkeypatch.setattr(atomic, "_sync", failing(atomic._sync, 1, error))
    mapper = mappers.mapper()
    mapper.save(tmp_path / "a")
    assert_same_mapper(open_mapper(tmp_path / "a"), mapper)


def test_failing_to_move_the_users_files_restores_all(folder, monkeypatch):
    for name in ("x", "y", "z"):
        (folder / name).write_text(name)
    before = tree(folder)
    error = OSError(errno.EIO, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(os.rename, 1, error))
        with pytest.raises(ArtifactWriteError):
            mappers.mapper(seed=2).save(folder)
    left = [p for p in folder.parent.rglob("[xyz]")]
    assert sorted(p.name for p in left) == ["x", "y", "z"]  # wherever they are, they are
    mappers.mapper(seed=1, dtype=mx.float16).save(folder)
    assert tree(folder).keys() == before.keys() and os.listdir(folder.parent) == ["a"]


def test_parents_are_made_and_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "x/y").mkdir(parents=True)
    mappers.mapper().save(tmp_path / "x/y")
    mappers.mapper().save(tmp_path / "p/q/r.safetensors")
    assert (
        verify_artifact(tmp_path / "x/y").ok and verify_artifact(tmp_path / "p/q/r.safetensors").ok
    )


def test_a_link_to_a_folder_stays_a_link(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    mapper = open_mapper(link)
    mapper.fit["rows"] = 7
    mapper.save(link)
    assert link.is_symlink() and open_mapper(folder).fit["rows"] == 7
    assert mapper.read_layer(0).is_loaded


def test_files_that_are_links_into_a_download_cache(folder):
    """As the hub's cache lays a snapshot out."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    mapper = open_mapper(folder)
    assert verify_artifact(folder).ok and mapper.read_layer(0).is_loaded
    mapper.save(folder)
    assert mapper.read_layer(0).is_loaded and verify_artifact(folder).ok
    assert (blobs / "mapper.safetensors").exists()


def failing(call: Callable[..., Any], after: int, error: BaseException) -> Callable[..., Any]:
    """Lets a number of calls through and then fails every one."""
    left = [after]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **kwargs)

    return wrapped


ERRORS = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
    "denied": (PermissionError(errno.EACCES, "Permission denied"), "not permitted"),
    "broken": (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    "ctrl-c": (KeyboardInterrupt(), None),
}


@pytest.mark.parametrize(
    ("form", "error"),
    [*((form, e) for form in ("folder", "sharded", "file") for e in ("full", "ctrl-c")),
     *(("folder", e) for e in ("quota", "denied", "broken"))],
)  # fmt: skip
def test_a_save_that_fails_leaves_the_old_artifact(tmp_path, monkeypatch, form, error):
    """Fail at every tensor, at every flush and at every other step in turn."""
    path = tmp_path / ("a.safetensors" if form == "file" else "a")
    old = mappers.mapper(seed=1)
    old.save(path)
    before = path.read_bytes() if form == "file" else tree(path)
    new = mappers.mapper(seed=2)
    raised, message = ERRORS[error]
    options = {"shard_bytes": 9000} if form == "sharded" else {}
    steps = [
        (Writer, "write", 12),
        (os, "fsync", 3 if form != "file" else 1),
        (atomic, "_sync" if form != "file" else "check_space", 1),
        (atomic, "_swap", 1) if form != "file" else (os, "replace", 1),
    ]
    for owner, name, count in steps:
        for after in range(count):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing(getattr(owner, name), after, raised))
                if message is None:
                    with pytest.raises(KeyboardInterrupt):
                        new.save(path, **options)
                else:
                    with pytest.raises(ArtifactWriteError, match=message) as caught:
                        new.save(path, **options)
                    assert caught.value.errno == raised.errno
                    assert str(path) in str(caught.value)
            assert (path.read_bytes() if form == "file" else tree(path)) == before, (name, after)
            assert os.listdir(tmp_path) == [path.name]
    assert_same_mapper(open_mapper(path), old)
    new.save(path, **options)
    assert_same_mapper(open_mapper(path), new)


def test_a_first_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Writer, "write", failing(Writer.write, 5, error))
    for name in ("a", "a.safetensors"):
        with pytest.raises(ArtifactWriteError):
            mappers.mapper().save(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_known_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ArtifactWriteError, match="0.00 GB free; .* are needed") as caught:
        mappers.mapper().save(tmp_path / "a")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_full_disk_for_real(tmp_path):
    """A file size limit is as near as a test gets: the kernel refuses the write."""
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
import mappers
from kvgraft.errors import ArtifactWriteError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
mapper = mappers.mapper(seed=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    mapper.save(sys.argv[1])
except ArtifactWriteError as error:
    print(error)
else:
    sys.exit("no error")
"""
    old = mappers.mapper(seed=1)
    old.save(tmp_path / "a")
    args = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "a"),
        str(Path(__file__).parents[1] / "helpers"),
    ]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Cannot write" in done.stdout
    assert_same_mapper(open_mapper(tmp_path / "a"), old)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("form", ["a", "a.safetensors"])
def test_kill_in_the_middle_leaves_the_old_artifact(tmp_path, form):
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import mappers
def stop(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
mappers.mapper(seed=2).save(sys.argv[1], progress=stop)
"""
    old = mappers.mapper(seed=1)
    old.save(tmp_path / form)
    args = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / form),
        str(Path(__file__).parents[1] / "helpers"),
    ]
    assert subprocess.run(args).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2  # the unfinished one is hidden beside it
    assert_same_mapper(open_mapper(tmp_path / form), old)
    mappers.mapper(seed=3).save(tmp_path / form)
    assert os.listdir(tmp_path) == [form]  # and the next save clears it away


def test_a_save_in_progress_is_not_cleared_away(tmp_path):
    """Another save to the same place leaves the first one's work alone; the last one wins."""
    seen = []

    def meanwhile(done: int, total: int) -> None:
        if not seen:
            seen.append(done)
            mappers.mapper(seed=2).save(tmp_path / "a")

    first = mappers.mapper(seed=1)
    first.save(tmp_path / "a", progress=meanwhile)
    assert_same_mapper(open_mapper(tmp_path / "a"), first)
    assert os.listdir(tmp_path) == ["a"]


def test_without_an_atomic_exchange(folder, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    (folder / "notes").write_text("x")
    new = mappers.mapper(seed=2)
    real = os.rename
    calls = []

    def rename(a: Any, b: Any) -> None:
        calls.append((Path(a).name, Path(b).name))
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(a, b)

    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(ArtifactWriteError):
            new.save(folder)
    assert tree(folder) == before and os.listdir(folder.parent) == ["a"]
    new.save(folder)
    assert_same_mapper(open_mapper(folder), new)
    assert (folder / "notes").exists() and os.listdir(folder.parent) == ["a"]


def test_the_exchange_is_atomic_here(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "b") == ["a"]
    assert not atomic._exchange(tmp_path / "a", tmp_path / "nothing")


def test_dying_between_the_two_renames_loses_nothing(folder):
    """On a file system without the exchange."""
    folder.rename(folder.parent / ".a.previous")
    with pytest.raises(MapperNotFoundError, match="interrupted .* Rename it back"):
        open_mapper(folder)


# ------------------------------------------------------------- the right pair


def _other_rope(g: ModelGeometry, **changes: Any) -> ModelGeometry:
    layer = g.layers[1]
    layers = list(g.layers)
    layers[1] = replace(layer, rope=replace(layer.rope, **changes))
    return replace(g, layers=tuple(layers))


def test_the_right_pair_passes():
    m = mappers.mapper(mappers.mixed_source(), mappers.mixed_target())
    assert check_pair(m) == []
    assert check_pair(m, source=m.source, target=m.target, source_model=m.source_model,
                      target_model=m.target_model) == []  # fmt: skip


def test_precision_is_reported_and_not_refused():
    m = mappers.mapper()
    notes = check_pair(
        m,
        source=replace(m.source, dtype="bfloat16"),
        source_model=replace(m.source_model, name="copy", quantization=None),
    )
    assert len(notes) == 2 and "bfloat16" in notes[0] and "quantization None" in notes[1]


def test_last_bits_of_frequencies_do_not_matter():
    m = mappers.mapper(mappers.mixed_source(), mappers.mixed_target())
    first = m.source.layers[0]
    nudged = tuple(f * (1 + 1e-7) for f in first.rope.freqs)
    layers = (replace(first, rope=replace(first.rope, freqs=nudged)), *m.source.layers[1:])
    assert check_pair(m, source=replace(m.source, layers=layers)) == []


def test_an_unknown_identity_is_not_compared():
    m = replace(mappers.mapper(), source_model=None)
    assert check_pair(m, source_model=ModelIdentity("x", "y", "z")) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m: {"source": replace(m.source, layers=m.source.layers[:3])},
         "source: 3 layers, the mapper's has 4"),
        (lambda m: {"source": m.target, "target": m.source}, "source: 3 layers.*\n.*target: "),
        (lambda m: {"target": mappers.geometry(3, heads=4)}, "target: layer 0: n_kv_heads 4, the"),
        (lambda m: {"target": mappers.geometry(3, dim=8)}, "key_dim 8, the mapper's is 16"),
        (lambda m: {"target": replace(m.target, model_type="other")}, "architecture other"),
        (lambda m: {"source": _other_rope(m.source, base=5e5)},
         "source: layer 1: RoPE base 500000.0, the mapper's is 10000.0"),
        (lambda m: {"source": _other_rope(m.source, scale=0.5)}, "RoPE scale 0.5"),
        (lambda m: {"source": _other_rope(m.source, traditional=True)}, "RoPE traditional True"),
        (lambda m: {"source": _other_rope(m.source, magnitude=1.1)}, "RoPE magnitude 1.1"),
        (lambda m: {"source": _other_rope(m.source, dims=8)}, "RoPE dims 8"),
        (lambda m: {"source": _other_rope(m.source, base=None, freqs=(1.0,) * 8)},
         "RoPE base None.*\n.*frequencies differ"),
        (lambda m: {"target": replace(m.target, layers=tuple(
            replace(x, window=8) for x in m.target.layers))}, "window 8, the mapper's is None"),
        (lambda m: {"source_model": replace(m.source_model, config_sha256="f" * 64)},
         "another configuration than org/large .ffffffffffff against aaaaaaaaaaaa"),
        (lambda m: {"target_model": replace(m.target_model, tokenizer_sha256="f" * 64)},
         "target: org/small has another tokenizer"),
    ],
)  # fmt: skip
def test_another_pair_is_refused_by_what_differs(given, message):
    m = mappers.mapper()
    with pytest.raises(PairMismatchError, match=message):
        check_pair(m, **given(m))


def test_many_differences_are_summed_up():
    m = mappers.mapper(mappers.geometry(30), mappers.geometry(2))
    with pytest.raises(PairMismatchError, match="and 112 more"):
        check_pair(m, source=mappers.geometry(30, heads=1, dim=8, rope=RopeSpec(16, base=2.0)),
                   target=m.target)  # fmt: skip


def test_foreign_linear_maps_do_not_gain_a_file():
    part = LinearMap.of([0], mx.zeros((1, 2, 2)), mx.zeros((1, 2)))
    assert part.on_disk is None
