"""Weights on disk, read one target layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from kvgraft import _ext
from kvgraft.errors import FormatError, GeometryError
from kvgraft.files.safetensors import Header, read_ahead, read_tensors
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.ops.quantized import AffineWeight, Weight

__all__ = [
    "FILE_DTYPES",
    "FileStore",
    "Naming",
    "check_finite",
    "check_tensors",
    "expected_tensors",
]

FILE_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""safetensors' names of the dtypes that weights may have."""

Naming = Callable[[int, str, Storage], Mapping[str, str]]
"""``(target_layer, "keys" | "values", storage) -> {part: tensor name}``.

Parts are ``weight`` and ``bias``, or ``packed``, ``scales``, ``biases`` and
``bias`` for quantised weights.
"""


def expected_tensors(
    layers: Sequence[LayerMap], naming: Naming
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """``{name: (file dtype, shape)}`` of every tensor, layer by layer."""
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for m in layers:
        for kind, linear in (("keys", m.keys), ("values", m.values)):
            storage = linear.storage
            names = naming(m.target_layer, kind, storage)
            for part, described in _parts(linear.shape, storage).items():
                out[names[part]] = described
    return out


def _parts(shape: tuple[int, int, int], storage: Storage) -> dict[str, tuple[str, tuple[int, ...]]]:
    heads, in_dim, out_dim = shape
    dtype = FILE_DTYPES[storage.dtype]
    parts: dict[str, tuple[str, tuple[int, ...]]] = {}
    if storage.bits is None or storage.group_size is None:
        parts["weight"] = (dtype, shape)
    else:
        groups = (heads, out_dim, in_dim // storage.group_size)
        parts["packed"] = ("U32", (heads, out_dim, in_dim * storage.bits // 32))
        parts["scales"] = (dtype, groups)
        parts["biases"] = (dtype, groups)
    parts["bias"] = (FILE_DTYPES[storage.bias_dtype], (heads, out_dim))
    return parts


def attach_files(
    mapper: MapperData, found: Mapping[str, Header], naming: Naming, where: str
) -> None:
    """Give a mapper the files that its weights are read from.

    Args:
        mapper: The mapper, its layers described.
        found: For each tensor that is there, the file that holds it.
        naming: Names of a map's tensors.
        where: What describes them, for messages.

    Raises:
        FormatError: Unless the files hold just the tensors described.
    """
    check_tensors(where, expected_tensors(mapper.layers, naming), found)
    mapper.store = FileStore(found, naming)


def check_tensors(
    where: str,
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    found: Mapping[str, Header],
) -> None:
    """Raise :class:`FormatError` unless files hold just the tensors described.

    Args:
        where: What describes them, for messages.
        expected: From :func:`expected_tensors`.
        found: For each tensor that is there, the file that holds it.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        raise FormatError(
            f"{where} describes {_some(missing)}, which the weights don't hold. The files don't "
            "belong together: get the whole artifact again."
        )
    if extra:
        raise FormatError(
            f"{found[extra[0]].path} holds {_some(extra)}, which {where} doesn't describe. The "
            "files don't belong together: get the whole artifact again."
        )
    for name, (dtype, shape) in expected.items():
        info = found[name].tensors[name]
        if (info.dtype, info.shape) != (dtype, shape):
            raise FormatError(
                f"{found[name].path}: tensor {name!r} is {info.dtype} {info.shape}, {where} says "
                f"{dtype} {shape}. The files don't belong together: get the whole artifact again."
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"tensors {shown} and {len(names) - 3} more" if len(names) > 3 else f"tensor {shown}"


def check_finite(array: mx.array, where: str) -> None:
    """Refuse to write NaN or infinity.

    Raises:
        GeometryError: Saying what to do.
    """
    if _ext.all_finite(array):
        return
    if array.dtype == mx.float16:
        raise GeometryError(
            f"{where}: the weights hold NaN, infinity, or numbers beyond float16's range. If the "
            "fit is good, store them as bfloat16 or float32."
        )
    raise GeometryError(
        f"{where}: the weights hold NaN or infinity. The fit failed: more text or a larger lambda "
        "may help."
    )


class FileStore:
    """A :class:`kvgraft.mapper.layer_map.WeightStore` over safetensors files.

    Every read opens the file anew and keeps nothing, so that unloading a layer
    frees its memory. It holds no mutable state but a set of layers known
    to be finite, and may be used from several threads.
    """

    def __init__(self, found: Mapping[str, Header], naming: Naming) -> None:
        self._found = dict(found)
        self._naming = naming
        self._checked: set[int] = set()

    def fill(self, layer: LayerMap) -> None:
        """Read the weights of one layer into ``layer``, evaluated.

        Raises:
            FormatError: If a file changed since it was opened, can't be read,
                or holds NaN or infinity.
        """
        read = [
            self._read(layer.target_layer, kind, linear)
            for kind, linear in (("keys", layer.keys), ("values", layer.values))
        ]
        self._checked.add(layer.target_layer)
        for linear, (weight, bias) in zip((layer.keys, layer.values), read, strict=True):
            linear.weight, linear.bias = weight, bias

    def read_ahead(self, layer: LayerMap) -> None:
        """Ask the operating system to have one layer's part of the files in its page cache."""
        for kind, linear in (("keys", layer.keys), ("values", layer.values)):
            storage = linear.on_disk
            if storage is not None:
                for name in self._naming(layer.target_layer, kind, storage).values():
                    read_ahead(self._found[name], name)

    def _read(self, target_layer: int, kind: str, linear: LinearMap) -> tuple[Weight, mx.array]:
        storage = linear.on_disk
        assert storage is not None, "a layer of a file knows how the file holds it"
        names = self._naming(target_layer, kind, storage)
        parts: dict[str, mx.array] = {}
        by_file: dict[int, list[str]] = {}
        for part, name in names.items():
            by_file.setdefault(id(self._found[name]), []).append(part)
        for group in by_file.values():
            header = self._found[names[group[0]]]
            arrays = read_tensors(header, [names[part] for part in group])
            parts.update({part: arrays[names[part]] for part in group})
        if target_layer not in self._checked:
            for part, array in parts.items():
                if part != "packed" and not _ext.all_finite(array):
                    raise FormatError(
                        f"{self._found[names[part]].path}: tensor {names[part]!r} holds NaN or "
                        "infinity. The file was altered or the fit failed: run `kvgraft verify`, "
                        "then get it again or fit again."
                    )
        if storage.bits is None or storage.group_size is None:
            return parts["weight"], parts["bias"]
        packed = AffineWeight(
            parts["packed"], parts["scales"], parts["biases"], storage.group_size, storage.bits
        )
        return packed, parts["bias"]

    def reads_from(self, path: Path) -> bool:
        """Whether ``path`` is one of the files read, or the folder of them."""
        folder, file = path.resolve(), path.parent.resolve() / path.name
        for header in self._found.values():
            # The file itself may be a link into a download cache.
            parent = header.path.parent.resolve()
            if parent == folder or parent / header.path.name == file:
                return True
        return False
