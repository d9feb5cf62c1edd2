"""One reader and one writer, for MLX arrays and for NumPy's."""

from __future__ import annotations

import errno

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from kvgraft.errors import ArtifactWriteError, FormatError, TruncatedFileError
from kvgraft.files.safetensors import (
    Writer,
    map_arrays,
    read_header,
    read_tensors,
    write_arrays,
)

ARRAYS = {
    "double": np.arange(12.0).reshape(3, 4).T,  # not contiguous
    "single": np.arange(5, dtype=np.float32),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3)),
}


def test_numpy_arrays_are_mapped_back_aligned(tmp_path):
    path = tmp_path / "a.safetensors"
    write_arrays(path, ARRAYS, {"made": "here"})
    found, metadata = map_arrays(path)
    assert metadata == {"made": "here"} and found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
        assert not found[name].flags.writeable
    assert found["double"].ctypes.data % 64 == 0
    with safe_open(path, "np") as file:
        assert np.array_equal(file.get_tensor("double"), ARRAYS["double"])


def test_a_file_of_arrays_is_read_like_any_other(tmp_path):
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"single": ARRAYS["single"]}, {})
    header = read_header(path)
    assert read_tensors(header, ["single"])["single"].tolist() == [0, 1, 2, 3, 4]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedFileError):
        map_arrays(path)


def test_other_dtypes_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with Writer(path, [("x", "BF16", (2,))], {}) as writer:
        writer.write("x", mx.zeros(2, dtype=mx.bfloat16))
    with pytest.raises(FormatError, match="BF16"):
        map_arrays(path)
    with pytest.raises(KeyError):
        write_arrays(path, {"x": np.zeros(2, dtype=np.int32)}, {})


def test_arrays_must_be_those_announced(tmp_path):
    writer = Writer(tmp_path / "a", [("x", "F64", (2,)), ("y", "F32", (1,))], {})
    with pytest.raises(FormatError, match="announced as F64"):
        writer.write("x", np.zeros(2, dtype=np.float32))
    with pytest.raises(FormatError, match="'y' was announced but not written"):
        writer.close()


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    def full(self, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.safetensors"
    write_arrays(path, ARRAYS, {})
    before = path.read_bytes()
    monkeypatch.setattr(Writer, "_put", full)
    with pytest.raises(ArtifactWriteError, match="the disk is full"):
        write_arrays(path, ARRAYS, {})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
