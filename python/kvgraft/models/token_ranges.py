"""Which tokens of a text a layer's cache holds.

A layer with full attention holds all of them. A sliding-window layer holds the
last ones, and a cache of limited size (``max_kv_size``) the first few and the
last ones. The layers of one model differ in this, so a hand-off has to ask for
each target layer whether the source layers that feed it hold what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

__all__ = ["TokenRanges"]


@dataclass(frozen=True)
class TokenRanges:
    """A set of tokens, as ascending ranges of absolute positions.

    Rows of a cache that holds them are in this order.

    Attributes:
        ranges: ``(start, stop)`` pairs, ascending, not touching, none empty.
    """

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> TokenRanges:
        """Join ascending ranges, some of which may be empty or touch."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if start >= stop:
                continue
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return cls(tuple(joined))

    @classmethod
    def all(cls, n_tokens: int) -> TokenRanges:
        """Tokens ``0 … n_tokens-1``."""
        return cls.of([(0, n_tokens)])

    @classmethod
    def last(cls, n_tokens: int, size: int, keep: int = 0) -> TokenRanges:
        """What ``size`` places hold of ``n_tokens``: the first ``keep``, and the last."""
        if n_tokens <= size:
            return cls.all(n_tokens)
        return cls.of([(0, keep), (n_tokens - (size - keep), n_tokens)])

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __and__(self, other: TokenRanges) -> TokenRanges:
        return TokenRanges.of(
            (max(a, c), min(b, d))
            for a, b in self.ranges
            for c, d in other.ranges
            if max(a, c) < min(b, d)
        )

    def __str__(self) -> str:
        return ", ".join(f"{start}…{stop - 1}" for start, stop in self.ranges) or "none"

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def positions(self) -> mx.array:
        """Absolute positions, ``[len(self)]`` int32."""
        parts = [mx.arange(start, stop, dtype=mx.int32) for start, stop in self.ranges]
        if not parts:
            return mx.zeros((0,), dtype=mx.int32)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def covers(self, other: TokenRanges) -> bool:
        """Whether every token of ``other`` is here."""
        return (self & other) == other

    def take(self, part: TokenRanges, x: mx.array) -> mx.array:
        """The rows of ``part`` out of rows of all these tokens.

        Args:
            part: Tokens that are among these.
            x: ``[..., len(self), D]``.

        Returns:
            ``[..., len(part), D]``; a view where the rows lie together.
        """
        if part == self:
            return x
        rows, before = [], 0
        for start, stop in self.ranges:
            for a, b in part.ranges:
                lo, hi = max(a, start), min(b, stop)
                if lo < hi:
                    rows.append(x[..., before + lo - start : before + hi - start, :])
            before += stop - start
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=-2)
