"""Write an artifact, one layer in memory at a time."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvgraft.errors import FormatError, GeometryError
from kvgraft.files import atomic
from kvgraft.files.recognise import describe_folder
from kvgraft.files.safetensors import Writer, read_header
from kvgraft.mapper.card import model_card
from kvgraft.mapper.config import FORMAT, FORMAT_VERSION, to_config
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.layout import (
    CARD,
    CONFIG,
    INDEX,
    REPORT,
    SHARD_INDEX,
    SINGLE,
    is_artifact_file,
    tensor_names,
)
from kvgraft.mapper.linear_map import Storage
from kvgraft.mapper.load import open_artifact
from kvgraft.mapper.weight_store import FileStore, check_finite, expected_tensors
from kvgraft.ops.quantized import AffineWeight, Weight, dequantize, quantize
from kvgraft.progress import Progress

__all__ = ["SHARD_BYTES", "WEIGHT_FORMATS", "check_destination", "save_mapper"]

SHARD_BYTES = 5_000_000_000
"""Weights of more than this many bytes are split over several files."""

WEIGHT_FORMATS = ("float32", "float16", "bfloat16", "8bit", "4bit")
"""What :func:`save_mapper` can store weights as."""


def save_mapper(
    mapper: MapperData,
    path: str | os.PathLike[str],
    *,
    weight_format: str | None = None,
    group_size: int = 64,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write a mapper to disk, one layer in memory at a time.

    Everything is written beside ``path`` and takes its name in one step. An
    artifact that is already there is replaced; if anything fails, or the
    process dies, it stays what it was.

    Args:
        mapper: The mapper. Layers that are not in memory are read from its own
            file, and dropped again.
        path: The folder; or a name that ends in ``.safetensors``, for a single
            self-describing file.
        weight_format: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"8bit"`` or
            ``"4bit"``; default as they are. Biases then become float32: they
            cost nothing, and can be large.
        group_size: Group size of quantised weights: 32, 64 or 128.
        shard_bytes: Split the weights into files of at most this size. One
            tensor is never split. Ignored for a single file.
        progress: Called with (bytes written, bytes in all).

    Returns:
        The path.

    Raises:
        GeometryError: If the mapper contradicts itself, or its weights can't be
            stored as asked.
        FormatError: If something other than an artifact is in the way.
        ArtifactWriteError: If the disk is full, or writing is not permitted.

    Example:
        >>> import tempfile
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> mapper = kvgraft.load_mapper(bundled("mapper"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = kvgraft.save_mapper(mapper, f"{folder}/mapper", weight_format="8bit")
        ...     sorted(file.name for file in path.iterdir())
        ['README.md', 'index.json', 'mapper.safetensors', 'mapper_config.json']
    """
    if weight_format not in (None, *WEIGHT_FORMATS):
        raise GeometryError(
            f"Weights can be stored as {', '.join(WEIGHT_FORMATS)}; not {weight_format!r}."
        )
    mapper.check()
    path = Path(path)
    described = [_described(m, weight_format, group_size) for m in mapper.layers]
    storage = {
        (m.target_layer, kind): part.storage
        for m in described
        for kind, part in (("keys", m.keys), ("values", m.values))
    }
    config = to_config(mapper, storage)
    tensors = expected_tensors(described, tensor_names)
    nbytes = sum(p.storage.nbytes(p.shape) for m in described for p in (m.keys, m.values))
    arrays = _arrays(mapper, storage)

    if path.suffix == ".safetensors":
        with atomic.replacing_file(path, _check_replaceable_file) as fresh:
            atomic.check_space(fresh.parent, nbytes)
            _write_weights({fresh: list(tensors)}, tensors, config, arrays, progress)
    else:
        # A report of weights that were never evaluated is about those that are replaced.
        ours = is_artifact_file if mapper.quality.record else _is_artifact_file_or_report
        with atomic.replacing_folder(path, _check_replaceable_folder, ours) as folder:
            atomic.check_space(folder, nbytes)
            _fill_folder(folder, mapper, config, tensors, arrays, shard_bytes, nbytes, progress)
    _follow(mapper, path)
    return path


