"""Read access to the moments of a pair, whichever file or pass they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.moment_block import MomentBlock
from kvgraft.fit.moments import Moments
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["MomentSet"]

Float64 = NDArray[np.float64]
Heads = Sequence[int] | None
"""KV heads; ``None`` means all."""


@dataclass(frozen=True)
class _Slice:
    """Features of some target layers, all in one block, and numbered as the block does."""

    block: MomentBlock
    heads: Heads
    targets: list[int]
    target_heads: Heads


class MomentSet:
    """The moments of a pair, from one object or from several that complement each other.

    All features are ordered by layer, then KV head, then dimension.

    Args:
        parts: Moments that together hold the kinds, heads and target layers
            that will be asked for.

    Raises:
        FitError: If there are none.
    """

    def __init__(self, parts: Moments | Sequence[Moments]) -> None:
        self.parts = [parts] if isinstance(parts, Moments) else list(parts)
        if not self.parts:
            raise FitError("No moments given.")

    @classmethod
    def of(cls, moments: Moments | Sequence[Moments] | MomentSet) -> MomentSet:
        """The same moments as a set."""
        return moments if isinstance(moments, MomentSet) else cls(moments)

    @property
    def source(self) -> ModelGeometry:
        """Geometry of the source."""
        return self.parts[0].source

    @property
    def target(self) -> ModelGeometry:
        """Geometry of the target."""
        return self.parts[0].target

    def count(self, kind: str) -> float:
        """Sum of the weights of one kind's rows.

        Raises:
            FitError: If no moments of that kind were gathered.
        """
        return self._first_of(kind).count(kind)

    def effective_count(self, kind: str) -> float:
        """Kish's effective sample size of one kind.

        Raises:
            FitError: If no moments of that kind were gathered.
        """
        return self._first_of(kind).effective_count(kind)

    def xx(self, kind: str, sources: Sequence[int], heads: Heads) -> Float64:
        """Centred moments among source features.

        Args:
            kind: ``"keys"`` or ``"values"``.
            sources: Source layers.
            heads: Their KV heads; ``None`` means all.

        Returns:
            ``[n, n]``, a float64 copy.

        Raises:
            FitError: If no block holds these heads together.
        """
        block, head, _ = self._find(kind, heads, None)
        return block.xx(sources, heads if head is None else None)

    def xy(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Heads,
        targets: Sequence[int],
        target_heads: Heads,
    ) -> Float64:
        """Centred moments of source features with target features.

        Args:
            kind: ``"keys"`` or ``"values"``.
            sources: Source layers.
            heads: Their KV heads; ``None`` means all.
            targets: Target layers, whose columns lie side by side in the result.
            target_heads: Their KV heads; ``None`` means all.

        Returns:
            ``[n, m]``, a float64 copy.

        Raises:
            FitError: If no block holds these features together.
        """
        found = [
            s.block.xy(sources, s.heads, s.targets, s.target_heads)
            for s in self._slices(kind, heads, targets, target_heads)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def means(
        self,
        kind: str,
        sources: Sequence[int],
        heads: Heads,
        targets: Sequence[int],
        target_heads: Heads,
    ) -> tuple[Float64, Float64]:
        """Means of the features of :meth:`xy`, with its arguments: ``[n]`` and ``[m]``."""
        slices = list(self._slices(kind, heads, targets, target_heads))
        x = slices[-1].block.source_mean(sources, slices[-1].heads)
        return x, np.concatenate([s.block.target_mean(s.targets, s.target_heads) for s in slices])

    def yy(self, kind: str, heads: Heads, targets: Sequence[int], target_heads: Heads) -> Float64:
        """``[m]`` centred sums of squares of target features.

        Arguments are those of :meth:`xy`; ``heads`` are the source heads that the
        target features are explained by.
        """
        return np.concatenate(
            [
                s.block.yy(s.targets, s.target_heads)
                for s in self._slices(kind, heads, targets, target_heads)
            ]
        )

    def _slices(
        self, kind: str, heads: Heads, targets: Sequence[int], target_heads: Heads
    ) -> Iterator[_Slice]:
        """The target layers in order, neighbours in the same block together."""
        current: _Slice | None = None
        for target in targets:
            block, head, part = self._find(kind, heads, target)
            if current is None or current.block is not block:
                if current is not None:
                    yield current
                if head is not None and tuple(target_heads or (0,)) != (head,):
                    raise FitError(
                        "Head-local moments relate a head to the same head of the target only, "
                        f"not {heads} to {target_heads}."
                    )
                inside = (heads, target_heads) if head is None else (None, None)
                current = _Slice(block, inside[0], [], inside[1])
            current.targets.append(part.targets.index(target))
        if current is not None:
            yield current

    def _first_of(self, kind: str) -> Moments:
        for part in self.parts:
            if kind in part.kinds:
                return part
        raise FitError(f"No moments of {kind} were gathered.")

    def _find(
        self, kind: str, heads: Heads, target: int | None
    ) -> tuple[MomentBlock, int | None, Moments]:
        """The block of some source heads and a target layer, its head if it has one only."""
        for part in self.parts:
            if kind in part.kinds and (target is None or target in part.targets):
                found = part.find(kind, heads)
                if found is not None:
                    return (*found, part)
        what = "all heads" if heads is None else f"heads {list(heads)}"
        where = "" if target is None else f" with target layer {target}"
        raise FitError(
            f"These moments do not hold the {kind} of {what} together{where}. Head-local moments "
            f"serve {named('head_mapping', 'local')} only; gather full ones for other mappings."
        )
