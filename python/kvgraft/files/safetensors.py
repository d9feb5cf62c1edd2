"""safetensors files, read and written tensor by tensor.

A file is an 8-byte little-endian length, a JSON header of that length, and the
tensors' bytes. kvgraft reads the header itself: it has to tell a truncated file
from a foreign one, and to check names, shapes and dtypes before it touches any
data. It reads tensors straight into MLX's buffers, because ``mx.load`` reports
nothing when a read comes up short after the file was opened; or maps them into
memory as NumPy arrays (:func:`map_arrays`). It writes them itself because the
library's own writer first copies every tensor, and moments can fill half the
machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FormatError, MapperNotFoundError, TruncatedFileError
from kvgraft.files.atomic import replacing_file
from kvgraft.files.reading import read_json
from kvgraft.files.recognise import describe_bytes

__all__ = [
    "Header",
    "TensorInfo",
    "Writer",
    "map_arrays",
    "read_ahead",
    "read_header",
    "read_tensors",
    "write_arrays",
]

MAX_HEADER = 100_000_000
"""Longest header that the safetensors format allows, in bytes."""

_CHUNK = 16 << 20

_F_RDADVISE = 44  # of macOS's <sys/fcntl.h>; Python's fcntl doesn't name it
_ADVICE = 1 << 30  # bytes; the length is an int

# Bytes per element of every dtype the format knows, so that any file is checked.
_ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

MX_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32}
"""The dtypes that an artifact may hold, by their name in the file."""

_NAMES = {dtype: name for name, dtype in MX_DTYPES.items()}

_NP_DTYPES: dict[str, np.dtype[Any]] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4")}
_NP_NAMES = {dtype: name for name, dtype in _NP_DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: The format's name of the dtype (``F16``, ``BF16``, …).
        shape: Its shape.
        start: First byte, counted from the start of the file.
        stop: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself.

    Attributes:
        path: The file.
        tensors: By name.
        metadata: The ``__metadata__`` entries.
        stamp: Inode, size and modification time when it was read; a file that
            changed since is not read from.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    stamp: tuple[int, int, int]

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.stamp[1]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header; no tensor is read.

    Raises:
        MapperNotFoundError: If there is no such file.
        TruncatedFileError: If the file is shorter than its header says.
        FormatError: If it is no safetensors file, or its header contradicts
            itself.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            start = file.read(64)
            length = int.from_bytes(start[:8], "little")
            rest = b""
            if len(start) >= 8 and 2 <= length <= MAX_HEADER:
                file.seek(8)
                rest = file.read(min(length, stat.st_size))
    except FileNotFoundError as error:
        raise MapperNotFoundError(f"There is no file {path}.") from error
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error.strerror}.") from error

    # Only now: the length of a good header can begin like a pickle does.
    if rest[:1] != b"{":
        foreign = describe_bytes(start)
        if foreign is None and stat.st_size <= 8:
            raise TruncatedFileError(
                f"{path} has only {stat.st_size} bytes. The copy or download was cut short: get "
                "the file again."
            )
        raise FormatError(f"{path} is not a safetensors file{': ' + foreign if foreign else '.'}")
    if len(rest) < length:
        raise TruncatedFileError(
            f"{path} ends inside its header ({stat.st_size} bytes). The copy or download was cut "
            "short: get the file again."
        )
    content = read_json(rest, f"The header of {path}")
    metadata = content.pop("__metadata__", None) or {}  # MLX writes null for none
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"The header of {path} has a __metadata__ that isn't text.")
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in content.items()}
    _check_extent(path, tensors, 8 + length, stat.st_size)
    return Header(path, tensors, metadata, _stamp(stat))


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        item = _ITEM_SIZES[dtype]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError("negative or fractional number")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"The header of {path} describes tensor {name!r} in a way that can't be read."
        ) from error
    if stop - start != math.prod(shape) * item:
        raise FormatError(
            f"The header of {path} gives tensor {name!r} {stop - start} bytes; "
            f"{dtype} {tuple(shape)} takes {math.prod(shape) * item}. The file is damaged."
        )
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_extent(path: Path, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """The tensors must fill the file: no hole, no overlap, nothing missing or left over."""
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            raise FormatError(
                f"The header of {path} leaves a gap or an overlap before tensor {name!r}. "
                "The file is damaged."
            )
        end = info.stop
    if size < end:
        raise TruncatedFileError(
            f"{path} has {size} bytes, its header says {end}. The copy or download was cut "
            "short: get the file again."
        )
    if size > end:
        raise FormatError(
            f"{path} has {size - end} bytes after its last tensor. The file is damaged: get it "
            "again."
        )


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_tensors(header: Header, names: Iterable[str]) -> dict[str, mx.array]:
    """Read some tensors, evaluated and independent of the file.

    Raises:
        FormatError: If the file changed since its header was read, cannot be
            read, or holds a dtype that artifacts don't use.
    """
    out = {}
    try:
        with open(header.path, "rb", buffering=0) as file:
            if _stamp(os.fstat(file.fileno())) != header.stamp:
                raise FormatError(
                    f"{header.path} changed since it was opened. Load the mapper again."
                )
            for name in names:
                out[name] = _read_tensor(file, header, name)
    except FileNotFoundError as error:
        raise MapperNotFoundError(
            f"{header.path} is gone since it was opened. Put it back, or load the mapper again."
        ) from error
    except OSError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"Cannot read {header.path}: {error.strerror}.") from error
    mx.eval(list(out.values()))
    return out


def _read_tensor(file: Any, header: Header, name: str) -> mx.array:
    info = header.tensors[name]
    dtype = MX_DTYPES.get(info.dtype)
    if dtype is None:
        raise FormatError(f"{header.path}: tensor {name!r} is {info.dtype}, which isn't used here.")
    if info.stop == info.start:
        return mx.zeros(info.shape, dtype=dtype)
    raw = mx.zeros(info.stop - info.start, dtype=mx.uint8, stream=mx.cpu)
    mx.eval(raw)
    with _bytes_of(raw) as view:
        file.seek(info.start)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise TruncatedFileError(
                    f"{header.path} ended while tensor {name!r} was read. The file was cut short "
                    "since it was opened: get it again."
                )
            done += count
    return raw.view(dtype).reshape(info.shape)


def map_arrays(path: Path) -> tuple[dict[str, NDArray[np.generic]], dict[str, str]]:
    """Map a file of float32 and float64 tensors into memory, read-only.

    Returns:
        The arrays by name, and the ``__metadata__`` entries.

    Raises:
        FormatError: As :func:`read_header`; or if a tensor has another dtype, or
            the file changed meanwhile.
    """
    header = read_header(path)
    try:
        with path.open("rb") as file:
            if _stamp(os.fstat(file.fileno())) != header.stamp:
                raise FormatError(f"{path} changed while it was read.")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error.strerror}.") from error
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, info in header.tensors.items():
        if info.dtype not in _NP_DTYPES:
            raise FormatError(f"{path}: tensor {name!r} is {info.dtype}, which isn't used here.")
        dtype, count = _NP_DTYPES[info.dtype], math.prod(info.shape)
        flat = np.frombuffer(data, dtype=dtype, count=count, offset=info.start)
        arrays[name] = flat.reshape(info.shape)
    return arrays, header.metadata


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]
) -> None:
    """Write float32 and float64 arrays so that :func:`map_arrays` gives them aligned.

    An existing file is replaced in one step.

    Raises:
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    tensors = [
        (name, _NP_NAMES[array.dtype.newbyteorder("<")], array.shape)
        for name, array in arrays.items()
    ]
    with replacing_file(path) as fresh:
        with Writer(fresh, tensors, metadata, align=64, digest=False) as writer:
            for name, array in arrays.items():
                writer.write(name, array)


