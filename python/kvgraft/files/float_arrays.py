"""Large float arrays on disk: streamed out, atomically put in place, mapped back in.

The files are plain safetensors. They are written here because the library's own
writer first makes a copy of every tensor in memory, and moments can fill half
the machine.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError, FormatError, TruncatedFileError

__all__ = ["read_tensors", "write_tensors"]

_DTYPES: dict[str, Any] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 << 20


def write_tensors(
    path: Path, tensors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file; the old file, if any, stays until the new one is whole.

    Raises:
        FitError: If it cannot be written, for example because the disk is full.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the mapped arrays come out aligned
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for array in tensors.values():
                np.ascontiguousarray(array).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FitError(
            f"Cannot write {path} ({offset / 1e6:,.1f} MB): "
            # NumPy says how much it wrote, and not why it stopped.
            f"{error.strerror or 'the disk is full'}. Free some space or choose another folder; "
            "what was saved before is kept."
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """Map a file written by :func:`write_tensors` into memory, read-only.

    Raises:
        FormatError: If it is not such a file.
        TruncatedFileError: If it is shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise FormatError(f"{path} is not a safetensors file.")
            header = json.loads(file.read(length))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"Cannot read {path}: {error}.") from error
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, NDArray[np.generic]] = {}
    for name, item in header.items():
        if item["dtype"] not in _DTYPES:
            raise FormatError(f"{path}: tensor {name} has dtype {item['dtype']}.")
        begin, end = item["data_offsets"]
        if 8 + length + end > size:
            raise TruncatedFileError(f"{path} is truncated: tensor {name} ends past its end.")
        dtype: np.dtype[np.generic] = _DTYPES[item["dtype"]]
        count = int(np.prod(item["shape"]))
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=8 + length + begin)
        tensors[name] = flat.reshape(item["shape"])
    return tensors, metadata
