"""Second moments of one group of features: accumulated, merged and read.

Accuracy. Rows come in chunks. Each chunk is centred by its own mean, multiplied,
and merged (Chan, Golub and LeVeque, 1979). The merge adds, per chunk, one outer
product of the difference of the means; that difference is appended as one more
row of the chunk, so that the merge needs no product of its own. Products have
the dtype of the totals. Moments that maps are fitted on are float64: real keys give
systems with condition numbers above 1e7, which magnify the rounding of float32
products to a few 1e-4 of the weights, whatever the chunk size. Moments that maps
are only scored on are float32.

The products run in NumPy's BLAS and not in MLX: the totals are float64, which
Apple GPUs do not have; a Mac's CPU BLAS (Accelerate) runs in parallel with the
models on the GPU; and MLX's CPU wheel for Linux has a BLAS an order of magnitude
slower than NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.fit.features import Columns

__all__ = ["MomentBlock"]

_TILE_BYTES = 32 << 20
_STRIP = 1024

Float64 = NDArray[np.float64]


@dataclass(eq=False)
class MomentBlock:
    """Counts, means and centred second moments of one group of features.

    Attributes:
        source: Columns of the source's features.
        target: Columns of the target's features.
        count: Sum of the rows' weights.
        count_sq: Sum of their squares.
        mean: ``[source features + target features]`` weighted means.
        rows: Per source layer ``l`` the centred moments
            ``[features of l, features of source layers l, l + 1, … and of the target]``,
            so that each pair of layers is held once.
        squares: ``[target features]`` centred sums of squares.
    """

    source: Columns
    target: Columns
    count: float
    count_sq: float
    mean: Float64
    rows: list[NDArray[Any]]
    squares: Float64

    @classmethod
    def zeros(cls, source: Columns, target: Columns, dtype: str) -> MomentBlock:
        """The moments of no rows; products and totals have ``dtype``."""
        rows: list[NDArray[Any]] = [
            np.zeros((w, source.width - s + target.width), dtype)
            for w, s in zip(source.widths, source.starts)
        ]
        return cls(
            source,
            target,
            0.0,
            0.0,
            np.zeros(source.width + target.width),
            rows,
            np.zeros(target.width),
        )

    @staticmethod
    def nbytes(source: Columns, target: Columns, itemsize: int) -> int:
        """Memory of a block, in bytes."""
        pairs = sum(
            w * (source.width - s + target.width) for w, s in zip(source.widths, source.starts)
        )
        return pairs * itemsize + 8 * (source.width + 2 * target.width)

    @property
    def effective_count(self) -> float:
        """Kish's effective sample size: the number of rows, if they are unweighted."""
        return self.count**2 / self.count_sq if self.count_sq else 0.0

    def add(self, z: NDArray[Any], weights: Float64 | None = None) -> None:
        """Accumulate rows.

        Args:
            z: ``[r + 1, features]`` in the dtype of the totals, source columns
                first. The last row is scratch space for the merge. Overwritten.
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
            for c in range(0, len(mean), _STRIP):  # a float64 copy of all would double the memory
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

    def merge(self, other: MomentBlock) -> None:
        """Add another block over the same columns."""
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
        """Add the blocks of other processes; ``add`` sums an array over all of them."""
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
        """``[n, m]`` moments of some source features with some target features, a copy."""
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

    def source_mean(self, layers: Sequence[int], heads: Sequence[int] | None) -> Float64:
        """``[n]`` means of some source features."""
        return self.mean[self.source.pick(layers, heads)]

    def target_mean(self, targets: Sequence[int], heads: Sequence[int] | None) -> Float64:
        """``[m]`` means of some target features."""
        return self.mean[self.source.width :][self.target.pick(targets, heads)]

    def yy(self, targets: Sequence[int], heads: Sequence[int] | None) -> Float64:
        """``[m]`` centred sums of squares of some target features."""
        return self.squares[self.target.pick(targets, heads)]
