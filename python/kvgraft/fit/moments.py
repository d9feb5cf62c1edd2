"""Streaming second moments: all that a linear fit needs to know about the tokens.

A ridge fit of any target layer on any source layers needs only counts, means
and centred second moments of the features. They are gathered in one stream;
the tokens are dropped. Every k, λ, head plan and layer choice is then the
solution of a sub-block, without running the models again.

Accuracy. Rows come in chunks. Each chunk is centred by its own mean, multiplied,
and merged (Chan, Golub and LeVeque, 1979). The merge adds, per chunk, one outer
product of the difference of the means; that difference rides along as one more
row of the chunk, so that the merge costs nothing beyond the product. Products
have the dtype of the totals. For what is fitted on that is float64: real keys give
systems with conditions above 1e7, which magnify the rounding of float32 products
to a few 1e-4 of the weights, whatever the size of the chunks. What is only scored
on takes float32.

The products run in NumPy's BLAS and not in MLX. The totals are float64, which
no GPU of Apple's has; a Mac's CPU BLAS (Accelerate) runs beside the model's own
work on the GPU; and MLX's CPU wheel for Linux has a BLAS an order of magnitude
slower than NumPy's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError, FormatError, VersionError
from kvgraft.files.float_arrays import read_tensors, write_tensors
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["KINDS", "Columns", "LayerRows", "MomentSet", "Moments", "common_heads"]

KINDS = ("keys", "values")
"""The two feature spaces; each has its own moments and maps."""

FORMAT_VERSION = 1

_CHUNK_BYTES = 256 << 20
_TILE_BYTES = 32 << 20
_STRIP = 1024

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class LayerRows:
    """The features of some tokens on one side of a pair.

    Attributes:
        keys: One ``[n_kv_heads, rows, key_dim]`` float32 array per layer, RoPE
            stripped.
        values: One ``[n_kv_heads, rows, value_dim]`` float32 array per layer.
    """

    keys: list[Float32]
    values: list[Float32]

    def of(self, kind: str) -> list[Float32]:
        """The arrays of one kind."""
        return self.keys if kind == "keys" else self.values


@dataclass(frozen=True)
class Columns:
    """Where one side's features lie: layers, then heads, then dimensions.

    Attributes:
        heads: Heads per layer.
        dims: head_dim per layer.
    """

    heads: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, geometry: ModelGeometry, kind: str) -> Columns:
        """The columns of a model's keys or values."""
        return cls(
            tuple(layer.n_kv_heads for layer in geometry.layers),
            tuple(
                layer.key_dim if kind == "keys" else layer.value_dim for layer in geometry.layers
            ),
        )

    def one_head(self) -> Columns:
        """The columns of a single head."""
        return Columns((1,) * len(self.heads), self.dims)

    def only(self, layers: Sequence[int]) -> Columns:
        """The columns of some layers."""
        return Columns(tuple(self.heads[i] for i in layers), tuple(self.dims[i] for i in layers))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Features per layer."""
        return tuple(h * d for h, d in zip(self.heads, self.dims, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First column of each layer; one more entry than layers."""
        return tuple(accumulate(self.widths, initial=0))

    @cached_property
    def width(self) -> int:
        """Features of all layers."""
        return sum(self.widths)

    def pick(self, layers: Sequence[int], heads: Sequence[int] | None) -> slice | NDArray[np.intp]:
        """Columns of some heads of some layers; ``None`` is all heads."""
        return _pick(self, tuple(layers), None if heads is None else tuple(heads))

    def within(self, layer: int, heads: Sequence[int] | None) -> NDArray[np.intp] | None:
        """Columns of some heads inside a layer, counted from its start; ``None`` is all."""
        if heads is None or tuple(heads) == tuple(range(self.heads[layer])):
            return None
        d = self.dims[layer]
        return np.concatenate([np.arange(h * d, (h + 1) * d) for h in heads])


