"""Which tokens go where when one model's cache becomes another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgraft.cache import Bound, CacheSnapshot, place
from kvgraft.errors import GeometryError
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.token_ranges import Held

__all__ = ["Handover", "plan_handover"]


@dataclass(frozen=True)
class Handover:
    """Which tokens go where.

    Attributes:
        held: Per source layer, the tokens that it holds.
        wanted: Per target layer, the tokens to produce.
        bound: Limit of the target's cache, if the source's has one.
    """

    held: Mapping[int, Held]
    wanted: Mapping[int, Held]
    bound: Bound | None


def plan_handover(snapshot: CacheSnapshot, target: ModelGeometry) -> Handover:
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
    bound = snapshot.bound
    if bound is not None and any(layer.window is not None for layer in target.layers):
        if not snapshot.is_whole:
            raise GeometryError(
                f"The source's cache was limited to {bound.max_size} tokens and has dropped some; "
                f"{target.model_type} has sliding layers, for which mlx-lm knows no such limit. "
                "Re-prefill."
            )
        bound = None
    wanted = {i: place(layer, snapshot.offset, bound) for i, layer in enumerate(target.layers)}
    return Handover(dict(enumerate(snapshot.held)), wanted, bound)
