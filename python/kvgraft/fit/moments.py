"""Streaming second moments: all that a linear fit needs of the calibration text.

A ridge fit of any target layer on any source layers needs only counts, means
and centred second moments of the features. They are accumulated in one stream
and the tokens are dropped. The solution for any k, λ, head mapping and layer
choice then comes from a sub-block, without running the models again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import ArtifactWriteError, FitError, FormatError, VersionError
from kvgraft.files.safetensors import map_arrays, write_arrays
from kvgraft.fit.features import KINDS, Columns, FeatureRows, common_heads
from kvgraft.fit.moment_block import MomentBlock
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["Moments"]

FORMAT_VERSION = 1

_CHUNK_BYTES = 256 << 20

Float64 = NDArray[np.float64]
_Key = tuple[str, int | None]
"""Kind, and KV head in the ``"heads"`` structure."""


class Moments:
    """The moments of a pair, or of some of its layers and heads.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        structure: ``"full"`` keeps the moments of every source head with every
            other, which serves every head mapping; ``"heads"`` only those of the
            same head index, 1/n_heads of the memory and work, which serves the
            head mapping ``local``. It needs equal KV head counts throughout.
        kinds: ``("keys",)``, ``("values",)`` or both.
        heads: Which KV heads to keep, in the ``"heads"`` structure; all if absent.
        targets: Which target layers to keep; all if absent.
        dtype: dtype of the products and totals: ``"float64"``, or ``"float32"``
            for moments that maps are only scored on.
        chunk_rows: Rows that are collected before they are multiplied.
        blocks: Totals to continue from, by kind and head (``None`` in the
            ``"full"`` structure); zeros if absent.

    Raises:
        FitError: If the structure is unknown or does not suit the pair.
    """

    def __init__(
        self,
        source: ModelGeometry,
        target: ModelGeometry,
        *,
        structure: str = "full",
        kinds: Sequence[str] = KINDS,
        heads: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
        dtype: str = "float64",
        chunk_rows: int | None = None,
        blocks: Mapping[_Key, MomentBlock] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.structure = structure
        self.kinds = tuple(kinds)
        self.targets = tuple(range(len(target.layers)) if targets is None else targets)
        self.dtype = dtype
        self.heads = _kept_heads(source, target, structure, heads)
        self.chunk_rows = self._default_chunk() if chunk_rows is None else chunk_rows
        if blocks is None:
            blocks = {
                (kind, head): MomentBlock.zeros(
                    *_block_columns(source, target, structure, kind, self.targets), dtype
                )
                for kind in self.kinds
                for head in self.heads or (None,)
            }
        self._blocks = dict(blocks)
        self._waiting: list[tuple[FeatureRows, FeatureRows, Mapping[str, Float64] | None]] = []
        self._n_waiting = 0

    def _default_chunk(self) -> int:
        """Rows of a chunk, such that all kinds together take about 256 MB in float32."""
        widest = max(
            Columns.of(self.source, kind).width
            + Columns.of(self.target, kind).only(self.targets).width
            for kind in self.kinds
        )
        return min(1024, max(128, _CHUNK_BYTES // (4 * max(1, widest) * len(self.kinds))))

    @staticmethod
    def planned_bytes(
        source: ModelGeometry,
        target: ModelGeometry,
        *,
        structure: str = "full",
        kinds: Sequence[str] = KINDS,
        n_heads: int | None = None,
        targets: Sequence[int] | None = None,
        itemsize: int = 8,
    ) -> int:
        """Memory that the totals of such moments take, in bytes.

        ``n_heads`` is how many heads the ``"heads"`` structure keeps.
        """
        chosen = range(len(target.layers)) if targets is None else targets
        blocks = 1
        if structure == "heads":
            blocks = n_heads if n_heads is not None else source.layers[0].n_kv_heads
        return blocks * sum(
            MomentBlock.nbytes(*_block_columns(source, target, structure, kind, chosen), itemsize)
            for kind in kinds
        )

    @property
    def nbytes(self) -> int:
        """Memory of the totals, in bytes."""
        itemsize = np.dtype(self.dtype).itemsize
        return sum(MomentBlock.nbytes(b.source, b.target, itemsize) for b in self._blocks.values())

    def count(self, kind: str) -> float:
        """Sum of the weights of one kind's rows: their number, if they are unweighted."""
        return next(b.count for (k, _), b in self._totals() if k == kind)

    def effective_count(self, kind: str) -> float:
        """Kish's effective sample size: the number of rows, if they are unweighted."""
        return min(b.effective_count for (k, _), b in self._totals() if k == kind)

    def find(self, kind: str, heads: Sequence[int] | None) -> tuple[MomentBlock, int | None] | None:
        """The block that holds these source heads together, if there is one.

        Args:
            kind: ``"keys"`` or ``"values"``.
            heads: Source heads; ``None`` means all.

        Returns:
            The block, and its head if it holds only one (``"heads"`` structure).
        """
        head: int | None = None
        if self.structure == "heads":
            if heads is None and self.source.layers[0].n_kv_heads == 1:
                heads = (0,)
            if heads is None or len(heads) != 1:
                return None
            head = heads[0]
        block = dict(self._totals()).get((kind, head))
        return None if block is None else (block, head)

    def add(
        self,
        source: FeatureRows,
        target: FeatureRows,
        weights: Mapping[str, Float64] | None = None,
    ) -> None:
        """Accumulate the same tokens, as each model represents them.

        The arrays are kept until a chunk is full; do not change them afterwards.

        Args:
            source: Features of the source, all its layers.
            target: Features of the target, all its layers.
            weights: ``[rows]`` weights by kind, or ``None``.

        Raises:
            FitError: If the arrays do not fit the geometries.
        """
        n_rows = next(iter(source.of(self.kinds[0]))).shape[1]
        for side, geometry in ((source, self.source), (target, self.target)):
            for kind in self.kinds:
                columns = Columns.of(geometry, kind)
                got = [a.shape for a in side.of(kind)]
                want = [(h, n_rows, d) for h, d in zip(columns.heads, columns.dims)]
                if got != want:
                    raise FitError(
                        f"The {kind} do not fit the geometry: got {got}, expected {want}."
                    )
        self._waiting.append((source, target, weights))
        self._n_waiting += n_rows
        if self._n_waiting >= self.chunk_rows:
            self.flush()

    def flush(self) -> None:
        """Multiply the rows that have been collected."""
        if not self._waiting:
            return
        waiting, n_rows = self._waiting, self._n_waiting
        self._waiting, self._n_waiting = [], 0
        for (kind, head), block in self._blocks.items():
            width = block.source.width + block.target.width
            z: NDArray[Any] = np.empty((n_rows + 1, width), self.dtype)
            at = 0
            for source, target, _ in waiting:
                layers = [*source.of(kind), *(target.of(kind)[t] for t in self.targets)]
                n = layers[0].shape[1]
                column = 0
                for layer in layers:
                    for h in layer if head is None else layer[head : head + 1]:
                        z[at : at + n, column : column + h.shape[1]] = h
                        column += h.shape[1]
                at += n
            weights = None
            if waiting[0][2] is not None:
                weights = np.concatenate([w[kind] for _, _, w in waiting if w is not None])
            block.add(z, weights)

    def merge(self, other: Moments) -> None:
        """Add the moments of other tokens, gathered for the same pair.

        Raises:
            FitError: If they describe other features.
        """
        if self._identity() != other._identity():
            raise FitError(
                "These moments belong to different models, layers or structures and cannot be "
                "merged."
            )
        theirs = dict(other._totals())
        for key, block in self._totals():
            block.merge(theirs[key])

    def all_reduce(self, group: mx.distributed.Group) -> None:
        """Merge the moments of all processes of a group, in all of them."""

        def add(x: NDArray[Any]) -> NDArray[Any]:
            # On the CPU: Apple GPUs have no float64.
            kind = mx.float64 if x.dtype == np.float64 else mx.float32
            with mx.stream(mx.cpu):
                out = np.array(mx.distributed.all_sum(mx.array(x, dtype=kind), group=group))
            return out

        for _, block in self._totals():
            block.all_reduce(add)

    def save(self, path: Path, info: dict[str, Any] | None = None) -> None:
        """Write the moments to one safetensors file, atomically.

        Args:
            path: The file.
            info: JSON-ready facts to keep with it.

        Raises:
            FitError: If it cannot be written.
        """
        tensors: dict[str, NDArray[Any]] = {}
        for key, block in self._totals():
            name = _tensor_name(key)
            tensors[f"{name}.count"] = np.array([block.count, block.count_sq])
            tensors[f"{name}.mean"] = block.mean
            tensors[f"{name}.squares"] = block.squares
            for i, rows in enumerate(block.rows):
                tensors[f"{name}.rows.{i}"] = rows
        metadata = {
            "format": "kvgraft-moments",
            "format_version": str(FORMAT_VERSION),
            "identity": json.dumps(self._identity()),
            "dtype": self.dtype,
            "info": json.dumps(info or {}),
        }
        try:
            write_arrays(path, tensors, metadata)
        except ArtifactWriteError as error:
            raise FitError(str(error)) from error

    @classmethod
    def load(cls, path: Path, *, mapped: bool = False) -> tuple[Moments, dict[str, Any]]:
        """Read moments, and the facts kept with them.

        Args:
            path: A file that :meth:`save` wrote.
            mapped: Leave the data on disk until it is used. Such moments can be
                solved, but not added to.

        Raises:
            FormatError: If it is not a moments file, or is truncated.
            VersionError: If it is of another format version.
        """
        tensors, metadata = map_arrays(path)
        if metadata.get("format") != "kvgraft-moments":
            raise FormatError(f"{path} is not a kvgraft moments file.")
        if metadata.get("format_version") != str(FORMAT_VERSION):
            raise VersionError(
                f"{path} has moments of version {metadata.get('format_version')}, this release "
                f"reads {FORMAT_VERSION}. Gather them again."
            )
        identity = json.loads(metadata["identity"])
        source = ModelGeometry.from_dict(identity["source"])
        target = ModelGeometry.from_dict(identity["target"])
        structure, targets = identity["structure"], identity["targets"]
        blocks: dict[_Key, MomentBlock] = {}
        try:
            for kind in identity["kinds"]:
                columns = _block_columns(source, target, structure, kind, targets)
                for head in identity["heads"] or (None,):
                    name = _tensor_name((kind, head))
                    blocks[kind, head] = _read_block(tensors, name, columns, mapped=mapped)
        except KeyError as error:
            raise FormatError(f"{path} lacks the tensor {error}.") from error
        moments = cls(
            source,
            target,
            structure=structure,
            kinds=identity["kinds"],
            heads=identity["heads"],
            targets=targets,
            dtype=metadata["dtype"],
            chunk_rows=1024,
            blocks=blocks,
        )
        return moments, json.loads(metadata["info"])

    def _totals(self) -> Sequence[tuple[_Key, MomentBlock]]:
        """All blocks, with no rows waiting."""
        self.flush()
        return list(self._blocks.items())

    def _identity(self) -> dict[str, Any]:
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "structure": self.structure,
            "kinds": list(self.kinds),
            "heads": list(self.heads),
            "targets": list(self.targets),
        }


