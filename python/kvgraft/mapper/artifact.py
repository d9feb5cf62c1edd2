"""Mappers on disk: write, open, verify, and match to a pair of models.

An artifact is a folder::

    mapper.safetensors      weights (or mapper-00001-of-000NN.safetensors and
                            mapper.safetensors.index.json)
    mapper_config.json      everything else
    README.md               model card
    index.json              size and SHA-256 of each of these files

The weights' header carries the configuration too, so one ``.safetensors`` file
alone is a whole mapper. ``docs/artifact.md`` describes the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvgraft.errors import (
    ArgumentError,
    ChecksumError,
    FormatError,
    GeometryError,
    MapperNotFoundError,
    PairMismatchError,
    TruncatedFileError,
)
from kvgraft.files import atomic
from kvgraft.files.recognise import KVBRIDGE_HINT, describe_folder, describe_tensors, manifest_kind
from kvgraft.files.safetensors import (
    Header,
    Writer,
    read_header,
    read_json,
    read_json_file,
    sha256_of,
)
from kvgraft.mapper import veloxquant
from kvgraft.mapper.card import model_card
from kvgraft.mapper.config import FORMAT, FORMAT_VERSION, from_config, to_config
from kvgraft.mapper.mapper import LayerMap, Mapper, Storage, require_mapper
from kvgraft.mapper.weight_store import FileStore, check_finite, check_tensors, expected_tensors
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.quantized import AffineWeight, Weight, dequantize, quantize
from kvgraft.progress import Progress

__all__ = [
    "SHARD_BYTES",
    "FileReport",
    "VerifyReport",
    "check_destination",
    "check_pair",
    "load",
    "save",
    "verify",
]

SHARD_BYTES = 5_000_000_000
"""Weights of more than this many bytes are split over several files."""

WEIGHTS = ("float32", "float16", "bfloat16", "8bit", "4bit")
"""What :func:`save` can store weights as."""

CONFIG, CARD, INDEX = "mapper_config.json", "README.md", "index.json"
REPORT = "eval"
SINGLE, SHARD_INDEX = "mapper.safetensors", "mapper.safetensors.index.json"
_SHARD = re.compile(r"mapper-\d{5}-of-\d{5}\.safetensors")


def tensor_names(target_layer: int, kind: str, storage: Storage) -> dict[str, str]:
    """Names of a map's tensors in the file, by part; see :data:`formats.store.Naming`."""
    stem = f"layers.{target_layer}.{kind}"
    names = {"weight": f"{stem}.weight", "bias": f"{stem}.bias"}
    if storage.bits is not None:
        del names["weight"]
        names |= {p: f"{stem}.weight.{p}" for p in ("packed", "scales", "biases")}
    return names


# ------------------------------------------------------------------- writing


