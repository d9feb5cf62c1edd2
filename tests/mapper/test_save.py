"""Artifacts as they are written: content, and replacing what is there."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mappers
import mlx.core as mx
import numpy as np
import pytest
import safetensors
from artifacts import (
    assert_same_mapper,
    file_of,
    folder_of,
    model_folder,
    tensors_of,
    tree,
    weights_of,
)

from kvgraft import _ext
from kvgraft.errors import (
    ArtifactWriteError,
    FormatError,
    GeometryError,
    MapperNotFoundError,
)
from kvgraft.files import atomic
from kvgraft.files.safetensors import Writer
from kvgraft.mapper.linear_map import Storage
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.verify import verify_artifact
from kvgraft.ops.quantized import AffineWeight, dequantize

GROUPS = [[0, 1], [2, 3]]


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
        tmp_path / "a", weight_format=weights, group_size=32
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
        mapper.save(tmp_path / f"{weights}.safetensors", weight_format=weights)
        sizes[weights] = sum(p.storage.nbytes(p.shape)
                             for m in Mapper.load(tmp_path / f"{weights}.safetensors").layers
                             for p in (m.keys, m.values))  # fmt: skip
    assert 0.27 < sizes["4bit"] / sizes["float16"] < 0.30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "int3"}, "float32, float16, bfloat16, 8bit, 4bit; not 'int3'"),
        ({"weight_format": "4bit", "group_size": 128}, "64 inputs don't divide into groups of 128"),
        ({"weight_format": "8bit", "group_size": 16}, "Use a group size of 32, 64 or 128"),
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
        mapper.save(tmp_path / "a", weight_format="float16")
    assert os.listdir(tmp_path) == []
    mapper.save(tmp_path / "a", weight_format="bfloat16")


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


def test_saving_over_its_own_file(folder):
    mapper = open_mapper(folder)
    mapper.load_layer(1)
    before = weights_of(mapper)
    mapper.save(folder, weight_format="8bit", group_size=32)
    assert mapper.layers[0].keys.on_disk.bits == 8
    mapper.unload_all()
    after = weights_of(mapper)
    assert after.keys() == before.keys()
    assert mapper.read_layer(0).keys.weight.bits == 8
    mapper.save(folder.parent / "elsewhere", weight_format="float32")
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
        ("a", model_folder),
        ("a", folder_of("thesis.txt")),
        ("a", folder_of("mapper_config.json")),
        ("a.safetensors", tensors_of({}, "model.layers.0.weight")),
        ("a.safetensors", file_of(b"precious")),
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


def test_dying_between_the_two_renames_loses_nothing(folder):
    """On a file system without the exchange."""
    folder.rename(folder.parent / ".a.previous")
    with pytest.raises(MapperNotFoundError, match="interrupted .* Rename it back"):
        open_mapper(folder)
