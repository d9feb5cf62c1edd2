"""Artifacts as they are opened: damage, foreign things, lazy weights."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mappers
import mlx.core as mx
import numpy as np
import pytest
from artifacts import file_of, folder_of, model_folder, parts, tensors_of, weights_of
from mlx_lm.models.cache import KVCache, save_prompt_cache

from kvgraft.errors import (
    ChecksumError,
    FormatError,
    KvgraftError,
    MapperNotFoundError,
    TruncatedFileError,
)
from kvgraft.mapper.mapper import open_mapper
from kvgraft.mapper.verify import verify_artifact


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


def _torch_pickle(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)


def _prompt_cache(path: Path) -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)))
    save_prompt_cache(str(path), [cache], {"model": "x"})


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a", folder_of(), "it is empty"),
        ("a", folder_of("notes.txt", "x"), "no mapper_config.json, only notes.txt, x"),
        ("a", folder_of("mapper.safetensors"), "mapper_config.json is missing"),
        ("a", folder_of("adapter_config.json"), "LoRA adapters"),
        ("a", folder_of("ladder__tier0__to__tier2.pt"), "a pickle. It can run code"),
        ("a", folder_of("manifest.json"), "only manifest.json"),
        ("a", model_folder, r"it is a model \(qwen2\), not a mapper"),
        ("a.pt", _torch_pickle, "PyTorch's .pt .* ask its author for safetensors"),
        ("a.pt", file_of(b"\x80\x02}q\x00." + b"\0" * 20), "Python pickle"),
        ("a.gguf", file_of(b"GGUF\x03\0\0\0" + b"\0" * 20), "GGUF"),
        ("a", file_of(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
        ("a", file_of(b"<!DOCTYPE html><html>"), "web page"),
        ("a.npy", file_of(b"\x93NUMPY\x01\x00" + b"\0" * 20), "NumPy array"),
        ("a.json", file_of(b'{"format": "kvgraft"}'), "JSON text. Give the folder"),
        ("a", file_of(b""), "has only 0 bytes"),
        ("a", file_of(bytes(range(1, 200))), "not a safetensors file"),
        ("a.safetensors", _prompt_cache, "prompt cache"),
        ("a.safetensors", tensors_of({}, "0.w_k", "0.b_k"), "VeloxQuant mapper; give the folder"),
        ("a.safetensors", tensors_of({"format": "kvbridge"}, "x"), "kvbridge.read"),
        ("a.safetensors", tensors_of({}, "key_weight.0"), "kvbridge.read"),
        ("a.safetensors", tensors_of({}, "model.layers.0.weight"), "weights of a model"),
        ("a.safetensors", tensors_of({}, "model.layers.0.lora_a"), "LoRA"),
        ("a.safetensors", tensors_of({"k": "16"}, "w"), "holds no kvgraft configuration"),
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
        mapper.save(tmp_path / "b", weight_format=weights)
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