def check_destination(path: str | os.PathLike[str]) -> None:
    """Raise what :func:`save_mapper` would raise about the place alone, before hours of work.

    Raises:
        FormatError: If something other than an artifact is in the way.
        ArtifactWriteError: If writing there is not permitted.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        atomic.dry_run(atomic.replacing_file(path, _check_replaceable_file))
    else:
        ours = is_artifact_file
        atomic.dry_run(atomic.replacing_folder(path, _check_replaceable_folder, ours))


def _is_artifact_file_or_report(name: str) -> bool:
    return is_artifact_file(name) or name == REPORT


def _described(m: LayerMap, weight_format: str | None, group_size: int) -> LayerMap:
    """The layer without weights, and with the storage it is going to have."""
    parts = []
    for kind, part in (("keys", m.keys), ("values", m.values)):
        kept = part.storage
        if weight_format is not None and weight_format.endswith("bit"):
            if group_size not in (32, 64, 128) or part.shape[1] % group_size:
                raise GeometryError(
                    f"Target layer {m.target_layer}, {kind}: {part.shape[1]} inputs don't divide "
                    f"into groups of {group_size}. Use a group size of 32, 64 or 128 that does, or "
                    "store these weights as float16."
                )
            kept = Storage("float16", int(weight_format[0]), group_size)
        elif weight_format is not None:
            kept = Storage(weight_format)
        parts.append(replace(part, weight=None, bias=None, on_disk=kept))
    return replace(m, keys=parts[0], values=parts[1])


def _arrays(
    mapper: MapperData, storage: Mapping[tuple[int, str], Storage]
) -> Iterator[tuple[str, mx.array]]:
    """Every tensor by name, in the order of the file; holds one layer at a time."""
    for described in mapper.layers:
        m = mapper.read_layer(described.target_layer)
        for kind, part in (("keys", m.keys), ("values", m.values)):
            kept = storage[m.target_layer, kind]
            where = f"Target layer {m.target_layer}, {kind}"
            assert part.weight is not None and part.bias is not None
            weight = _convert(part.weight, kept)
            bias = part.bias.astype(getattr(mx, kept.bias_dtype))
            part.weight = part.bias = None
            names = tensor_names(m.target_layer, kind, kept)
            if isinstance(weight, AffineWeight):
                pieces = {"packed": weight.packed, "scales": weight.scales, "biases": weight.biases}
            else:
                pieces = {"weight": weight}
            for piece, array in {**pieces, "bias": bias}.items():
                if piece != "packed":
                    check_finite(array, where)
                yield names[piece], array


def _convert(weight: Weight, kept: Storage) -> Weight:
    dtype = getattr(mx, kept.dtype)
    if isinstance(weight, AffineWeight):
        if (kept.bits, kept.group_size) == (weight.bits, weight.group_size):
            return AffineWeight(
                weight.packed,
                weight.scales.astype(dtype),
                weight.biases.astype(dtype),
                weight.group_size,
                weight.bits,
            )
        weight = dequantize(weight)
    if kept.bits is None or kept.group_size is None:
        return weight.astype(dtype)
    packed = quantize(weight.astype(mx.float32), bits=kept.bits, group_size=kept.group_size)
    return replace(packed, scales=packed.scales.astype(dtype), biases=packed.biases.astype(dtype))


def _fill_folder(
    folder: Path,
    mapper: MapperData,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Iterator[tuple[str, mx.array]],
    shard_bytes: int,
    nbytes: int,
    progress: Progress | None,
) -> None:
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        files = {folder / SINGLE: shards[0]}
    else:
        files = {
            folder / f"mapper-{i:05d}-of-{len(shards):05d}.safetensors": names
            for i, names in enumerate(shards, 1)
        }
    digests = _write_weights(files, tensors, config, arrays, progress)
    texts = {CONFIG: _pretty(config), CARD: model_card(mapper, nbytes)}
    if len(shards) > 1:
        weight_map = {name: file.name for file, names in files.items() for name in names}
        texts[SHARD_INDEX] = _pretty({"metadata": {"total_size": nbytes}, "weight_map": weight_map})
    for name, text in texts.items():
        digests[name] = _write_text(folder / name, text)
    index = {"format": FORMAT, "format_version": FORMAT_VERSION, "files": digests}
    _write_text(folder / INDEX, _pretty(index))


def _shards(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int
) -> list[list[str]]:
    sizes = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2}
    shards: list[list[str]] = [[]]
    used = 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype] * math.prod(shape)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_weights(
    files: Mapping[Path, Sequence[str]],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    arrays: Iterator[tuple[str, mx.array]],
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """Write the weight files; ``{name: {"size", "sha256"}}``."""
    text = json.dumps(config, separators=(",", ":"), allow_nan=False)
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "config": text}
    total = sum(_nbytes(*described) for described in tensors.values())
    done = 0
    out = {}
    for number, (file, names) in enumerate(files.items(), 1):
        extra = {"shard": f"{number}/{len(files)}"} if len(files) > 1 else {}
        described = [(name, *tensors[name]) for name in names]
        with Writer(file, described, {**metadata, **extra}) as writer:
            for name in names:
                found, array = next(arrays)
                assert found == name, "tensors come in the order announced"
                writer.write(name, array)
                done += array.nbytes
                del array
                if progress is not None:
                    progress(done, total)
        out[file.name] = {"size": writer.size, "sha256": writer.sha256}
    return out


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (4 if dtype in ("F32", "U32") else 2)


def _pretty(data: Any) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _write_text(path: Path, text: str) -> dict[str, Any]:
    data = text.encode("utf-8")
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _check_replaceable_folder(path: Path) -> None:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if config["format"] == FORMAT:
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise FormatError(
        f"{path} exists and is not overwritten: {describe_folder(path)} Choose another path, or "
        "remove it yourself."
    )


def _check_replaceable_file(path: Path) -> None:
    try:
        if read_header(path).metadata.get("format") == FORMAT:
            return
    except FormatError:
        pass
    raise FormatError(
        f"{path} exists and is not overwritten: it is not a mapper. Choose another path, or remove "
        "it yourself."
    )


def _follow(mapper: MapperData, path: Path) -> None:
    """If the mapper reads from the files that were just replaced, read the new ones."""
    store = mapper.store
    if not isinstance(store, FileStore) or not store.reads_from(path):
        return
    fresh = open_artifact(path, MapperData)
    for mine, new in zip(mapper.layers, fresh.layers, strict=True):
        mine.keys.on_disk, mine.values.on_disk = new.keys.on_disk, new.values.on_disk
    mapper.store = fresh.store