def save(
    mapper: Mapper,
    path: str | os.PathLike[str],
    *,
    weights: str | None = None,
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
        weights: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"8bit"`` or
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
    """
    if weights not in (None, *WEIGHTS):
        raise GeometryError(f"Weights can be stored as {', '.join(WEIGHTS)}; not {weights!r}.")
    mapper.check()
    path = Path(path)
    described = [_described(m, weights, group_size) for m in mapper.layers]
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
    """Raise what :func:`save` would raise about the place alone, before hours of work.

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


def is_artifact_file(name: str) -> bool:
    """Whether a file of this name in an artifact's folder is part of the artifact."""
    return name in (CONFIG, CARD, INDEX, SINGLE, SHARD_INDEX) or bool(_SHARD.fullmatch(name))


def _is_artifact_file_or_report(name: str) -> bool:
    return is_artifact_file(name) or name == REPORT


def _described(m: LayerMap, weights: str | None, group_size: int) -> LayerMap:
    """The layer without weights, and with the storage it is going to have."""
    parts = []
    for kind, part in (("keys", m.keys), ("values", m.values)):
        kept = part.storage
        if weights is not None and weights.endswith("bit"):
            if group_size not in (32, 64, 128) or part.shape[1] % group_size:
                raise GeometryError(
                    f"Target layer {m.target_layer}, {kind}: {part.shape[1]} inputs don't divide "
                    f"into groups of {group_size}. Use a group size of 32, 64 or 128 that does, or "
                    "store these weights as float16."
                )
            kept = Storage("float16", int(weights[0]), group_size)
        elif weights is not None:
            kept = Storage(weights)
        parts.append(replace(part, weight=None, bias=None, on_disk=kept))
    return replace(m, keys=parts[0], values=parts[1])


def _arrays(
    mapper: Mapper, storage: Mapping[tuple[int, str], Storage]
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
    mapper: Mapper,
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
                assert found == name, "tensors come in the order of the plan"
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


def _follow(mapper: Mapper, path: Path) -> None:
    """If the mapper reads from the files that were just replaced, read the new ones."""
    store = mapper.store
    if not isinstance(store, FileStore) or not store.reads_from(path):
        return
    fresh = load(path)
    for mine, new in zip(mapper.layers, fresh.layers, strict=True):
        mine.keys.on_disk, mine.values.on_disk = new.keys.on_disk, new.values.on_disk
    mapper.store = fresh.store


# ------------------------------------------------------------------- opening


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Mapper:
    """Open an artifact. Headers are read and checked; weights are read when used.

    Args:
        path: A kvgraft folder, a single kvgraft ``.safetensors`` file, or a
            VeloxQuant-MLX folder.
        verify: Also read everything and compare it with the checksums.

    Returns:
        The mapper, no layer of it in memory.

    Raises:
        ArgumentError: If ``path`` is no path.
        MapperNotFoundError: If there is nothing at ``path``, or a file of the
            artifact is missing.
        TruncatedFileError: If a file is shorter than it should be.
        VersionError: If the format version is not one this release reads.
        ChecksumError: If ``verify`` is set and a file was altered.
        FormatError: If it is something else, or contradicts itself.
    """
    path = _given(path)
    if verify:
        _verify(path).raise_first()
    kind = _kind(path)
    if kind == "veloxquant":
        return veloxquant.read(path)
    return _load_file(path) if kind == "file" else _load_folder(path)


def _given(path: Any) -> Path:
    """The path; an empty one is not meant to be the current folder."""
    if not isinstance(path, (str, os.PathLike)):
        hint = " It is open already." if isinstance(path, Mapper) else ""
        raise ArgumentError(
            f"A mapper is opened by its path, a str or os.PathLike, not by a "
            f"{type(path).__name__}.{hint}"
        )
    if not os.fspath(path):
        raise MapperNotFoundError(
            "No path of a mapper is given. Give the folder that `kvgraft fit --out` wrote, or a "
            ".safetensors file."
        )
    return Path(path)


def _kind(path: Path) -> str:
    """``"folder"``, ``"file"`` or ``"veloxquant"``; raises for anything else."""
    try:
        if path.is_dir():
            if (path / CONFIG).exists():
                return "folder"
            if (path / "manifest.json").exists():
                kind = manifest_kind(read_json_file(path / "manifest.json"))
                if kind == "veloxquant":
                    return kind
                if kind == "kvbridge":
                    raise FormatError(f"{path} is not a kvgraft artifact: {KVBRIDGE_HINT}")
            raise FormatError(f"{path} is not a kvgraft artifact: {describe_folder(path)}")
        if path.exists():
            return "file"
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error.strerror}.") from error
    previous = path.with_name(f".{path.name}.previous")
    if previous.exists():
        raise MapperNotFoundError(
            f"There is nothing at {path}, but saving it was interrupted and what was there is at "
            f"{previous}. Rename it back."
        )
    raise MapperNotFoundError(
        f"There is no mapper at {path}. Give the folder that `kvgraft fit --out` wrote, or a "
        ".safetensors file."
    )


def _load_file(path: Path) -> Mapper:
    header = read_header(path)
    mapper = _mapper_in_header(header)
    if "shard" in header.metadata:
        raise FormatError(
            f"{path} is part {header.metadata['shard']} of a mapper. Give the folder that holds "
            "all parts."
        )
    return _attach(mapper, dict.fromkeys(header.tensors, header), f"The header of {path}")


def _config_in_header(header: Header) -> Any:
    if header.metadata.get("format") != FORMAT or "config" not in header.metadata:
        raise FormatError(
            f"{header.path} is not a kvgraft artifact: "
            f"{describe_tensors(header.tensors.keys(), header.metadata)}"
        )
    return read_json(header.metadata["config"], f"The configuration in {header.path}")


def _mapper_in_header(header: Header) -> Mapper:
    return from_config(_config_in_header(header), f"The configuration in {header.path}")


def _load_folder(path: Path) -> Mapper:
    config_path = path / CONFIG
    config = read_json_file(config_path)
    mapper = from_config(config, str(config_path))
    _check_sizes(path)
    found: dict[str, Header] = {}
    for file, names in _weight_files(path).items():
        header = read_header(file)
        if _config_in_header(header) != config:
            raise FormatError(
                f"{file} was written with another configuration than {config_path}. The files "
                "don't belong together: get the whole artifact again."
            )
        if names is not None and set(names) != header.tensors.keys():
            raise FormatError(
                f"{file} doesn't hold the tensors that {path / SHARD_INDEX} lists for it. The "
                "files don't belong together: get the whole artifact again."
            )
        found.update(dict.fromkeys(header.tensors, header))
    return _attach(mapper, found, str(config_path))


def _attach(mapper: Mapper, found: Mapping[str, Header], where: str) -> Mapper:
    check_tensors(where, expected_tensors(mapper.layers, tensor_names), found)
    mapper.store = FileStore(found, tensor_names)
    return mapper


def _weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The files with weights, and the tensors each should hold if that is known."""
    index_path = path / SHARD_INDEX
    if not index_path.exists():
        if not (path / SINGLE).exists():
            raise MapperNotFoundError(
                f"{path} has no {SINGLE}. The copy or download is incomplete: get it again."
            )
        return {path / SINGLE: None}
    index = read_json_file(index_path)
    files: dict[Path, list[str] | None] = {}
    try:
        for name, file in index["weight_map"].items():
            # Nothing but a plain file name: a path could lead out of the folder.
            if not _SHARD.fullmatch(file):
                raise FormatError(f"{index_path} names {file!r}, which is no part of a mapper.")
            names = files.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index_path} has no weight_map that can be read.") from error
    for file_path in files:
        if not file_path.exists():
            raise MapperNotFoundError(
                f"{file_path} is missing. The copy or download is incomplete: get it again."
            )
    return files


def _read_index(path: Path) -> dict[str, dict[str, Any]] | None:
    """``index.json``'s files, or ``None`` if it isn't there."""
    index_path = path / INDEX
    if not index_path.exists():
        return None
    index = read_json_file(index_path)
    try:
        files = {}
        for name, entry in index["files"].items():
            if not is_artifact_file(name) or name == INDEX:
                raise FormatError(f"{index_path} lists {name!r}, which is no part of a mapper.")
            files[name] = {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
        return files
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{index_path} can't be read: its entries are incomplete.") from error


def _check_sizes(path: Path) -> None:
    """Compare sizes with ``index.json``; the model card may be edited."""
    for name, entry in (_read_index(path) or {}).items():
        if name == CARD:
            continue
        error = _size_error(path / name, entry["size"])
        if error is not None:
            raise error


def _size_error(file: Path, size: int) -> FormatError | None:
    if not file.exists():
        return MapperNotFoundError(
            f"{file} is missing. The copy or download is incomplete: get it again."
        )
    found = file.stat().st_size
    if found == size:
        return None
    kind = TruncatedFileError if found < size else ChecksumError
    return kind(f"{file} has {found} bytes, {INDEX} says {size}. Get the file again.")


# ----------------------------------------------------------------- verifying


@dataclass(frozen=True)
class FileReport:
    """One file of an artifact.

    Attributes:
        name: Its name.
        size: Its size in bytes; ``-1`` if it is missing.
        sha256: Its digest, ``""`` if it was not computed.
        status: ``"ok"``, ``"missing"``, ``"altered"``, ``"edited"`` (the model
            card, which may be) or ``"no checksum"``.
    """

    name: str
    size: int
    sha256: str
    status: str


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify` found.

    Attributes:
        path: What was verified.
        kind: ``"folder"``, ``"file"`` or ``"veloxquant"``.
        summary: One line about the mapper; ``""`` if it can't be opened.
        files: One entry per file.
        errors: What is wrong, as the errors that :func:`load` would raise.
        notes: What is worth knowing and not wrong.
    """

    path: Path
    kind: str
    summary: str
    files: tuple[FileReport, ...]
    errors: tuple[FormatError, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.errors

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self.errors:
            raise self.errors[0]

    def __str__(self) -> str:
        lines = [f"{self.path}: {'OK' if self.ok else 'NOT OK'}"]
        lines += [f"  {self.summary}"] if self.summary else []
        lines += [
            f"  {f.status:<11} {f.name}  {'' if f.size < 0 else f'{f.size} bytes'}"
            for f in self.files
        ]
        lines += [f"  error: {error}" for error in self.errors]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Read every byte of an artifact and compare it with what it should be.

    The checksums tell damage from intact; they are no signature. Whoever can
    change the weights can change ``index.json`` too.

    Returns:
        A report; :attr:`VerifyReport.ok` says whether anything is wrong.

    Raises:
        MapperNotFoundError: If there is nothing at ``path``.
        FormatError: If what is there is not an artifact.
    """
    return _verify(_given(path))


def _verify(path: Path) -> VerifyReport:
    kind = _kind(path)
    files: list[FileReport] = []
    errors: list[FormatError] = []
    notes: list[str] = []
    if kind == "folder":
        _verify_checksums(path, files, errors, notes)
    else:
        for file in [path] if kind == "file" else [path / "manifest.json", path / SINGLE]:
            size = file.stat().st_size if file.exists() else -1
            status = "missing" if size < 0 else "no checksum"
            files.append(FileReport(file.name, size, "", status))
    summary = ""
    try:
        mapper = load(path)
        summary = mapper.describe()
        for m in mapper.layers:
            mapper.read_layer(m.target_layer)
        if kind != "folder":
            notes.append(
                "This form of artifact carries no checksums; shapes and numbers were checked."
            )
        if not mapper.quality.evaluated:
            notes.append("Its quality was never evaluated.")
    except FormatError as error:
        # A damaged file often can't be opened either; say it once.
        if not errors:
            errors.append(error)
    return VerifyReport(path, kind, summary, tuple(files), tuple(errors), tuple(notes))


def _verify_checksums(
    path: Path, files: list[FileReport], errors: list[FormatError], notes: list[str]
) -> None:
    try:
        index = _read_index(path)
    except FormatError as error:
        errors.append(error)
        return
    if index is None:
        errors.append(
            MapperNotFoundError(
                f"{path / INDEX} is missing, so nothing can be compared. Get it from where the "
                "mapper came from."
            )
        )
        return
    for name, entry in index.items():
        file = path / name
        size_error = _size_error(file, entry["size"])
        if not file.exists():
            files.append(FileReport(name, -1, "", "missing"))
            errors.append(size_error or MapperNotFoundError(f"{file} is missing."))
            continue
        digest = sha256_of(file)
        size = file.stat().st_size
        if digest == entry["sha256"]:
            files.append(FileReport(name, size, digest, "ok"))
        elif name == CARD:
            files.append(FileReport(name, size, digest, "edited"))
            notes.append(f"{CARD} was edited since the mapper was written.")
        else:
            files.append(FileReport(name, size, digest, "altered"))
            errors.append(
                size_error
                or ChecksumError(
                    f"{file} was altered: its SHA-256 is {digest[:16]}…, {INDEX} says "
                    f"{entry['sha256'][:16]}…. Get the file again, or fit again."
                )
            )
    for name in (SINGLE, SHARD_INDEX, CONFIG):
        if (path / name).exists() and name not in index:
            errors.append(ChecksumError(f"{path / name} is not listed in {INDEX}."))


# ------------------------------------------------------------ the right pair


def check_pair(
    mapper: Mapper,
    *,
    source: ModelGeometry | None = None,
    target: ModelGeometry | None = None,
    source_model: ModelIdentity | None = None,
    target_model: ModelIdentity | None = None,
) -> list[str]:
    """Refuse a mapper that was fitted for other models than these.

    What is not given, or not known to the mapper, is not compared. Two models
    of one architecture that differ only in their weights (a base model and its
    instruction tuning) can't be told apart.

    Args:
        mapper: The mapper.
        source: Geometry of the source's cache.
        target: Geometry of the target's cache.
        source_model: Identity of the source.
        target_model: Identity of the target.

    Returns:
        Differences that do no harm by themselves: quantisation and dtype. Maps
        carry over between precisions of one model, at some loss.

    Raises:
        ArgumentError: If ``mapper`` is none.
        PairMismatchError: Naming everything that differs.
    """
    require_mapper(mapper)
    wrong: list[str] = []
    harmless: list[str] = []
    for side, fitted, given in (
        ("source", mapper.source, source),
        ("target", mapper.target, target),
    ):
        if given is not None:
            wrong += [f"{side}: {line}" for line in _geometry_differences(fitted, given)]
            if fitted.dtype != given.dtype:
                harmless.append(f"{side}: dtype {given.dtype}, fitted on {fitted.dtype}")
    for side, known, model in (
        ("source", mapper.source_model, source_model),
        ("target", mapper.target_model, target_model),
    ):
        if known is None or model is None:
            continue
        if known.config_sha256 != model.config_sha256:
            wrong.append(
                f"{side}: {model.name} has another configuration than {known.name} "
                f"({model.config_sha256[:12]} against {known.config_sha256[:12]})"
            )
        if known.tokenizer_sha256 != model.tokenizer_sha256:
            wrong.append(
                f"{side}: {model.name} has another tokenizer than {known.name} "
                f"({model.tokenizer_sha256[:12]} against {known.tokenizer_sha256[:12]})"
            )
        if known.quantization != model.quantization:
            harmless.append(
                f"{side}: quantization {model.quantization}, fitted on {known.quantization}"
            )
    if wrong:
        shown = [*wrong[:8], *([f"and {len(wrong) - 8} more"] if len(wrong) > 8 else [])]
        raise PairMismatchError(
            f"This mapper ({mapper.describe()}) was fitted for other models. Use the one for this "
            "pair, or fit one. Differences:\n  " + "\n  ".join(shown)
        )
    return harmless


def _geometry_differences(fitted: ModelGeometry, given: ModelGeometry) -> list[str]:
    lines = []
    types = (given.model_type, fitted.model_type)
    if types[0] != types[1] and "unknown" not in types:
        lines.append(f"architecture {types[0]}, the mapper's is {types[1]}")
    if len(given.layers) != len(fitted.layers):
        return [*lines, f"{len(given.layers)} layers, the mapper's has {len(fitted.layers)}"]
    for i, (mine, yours) in enumerate(zip(fitted.layers, given.layers, strict=True)):
        lines += [f"layer {i}: {text}" for text in _layer_differences(mine, yours)]
    return lines


def _layer_differences(fitted: LayerGeometry, given: LayerGeometry) -> list[str]:
    lines = []
    for name in ("n_kv_heads", "key_dim", "value_dim", "window"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if mine != yours:
            lines.append(f"{name} {yours}, the mapper's is {mine}")
    return [*lines, *_rope_differences(fitted.rope, given.rope)]


def _rope_differences(fitted: RopeSpec, given: RopeSpec) -> list[str]:
    lines = []
    for name in ("dims", "traditional", "max_position"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if mine != yours:
            lines.append(f"RoPE {name} {yours}, the mapper's is {mine}")
    for name in ("base", "scale", "magnitude"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if not _close(mine, yours):
            lines.append(f"RoPE {name} {yours}, the mapper's is {mine}")
    mine, yours = fitted.freqs, given.freqs
    if (mine is None) != (yours is None) or (
        mine is not None
        and yours is not None
        and not (len(mine) == len(yours) and all(map(_close, mine, yours)))
    ):
        lines.append("RoPE frequencies differ")
    return lines


def _close(a: float | None, b: float | None) -> bool:
    # Frequencies computed on another device differ in the last bits.
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-5)
