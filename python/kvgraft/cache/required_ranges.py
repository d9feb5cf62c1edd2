"""Which tokens go where when one model's cache becomes another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgraft.cache import CacheSnapshot, SizeLimit, required_positions
from kvgraft.errors import GeometryError
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["RequiredRanges", "required_ranges"]


@dataclass(frozen=True)
class RequiredRanges:
    """Which tokens go where.

    Attributes:
        held: Per source layer, the tokens that it holds.
        wanted: Per target layer, the tokens to produce.
        size_limit: Limit of the target's cache, if the source's has one.
    """

    held: Mapping[int, TokenRanges]
    wanted: Mapping[int, TokenRanges]
    size_limit: SizeLimit | None


def required_ranges(snapshot: CacheSnapshot, target: ModelGeometry) -> RequiredRanges:
    """Say which tokens each layer of the target needs.

    A full layer needs the whole text, a sliding one its window. If the source's
    cache was made with ``max_kv_size``, the target's gets the same limit and the
    same tokens at the same positions, as if it had been made so itself.

    Args:
        snapshot: What the source's cache holds.
        target: Geometry of the target.

    Raises:
        GeometryError: If the source has dropped tokens because of
            ``max_kv_size`` and the target has sliding layers: mlx-lm gives such
            models no limited cache.
    """
    size_limit = snapshot.size_limit
    if size_limit is not None and any(layer.window is not None for layer in target.layers):
        if not snapshot.is_whole:
            raise GeometryError(
                f"The source's cache was limited to {size_limit.max_size} tokens and has dropped "
                f"some; {target.model_type} has sliding layers, for which mlx-lm knows no such "
                "limit. Re-prefill."
            )
        size_limit = None
    wanted = {
        i: required_positions(layer, snapshot.offset, size_limit)
        for i, layer in enumerate(target.layers)
    }
    return RequiredRanges(dict(enumerate(snapshot.held)), wanted, size_limit)