@lru_cache(maxsize=512)  # the selection of layers asks for the same few again and again
def _pick(
    columns: Columns, layers: tuple[int, ...], heads: tuple[int, ...] | None
) -> slice | NDArray[np.intp]:
    inside = [columns.within(layer, heads) for layer in layers]
    if all(one is None for one in inside) and layers == tuple(
        range(layers[0], layers[0] + len(layers))
    ):
        return slice(columns.starts[layers[0]], columns.starts[layers[-1] + 1])
    parts = [
        columns.starts[layer] + (np.arange(columns.widths[layer]) if one is None else one)
        for layer, one in zip(layers, inside)
    ]
    return np.concatenate(parts)


def common_heads(source: ModelGeometry, target: ModelGeometry) -> int | None:
    """The head count, if every layer of both models has the same; else ``None``."""
    counts = {layer.n_kv_heads for layer in (*source.layers, *target.layers)}
    return counts.pop() if len(counts) == 1 else None


class _Block:
    """Counts, means and centred second moments of one group of features.

    ``rows[l]`` holds the moments of source layer ``l`` with source layers
    ``l, l + 1, …`` and then with all target features: each pair of layers once.
    """

    def __init__(self, source: Columns, target: Columns, dtype: np.dtype[Any]) -> None:
        self.source = source
        self.target = target
        self.count = 0.0
        self.count_sq = 0.0
        self.mean: Float64 = np.zeros(source.width + target.width)
        self.rows: list[NDArray[Any]] = [
            np.zeros((w, source.width - s + target.width), dtype)
            for w, s in zip(source.widths, source.starts)
        ]
        self.squares: Float64 = np.zeros(target.width)

    @staticmethod
    def nbytes(source: Columns, target: Columns, itemsize: int) -> int:
        """Memory of a block."""
        pairs = sum(
            w * (source.width - s + target.width) for w, s in zip(source.widths, source.starts)
        )
        return pairs * itemsize + 8 * (source.width + 2 * target.width)

    def add(self, z: NDArray[Any], weights: Float64 | None = None) -> None:
        """Take in rows.

        Args:
            z: ``[r + 1, features]`` in the dtype of the totals, source columns
                first. The last row is room for the merge. Overwritten.
            weights: ``[r]`` weights of the rows; all 1 if absent.
        """
        n_rows = len(z) - 1
        body = z[:-1]
        if weights is None:
            count = float(n_rows)
            count_sq = float(n_rows)
            mean = body.mean(axis=0, dtype=np.float64)
        else:
            count = float(weights.sum())
            count_sq = float((weights**2).sum())
            if count <= 0:
                return
            mean = np.empty(body.shape[1])
            for c in range(0, len(mean), _STRIP):  # all of it in float64 would be as large twice
                strip = body[:, c : c + _STRIP].astype(np.float64, copy=False)
                mean[c : c + _STRIP] = weights @ strip / count
        body -= mean.astype(z.dtype)
        if weights is not None:
            body *= np.sqrt(weights).astype(z.dtype)[:, None]
        step = mean - self.mean
        total = self.count + count
        z[-1] = np.sqrt(self.count * count / total) * step
        self.mean += step * (count / total)
        self.count = total
        self.count_sq += count_sq

        n_source = self.source.width
        for (w, s), total_rows in zip(zip(self.source.widths, self.source.starts), self.rows):
            left = z[:, s : s + w].T
            # In tiles, so that the product is still in cache (or at least small)
            # when it is added to the total.
            tile = max(256, _TILE_BYTES // (z.itemsize * w))
            for c in range(0, total_rows.shape[1], tile):
                part = total_rows[:, c : c + tile]
                part += left @ z[:, s + c : s + c + part.shape[1]]
        y = z[:, n_source:]
        self.squares += np.einsum("ij,ij->j", y, y, dtype=np.float64)

    def merge(self, other: _Block) -> None:
        """Take in another block over the same columns."""
        total = self.count + other.count
        if other.count == 0:
            return
        step = other.mean - self.mean
        factor = self.count * other.count / total
        for (w, s), mine, theirs in zip(
            zip(self.source.widths, self.source.starts), self.rows, other.rows
        ):
            for i in range(w):  # row by row: the outer product is as large as the block
                mine[i] += theirs[i] + (factor * step[s + i]) * step[s:]
        n_source = self.source.width
        self.squares += other.squares + factor * step[n_source:] ** 2
        self.mean += step * (other.count / total)
        self.count = total
        self.count_sq += other.count_sq

    def all_reduce(self, add: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Take in the blocks of other processes; ``add`` sums an array over all of them."""
        count, mean = self.count, self.mean
        self.count, self.count_sq = add(np.array([count, self.count_sq])).tolist()
        self.mean = add(count * mean) / max(self.count, 1e-300)
        # Each process moves its moments to the common mean; then they just add up.
        step = mean - self.mean
        for i, (w, s) in enumerate(zip(self.source.widths, self.source.starts)):
            for j in range(w):
                self.rows[i][j] += (count * step[s + j]) * step[s:]
            self.rows[i] = add(self.rows[i])
        self.squares = add(self.squares + count * step[self.source.width :] ** 2)

    def xx(self, layers: Sequence[int], heads: Sequence[int] | None) -> Float64:
        """``[n, n]`` moments among some source features, a float64 copy."""
        picks = [self.source.within(layer, heads) for layer in layers]
        sizes = [
            self.source.widths[layer] if p is None else len(p) for layer, p in zip(layers, picks)
        ]
        starts = list(accumulate(sizes, initial=0))
        out: Float64 = np.empty((starts[-1], starts[-1]))
        for i, a in enumerate(layers):
            rows = self.rows[a] if picks[i] is None else self.rows[a][picks[i]]
            for j in range(i, len(layers)):
                b = layers[j]
                at = self.source.starts[b] - self.source.starts[a]
                part = rows[:, at : at + self.source.widths[b]]
                if picks[j] is not None:
                    part = part[:, picks[j]]
                out[starts[i] : starts[i + 1], starts[j] : starts[j + 1]] = part
                if i != j:
                    out[starts[j] : starts[j + 1], starts[i] : starts[i + 1]] = part.T
        return out

    def xy(
        self,
        layers: Sequence[int],
        heads: Sequence[int] | None,
        targets: Sequence[int],
        target_heads: Sequence[int] | None,
    ) -> Float64:
        """``[n, m]`` moments of some source features with some of the target's."""
        columns = self.target.pick(targets, target_heads)
        parts = []
        for layer in layers:
            offset = self.source.width - self.source.starts[layer]
            rows = self.rows[layer][:, offset:]
            inside = self.source.within(layer, heads)
            if inside is None or isinstance(columns, slice):
                part = (rows if inside is None else rows[inside])[:, columns]
            else:
                part = rows[inside[:, None], columns]
            parts.append(part.astype(np.float64, copy=False))
        return np.concatenate(parts)


class Moments:
    """The moments of a pair, or of some of its layers and heads.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        structure: ``"full"`` keeps the moments of every source head with every
            other, which serves all head plans; ``"heads"`` only those of the
            same head index, 1/n_heads of the memory and work, which serves the
            ``local`` plan. It needs equal head counts throughout.
        kinds: ``("keys",)``, ``("values",)`` or both.
        heads: Which heads to keep, in the ``"heads"`` structure; all if absent.
        targets: Which target layers to keep; all if absent.
        dtype: dtype of the products and totals: ``"float64"``, or ``"float32"``
            for moments that are only scored on.
        chunk_rows: Rows that are collected before they are multiplied.
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
    ) -> None:
        self.source = source
        self.target = target
        self.structure = structure
        self.kinds = tuple(kinds)
        self.targets = tuple(range(len(target.layers)) if targets is None else targets)
        self.dtype = dtype
        n_heads = common_heads(source, target)
        if structure == "heads":
            if n_heads is None:
                raise FitError(
                    "Head-local moments need the same number of KV heads in every layer of both "
                    f"models. Use the full structure ({named('head_mapping', 'full')} or "
                    f"{named('head_mapping', 'grouped')})."
                )
            self.heads = tuple(range(n_heads) if heads is None else heads)
        elif structure == "full":
            self.heads = ()
        else:
            raise FitError(f"Unknown moment structure {structure!r}; use 'full' or 'heads'.")
        self._blocks: dict[tuple[str, int], _Block] = {}
        widest = 1
        for kind in self.kinds:
            sides = Columns.of(source, kind), Columns.of(target, kind).only(self.targets)
            if structure == "full":
                self._blocks[kind, -1] = _Block(*sides, np.dtype(dtype))
            else:
                one = sides[0].one_head(), sides[1].one_head()
                for head in self.heads:
                    self._blocks[kind, head] = _Block(*one, np.dtype(dtype))
            widest = max(widest, sides[0].width + sides[1].width)
        if chunk_rows is None:
            chunk_rows = min(1024, max(128, _CHUNK_BYTES // (4 * widest * len(self.kinds))))
        self.chunk_rows = chunk_rows
        self._waiting: list[tuple[LayerRows, LayerRows, dict[str, Float64] | None]] = []
        self._n_waiting = 0

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
        total = 0
        chosen = range(len(target.layers)) if targets is None else targets
        for kind in kinds:
            sides = Columns.of(source, kind), Columns.of(target, kind).only(list(chosen))
            if structure == "full":
                total += _Block.nbytes(*sides, itemsize)
            else:
                heads = n_heads if n_heads is not None else source.layers[0].n_kv_heads
                total += heads * _Block.nbytes(sides[0].one_head(), sides[1].one_head(), itemsize)
        return total

    @property
    def nbytes(self) -> int:
        """Memory of the totals, in bytes."""
        return sum(
            _Block.nbytes(b.source, b.target, np.dtype(self.dtype).itemsize)
            for b in self._blocks.values()
        )

    @property
    def count(self) -> float:
        """Sum of the rows' weights: the number of rows, if they are unweighted."""
        self.flush()
        return next(iter(self._blocks.values())).count

    def effective_count(self, kind: str) -> float:
        """Kish's effective sample size: the number of rows, if they are unweighted."""
        self.flush()
        blocks = [b for (k, _), b in self._blocks.items() if k == kind]
        return min((b.count**2 / b.count_sq if b.count_sq else 0.0) for b in blocks)

    def add(
        self,
        source: LayerRows,
        target: LayerRows,
        weights: dict[str, Float64] | None = None,
    ) -> None:
        """Take in the same tokens as both models hold them.

        The arrays are kept until enough rows have come together; do not change
        them afterwards.

        Args:
            source: Features of the source, all its layers.
            target: Features of the target, all its layers.
            weights: ``[rows]`` weights by kind, or ``None``.
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
        """Multiply what has been collected."""
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
                    chosen = layer if head < 0 else layer[head : head + 1]
                    for h in chosen:
                        z[at : at + n, column : column + h.shape[1]] = h
                        column += h.shape[1]
                at += n
            weights = None
            if waiting[0][2] is not None:
                weights = np.concatenate([w[kind] for _, _, w in waiting if w is not None])
            block.add(z, weights)

    def merge(self, other: Moments) -> None:
        """Take in the moments of other tokens, gathered for the same pair.

        Raises:
            FitError: If they describe other features.
        """
        if self._identity() != other._identity():
            raise FitError(
                "These moments belong to different models, layers or structures and cannot be "
                "merged."
            )
        self.flush()
        other.flush()
        for key, block in self._blocks.items():
            block.merge(other._blocks[key])

    def all_reduce(self, group: mx.distributed.Group) -> None:
        """Merge the moments of all processes of a group, in all of them."""
        self.flush()

        def add(x: NDArray[Any]) -> NDArray[Any]:
            # On the CPU: no GPU of Apple's has float64.
            kind = mx.float64 if x.dtype == np.float64 else mx.float32
            with mx.stream(mx.cpu):
                out = np.array(mx.distributed.all_sum(mx.array(x, dtype=kind), group=group))
            return out

        for block in self._blocks.values():
            block.all_reduce(add)

    def save(self, path: Path, info: dict[str, Any] | None = None) -> None:
        """Write the moments to one safetensors file, atomically.

        Args:
            path: The file.
            info: JSON-ready facts to keep with it.

        Raises:
            FitError: If it cannot be written.
        """
        self.flush()
        tensors: dict[str, NDArray[Any]] = {}
        for (kind, head), block in self._blocks.items():
            name = kind if head < 0 else f"{kind}.{head}"
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
        write_tensors(path, tensors, metadata)

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
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != "kvgraft-moments":
            raise FormatError(f"{path} is not a kvgraft moments file.")
        if metadata.get("format_version") != str(FORMAT_VERSION):
            raise VersionError(
                f"{path} has moments of version {metadata.get('format_version')}, this release "
                f"reads {FORMAT_VERSION}. Gather them again."
            )
        identity = json.loads(metadata["identity"])
        moments = cls.__new__(cls)
        # Built by hand: the constructor would allocate what is about to be read.
        moments.source = ModelGeometry.from_dict(identity["source"])
        moments.target = ModelGeometry.from_dict(identity["target"])
        moments.structure = identity["structure"]
        moments.kinds = tuple(identity["kinds"])
        moments.heads = tuple(identity["heads"])
        moments.targets = tuple(identity["targets"])
        moments.dtype = metadata["dtype"]
        moments.chunk_rows = 1024
        moments._waiting, moments._n_waiting, moments._blocks = [], 0, {}
        try:
            for kind in moments.kinds:
                sides = (
                    Columns.of(moments.source, kind),
                    Columns.of(moments.target, kind).only(moments.targets),
                )
                for head in moments.heads or (-1,):
                    name = kind if head < 0 else f"{kind}.{head}"
                    block = _Block.__new__(_Block)
                    block.source, block.target = (
                        sides if head < 0 else (sides[0].one_head(), sides[1].one_head())
                    )
                    counts = tensors[f"{name}.count"]
                    block.count, block.count_sq = float(counts[0]), float(counts[1])
                    block.mean = np.array(tensors[f"{name}.mean"])
                    block.squares = np.array(tensors[f"{name}.squares"])
                    rows = [tensors[f"{name}.rows.{i}"] for i in range(len(block.source.heads))]
                    block.rows = rows if mapped else [np.array(r) for r in rows]
                    moments._blocks[kind, head] = block
        except KeyError as error:
            raise FormatError(f"{path} lacks the tensor {error}.") from error
        return moments, json.loads(metadata["info"])

    def _identity(self) -> dict[str, Any]:
        return {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "structure": self.structure,
            "kinds": list(self.kinds),
            "heads": list(self.heads),
            "targets": list(self.targets),
        }

    def _find(self, kind: str, heads: Sequence[int] | None) -> tuple[_Block, bool] | None:
        """The block that holds these source heads, and whether it is one head's own."""
        self.flush()
        if self.structure == "full":
            block = self._blocks.get((kind, -1))
            return None if block is None else (block, False)
        if heads is None:
            if self.source.layers[0].n_kv_heads != 1:
                return None
            heads = (0,)
        if len(heads) != 1 or (kind, heads[0]) not in self._blocks:
            return None
        return self._blocks[kind, heads[0]], True


class MomentSet:
    """Read access to the moments of a pair, whichever file or pass they came from.

    Args:
        parts: Moments that together hold the kinds, heads and target layers
            that will be asked for.
    """

    def __init__(self, parts: Moments | Sequence[Moments]) -> None:
        self.parts = [parts] if isinstance(parts, Moments) else list(parts)
        if not self.parts:
            raise FitError("No moments given.")

    @property
    def source(self) -> ModelGeometry:
        """Geometry of the source."""
        return self.parts[0].source

    @property
    def target(self) -> ModelGeometry:
        """Geometry of the target."""
        return self.parts[0].target

    @property
    def has_all_heads(self) -> bool:
        """Whether features of different heads can go into one system."""
        return all(part.structure == "full" for part in self.parts)

    def count(self, kind: str) -> float:
        """Sum of the weights of the rows of one kind."""
        part = self._parts_of(kind)
        part.flush()
        return next(b.count for (k, _), b in part._blocks.items() if k == kind)

    def effective_count(self, kind: str) -> float:
        """Kish's effective sample size of one kind."""
        return self._parts_of(kind).effective_count(kind)

    def xx(self, kind: str, sources: Sequence[int], heads: Sequence[int] | None) -> Float64:
        """``[n, n]`` centred moments of the features ``heads`` of ``sources``.

        ``heads`` ``None`` means all heads. Ordered by layer, head, dimension.
        """
        block, own, _ = self._block(kind, heads, None)
        return block.xx(sources, None if own else heads)

    def xy(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Sequence[int] | None,
        target: int,
        target_heads: Sequence[int] | None,
    ) -> Float64:
        """``[n, m]`` centred moments with the features ``target_heads`` of ``target``."""
        return self.xy_of(kind, sources, heads, [target], target_heads)

    def xy_of(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Sequence[int] | None,
        targets: Sequence[int],
        target_heads: Sequence[int] | None,
    ) -> Float64:
        """:meth:`xy` of several target layers, side by side."""
        self._check_own(self._block(kind, heads, targets[0])[1], heads, target_heads)
        found = []
        for (block, own), group in self._by_block(kind, heads, targets):
            which = None if own else target_heads
            found.append(block.xy(sources, None if own else heads, group, which))
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def means(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Sequence[int] | None,
        target: int,
        target_heads: Sequence[int] | None,
    ) -> tuple[Float64, Float64]:
        """Means of the same features: ``[n]`` and ``[m]``."""
        return self.means_of(kind, sources, heads, [target], target_heads)

    def means_of(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Sequence[int] | None,
        targets: Sequence[int],
        target_heads: Sequence[int] | None,
    ) -> tuple[Float64, Float64]:
        """:meth:`means` with those of several target layers, side by side."""
        x: Float64 = np.zeros(0)
        found = []
        for (block, own), group in self._by_block(kind, heads, targets):
            x = block.mean[block.source.pick(sources, None if own else heads)]
            columns = block.target.pick(group, None if own else target_heads)
            found.append(block.mean[block.source.width :][columns])
        return x, np.concatenate(found)

    def yy(
        self,
        kind: str,
        heads: Sequence[int] | None,
        target: int,
        target_heads: Sequence[int] | None,
    ) -> Float64:
        """``[m]`` centred sums of squares of the features ``target_heads`` of ``target``."""
        return self.yy_of(kind, heads, [target], target_heads)

    def yy_of(
        self,
        kind: str,
        heads: Sequence[int] | None,
        targets: Sequence[int],
        target_heads: Sequence[int] | None,
    ) -> Float64:
        """:meth:`yy` of several target layers, side by side."""
        found = []
        for (block, own), group in self._by_block(kind, heads, targets):
            columns = block.target.pick(group, None if own else target_heads)
            found.append(block.squares[columns])
        return np.concatenate(found)

    def _by_block(
        self, kind: str, heads: Sequence[int] | None, targets: Sequence[int]
    ) -> Iterator[tuple[tuple[_Block, bool], list[int]]]:
        """Target layers, as each block counts them; neighbours of one block together."""
        waiting: tuple[_Block, bool] | None = None
        group: list[int] = []
        for target in targets:
            block, own, part = self._block(kind, heads, target)
            if waiting is not None and waiting[0] is not block:
                yield waiting, group
                group = []
            waiting = block, own
            group.append(part.targets.index(target))
        if waiting is not None:
            yield waiting, group

    def _parts_of(self, kind: str) -> Moments:
        for part in self.parts:
            if kind in part.kinds:
                return part
        raise FitError(f"No moments of {kind} were gathered.")

    def _block(
        self, kind: str, heads: Sequence[int] | None, target: int | None
    ) -> tuple[_Block, bool, Moments]:
        for part in self._candidates(kind, target):
            found = part._find(kind, heads)
            if found is not None:
                return (*found, part)
        what = "all heads" if heads is None else f"heads {list(heads)}"
        where = "" if target is None else f" with target layer {target}"
        raise FitError(
            f"These moments do not hold the {kind} of {what} together{where}. Head-local moments "
            "serve the plan 'local' only; gather full ones for another plan."
        )

    def _candidates(self, kind: str, target: int | None) -> Iterator[Moments]:
        for part in self.parts:
            if kind in part.kinds and (target is None or target in part.targets):
                yield part

    @staticmethod
    def _check_own(
        own: bool, heads: Sequence[int] | None, target_heads: Sequence[int] | None
    ) -> None:
        if own and tuple(heads or (0,)) != tuple(target_heads or (0,)):
            raise FitError(
                "Head-local moments relate a head to the same head of the target only, not "
                f"{heads} to {target_heads}."
            )
