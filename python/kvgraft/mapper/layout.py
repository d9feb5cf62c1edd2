"""The files of an artifact: names, tensor names, and ``index.json``.

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

import re
from pathlib import Path
from typing import Any

from kvgraft.errors import ChecksumError, FormatError, MapperNotFoundError, TruncatedFileError
from kvgraft.files.reading import read_json_file
from kvgraft.mapper.linear_map import Storage

__all__ = [
    "CARD",
    "CONFIG",
    "INDEX",
    "REPORT",
    "SHARD",
    "SHARD_INDEX",
    "SINGLE",
    "is_artifact_file",
    "read_index",
    "size_error",
    "tensor_names",
]

CONFIG, CARD, INDEX = "mapper_config.json", "README.md", "index.json"
REPORT = "eval"
"""The folder of an evaluation's report, inside the artifact's."""
SINGLE, SHARD_INDEX = "mapper.safetensors", "mapper.safetensors.index.json"
SHARD = re.compile(r"mapper-\d{5}-of-\d{5}\.safetensors")


def tensor_names(target_layer: int, kind: str, storage: Storage) -> dict[str, str]:
    """Names of a map's tensors in the file, by part; see :data:`formats.store.Naming`."""
    stem = f"layers.{target_layer}.{kind}"
    names = {"weight": f"{stem}.weight", "bias": f"{stem}.bias"}
    if storage.bits is not None:
        del names["weight"]
        names |= {p: f"{stem}.weight.{p}" for p in ("packed", "scales", "biases")}
    return names


def is_artifact_file(name: str) -> bool:
    """Whether a file of this name in an artifact's folder is part of the artifact."""
    return name in (CONFIG, CARD, INDEX, SINGLE, SHARD_INDEX) or bool(SHARD.fullmatch(name))


def read_index(path: Path) -> dict[str, dict[str, Any]] | None:
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


def size_error(file: Path, size: int) -> FormatError | None:
    """What is wrong with a file that ``index.json`` gives ``size`` bytes; ``None`` if nothing."""
    if not file.exists():
        return MapperNotFoundError(
            f"{file} is missing. The copy or download is incomplete: get it again."
        )
    found = file.stat().st_size
    if found == size:
        return None
    kind = TruncatedFileError if found < size else ChecksumError
    return kind(f"{file} has {found} bytes, {INDEX} says {size}. Get the file again.")