def _kept_heads(
    source: ModelGeometry, target: ModelGeometry, structure: str, heads: Sequence[int] | None
) -> tuple[int, ...]:
    """Heads with a block of their own; none in the ``"full"`` structure."""
    if structure == "full":
        return ()
    if structure != "heads":
        raise FitError(f"Unknown moment structure {structure!r}; use 'full' or 'heads'.")
    n_heads = common_heads(source, target)
    if n_heads is None:
        raise FitError(
            "Head-local moments need the same number of KV heads in every layer of both "
            f"models. Use the full structure ({named('head_mapping', 'full')} or "
            f"{named('head_mapping', 'grouped')})."
        )
    return tuple(range(n_heads) if heads is None else heads)


def _block_columns(
    source: ModelGeometry,
    target: ModelGeometry,
    structure: str,
    kind: str,
    targets: Sequence[int],
) -> tuple[Columns, Columns]:
    """Source and target columns of one block."""
    x, y = Columns.of(source, kind), Columns.of(target, kind).only(targets)
    return (x, y) if structure == "full" else (x.one_head(), y.one_head())


def _tensor_name(key: _Key) -> str:
    kind, head = key
    return kind if head is None else f"{kind}.{head}"


def _read_block(
    tensors: Mapping[str, NDArray[Any]],
    name: str,
    columns: tuple[Columns, Columns],
    *,
    mapped: bool,
) -> MomentBlock:
    count, count_sq = (float(x) for x in tensors[f"{name}.count"])
    rows = [tensors[f"{name}.rows.{i}"] for i in range(len(columns[0].heads))]
    return MomentBlock(
        *columns,
        count,
        count_sq,
        mean=np.array(tensors[f"{name}.mean"]),
        rows=rows if mapped else [np.array(r) for r in rows],
        squares=np.array(tensors[f"{name}.squares"]),
    )
