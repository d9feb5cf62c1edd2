"""Open an artifact: headers are read and checked, weights are read when used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvgraft.errors import ArgumentError, FormatError, MapperNotFoundError
from kvgraft.files.reading import read_json, read_json_file
from kvgraft.files.recognise import KVBRIDGE_HINT, describe_folder, describe_tensors, manifest_kind
from kvgraft.files.safetensors import Header, read_header
from kvgraft.mapper import veloxquant
from kvgraft.mapper.config import FORMAT, from_config
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layout import (
    CARD,
    CONFIG,
    SHARD,
    SHARD_INDEX,
    SINGLE,
    read_index,
    size_error,
    tensor_names,
)
from kvgraft.mapper.weight_store import attach_files

__all__ = ["artifact_kind", "artifact_path", "open_artifact"]

M = TypeVar("M", bound=MapperData)


def open_artifact(path: str | os.PathLike[str], cls: type[M]) -> M:
    """Open an artifact, without a word about its quality.

    Args:
        path: A kvgraft folder, a single kvgraft ``.safetensors`` file, or a
            VeloxQuant-MLX folder.
        cls: What to make: :class:`kvgraft.mapper.mapper.Mapper`, outside this folder.

    Returns:
        The mapper, no layer of it in memory.

    Raises:
        ArgumentError: If ``path`` is no path.
        FormatError: And the kinds of it that :func:`kvgraft.load_mapper` lists; a
            :class:`kvgraft.errors.ChecksumError` if a file is longer than ``index.json`` says.
    """
    path = artifact_path(path)
    kind = artifact_kind(path)
    if kind == "veloxquant":
        return veloxquant.read(path, cls)
    return _load_file(path, cls) if kind == "file" else _load_folder(path, cls)


def artifact_path(path: Any) -> Path:
    """The path; an empty one is not meant to be the current folder."""
    if not isinstance(path, (str, os.PathLike)):
        hint = " It is open already." if isinstance(path, MapperData) else ""
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


def artifact_kind(path: Path) -> str:
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


def _load_file(path: Path, cls: type[M]) -> M:
    header = read_header(path)
    mapper = _mapper_in_header(header, cls)
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


def _mapper_in_header(header: Header, cls: type[M]) -> M:
    return from_config(_config_in_header(header), f"The configuration in {header.path}", cls)


def _load_folder(path: Path, cls: type[M]) -> M:
    config_path = path / CONFIG
    config = read_json_file(config_path)
    mapper = from_config(config, str(config_path), cls)
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


def _attach(mapper: M, found: Mapping[str, Header], where: str) -> M:
    attach_files(mapper, found, tensor_names, where)
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
            if not SHARD.fullmatch(file):
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


def _check_sizes(path: Path) -> None:
    """Compare sizes with ``index.json``; the model card may be edited."""
    for name, entry in (read_index(path) or {}).items():
        if name == CARD:
            continue
        error = size_error(path / name, entry["size"])
        if error is not None:
            raise error
