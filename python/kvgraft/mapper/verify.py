"""Read every byte of an artifact and compare it with what it should be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvgraft.errors import ChecksumError, FormatError, MapperNotFoundError
from kvgraft.files.reading import sha256_of
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layout import (
    CARD,
    CONFIG,
    INDEX,
    SHARD_INDEX,
    SINGLE,
    read_index,
    size_error,
)
from kvgraft.mapper.load import artifact_kind, artifact_path, open_artifact

__all__ = ["FileReport", "VerifyReport", "verify_artifact"]


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
    """What :func:`verify_artifact` found.

    Attributes:
        path: What was verified.
        kind: ``"folder"``, ``"file"`` or ``"veloxquant"``.
        summary: One line about the mapper; ``""`` if it can't be opened.
        files: One entry per file.
        errors: What is wrong, as the errors that :func:`open_artifact` would raise.
        notes: Remarks that are no errors.
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


def verify_artifact(path: str | os.PathLike[str]) -> VerifyReport:
    """Read every byte of an artifact and compare it with what it should be.

    The checksums tell damage from intact; they are no signature. Whoever can
    change the weights can change ``index.json`` too.

    Returns:
        A report; :attr:`VerifyReport.ok` says whether anything is wrong.

    Raises:
        MapperNotFoundError: If there is nothing at ``path``.
        FormatError: If what is there is not an artifact.
    """
    path = artifact_path(path)
    kind = artifact_kind(path)
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
        mapper = open_artifact(path, MapperData)
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
        index = read_index(path)
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
        wrong_size = size_error(file, entry["size"])
        if not file.exists():
            files.append(FileReport(name, -1, "", "missing"))
            errors.append(wrong_size or MapperNotFoundError(f"{file} is missing."))
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
                wrong_size
                or ChecksumError(
                    f"{file} was altered: its SHA-256 is {digest[:16]}…, {INDEX} says "
                    f"{entry['sha256'][:16]}…. Get the file again, or fit again."
                )
            )
    for name in (SINGLE, SHARD_INDEX, CONFIG):
        if (path / name).exists() and name not in index:
            errors.append(ChecksumError(f"{path / name} is not listed in {INDEX}."))