def read_ahead(header: Header, name: str) -> None:
    """Ask the operating system to read a tensor into its page cache, without waiting.

    An advice: it takes no memory of the process, and where the system knows no
    such call, or the file is gone, nothing happens.
    """
    info = header.tensors[name]
    try:
        with open(header.path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                size = info.stop - info.start
                os.posix_fadvise(file.fileno(), info.start, size, os.POSIX_FADV_WILLNEED)
            elif sys.platform == "darwin":
                import fcntl

                for start in range(info.start, info.stop, _ADVICE):
                    # struct radvisory of <sys/fcntl.h>: off_t, int.
                    advice = struct.pack("qi4x", start, min(_ADVICE, info.stop - start))
                    fcntl.fcntl(file.fileno(), _F_RDADVISE, advice)
    except OSError:
        pass


def _bytes_of(array: mx.array) -> memoryview:
    """The memory of an evaluated, contiguous array; writing to it changes the array."""
    return memoryview(array).cast("B")  # type: ignore[arg-type]  # has the buffer protocol


class Writer:
    """Write a safetensors file in one pass, one tensor in memory at a time.

    The header has to come first, so names, dtypes and shapes are given up
    front and the tensors must follow in that order.

    Args:
        path: The file, which must not exist.
        tensors: ``(name, dtype, shape)`` of each; dtypes by the format's names.
        metadata: The ``__metadata__`` entries.
        align: The data begin on a multiple of so many bytes. Readers that map the
            file want at least 8.
        digest: Compute :attr:`sha256`.

    Attributes:
        size: Size of the whole file in bytes, known from the start.
        sha256: Digest of the file; set by :meth:`close`, ``""`` without ``digest``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, str],
        *,
        align: int = 8,
        digest: bool = True,
    ) -> None:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, dtype, shape in tensors:
            stop = offset + _ITEM_SIZES[dtype] * math.prod(shape)
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
        text += b" " * (-(8 + len(text)) % align)
        if len(text) > MAX_HEADER:
            raise FormatError(f"The header of {path} would be {len(text)} bytes long.")
        self.size = 8 + len(text) + offset
        self.sha256 = ""
        self._left = list(tensors)
        self._digest = hashlib.sha256() if digest else None
        self._file: BinaryIO = open(path, "xb")  # noqa: SIM115
        try:
            self._put(memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, array: mx.array | NDArray[np.generic]) -> None:
        """Write the next tensor; it must be the one announced."""
        want = self._left.pop(0)
        if isinstance(array, mx.array):
            dtype = _NAMES.get(array.dtype)
        else:
            dtype = _NP_NAMES.get(array.dtype.newbyteorder("<"))
        if (name, dtype, tuple(array.shape)) != want:
            raise FormatError(
                f"Tensor {want[0]!r} was announced as {want[1]} {want[2]}, but {name!r} is "
                f"{array.dtype} {tuple(array.shape)}."
            )
        if array.size == 0:
            return
        if not isinstance(array, mx.array):
            little = np.ascontiguousarray(array, dtype=_NP_DTYPES[want[1]])
            self._put(little.data.cast("B"))
            return
        flat = mx.contiguous(array).reshape(-1)
        # NumPy's and Python's buffers know no bfloat16; bytes are bytes.
        view = flat.view(mx.uint16 if array.dtype.size == 2 else mx.uint32)
        mx.eval(view)
        self._put(_bytes_of(view))

    def _put(self, data: memoryview) -> None:
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            self._file.write(part)
            if self._digest is not None:
                self._digest.update(part)

    def close(self) -> None:
        """Flush to disk and compute :attr:`sha256`."""
        if self._left:
            raise FormatError(f"Tensor {self._left[0][0]!r} was announced but not written.")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._digest is not None:
            self.sha256 = self._digest.hexdigest()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
