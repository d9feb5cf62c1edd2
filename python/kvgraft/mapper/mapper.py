"""A fitted mapper, with the methods that read, write and apply it.

This module imports the others of its folder: the parts of a mapper are in
:mod:`kvgraft.mapper.data`, its files in :mod:`kvgraft.mapper.load`,
:mod:`kvgraft.mapper.save` and :mod:`kvgraft.mapper.verify`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from kvgraft.mapper import transfer
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.load import open_artifact
from kvgraft.mapper.quality import warn_if_doubtful
from kvgraft.mapper.save import SHARD_BYTES, save_mapper
from kvgraft.mapper.verify import verify_artifact
from kvgraft.progress import Progress

__all__ = ["Mapper", "load_mapper", "open_mapper"]

M = TypeVar("M", bound=MapperData)


@dataclass
class Mapper(MapperData):
    """A fitted source-to-target mapper; its fields are those of :class:`MapperData`.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> mapper = kvgraft.Mapper.load(bundled("mapper"))
        >>> mapper.quality.verdict
        'ship with warning'
        >>> [layer.target_layer for layer in mapper.layers]
        [0, 1, 2]
    """

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        weight_format: str | None = None,
        group_size: int = 64,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress | None = None,
    ) -> Path:
        """Write the artifact; see :func:`kvgraft.mapper.save.save_mapper`."""
        return save_mapper(
            self,
            path,
            weight_format=weight_format,
            group_size=group_size,
            shard_bytes=shard_bytes,
            progress=progress,
        )

    @classmethod
    def load(cls: type[M], path: str | os.PathLike[str], *, verify: bool = False) -> M:
        """Open an artifact; see :func:`load_mapper`."""
        return _load(cls, path, verify)

    def apply(
        self, src_pairs: Sequence[tuple[mx.array, mx.array]], offset: int = 0
    ) -> list[tuple[mx.array, mx.array]]:
        """Map a whole cache given as one pair per source layer.

        Args:
            src_pairs: ``[(keys, values)]``, one per source layer in order, each
                ``[H, N, D]`` or ``[B, H, N, D]``, keys post-RoPE.
            offset: Position of the first token; the rest follow on.

        Returns:
            ``[(keys, values)]``, one per target layer, keys post-RoPE at the
            same positions.

        Raises:
            GeometryError: As for :func:`kvgraft.mapper.transfer.apply`.
        """
        return transfer.apply(self, src_pairs, offset)


def open_mapper(path: str | os.PathLike[str], *, verify: bool = False) -> Mapper:
    """Like :func:`load_mapper`, without a warning: for callers that report the quality."""
    return _open(Mapper, path, verify)


def load_mapper(path: str | os.PathLike[str], *, verify: bool = False) -> Mapper:
    """Open an artifact. Headers are read and checked; weights are read when used.

    Warns, once per artifact, with a :class:`kvgraft.errors.QualityWarning` if it
    was never evaluated or its verdict is not "ship".

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

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> mapper = kvgraft.load_mapper(bundled("mapper"))
        >>> print(mapper.describe())
        large (6 layers) -> small (3 layers), 0.1 M parameters
    """
    return _load(Mapper, path, verify)


def _load(cls: type[M], path: str | os.PathLike[str], verify: bool) -> M:
    mapper = _open(cls, path, verify)
    # The warning points at the caller of load_mapper or Mapper.load.
    warn_if_doubtful(mapper.quality, mapper.describe(), os.path.realpath(path), stacklevel=4)
    return mapper


def _open(cls: type[M], path: str | os.PathLike[str], verify: bool) -> M:
    if verify:
        verify_artifact(path).raise_first()
    return open_artifact(path, cls)
