"""Head mappings: which source KV heads feed each target KV head."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.errors import FitError
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["HeadGroups", "even_groups", "head_groups"]

HeadGroups = tuple[tuple[int, ...], ...]
"""Source KV heads of each target KV head, all groups of one size."""


def even_groups(n_source: int, n_target: int) -> HeadGroups:
    """Source heads split over the target heads, in order and evenly.

    Every group has the same size, which a map needs. Where the counts do not divide,
    neighbouring groups share heads.
    """
    size = -(-n_source // n_target)
    starts = [min(h * n_source // n_target, n_source - size) for h in range(n_target)]
    return tuple(tuple(range(s, s + size)) for s in starts)


def head_groups(
    source: ModelGeometry,
    target: ModelGeometry,
    target_layer: int,
    sources: Sequence[int],
    mapping: str,
    groups: HeadGroups | None = None,
) -> HeadGroups | None:
    """Source heads per target head of one layer; ``None`` for the mapping ``full``.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        target_layer: The target layer.
        sources: Its source layers.
        mapping: ``"full"``, ``"local"`` or ``"grouped"``.
        groups: The groups of ``"grouped"``; default :func:`even_groups`.

    Raises:
        FitError: If the mapping does not fit the head counts.
    """
    if mapping == "full":
        return None
    n_target = target.layers[target_layer].n_kv_heads
    counts = {source.layers[s].n_kv_heads for s in sources}
    if mapping == "local":
        if counts != {n_target}:
            raise FitError(
                f"{named('head_mapping', 'local')} needs equal KV head counts; target layer "
                f"{target_layer} has {n_target}, its source layers have {sorted(counts)}. Use "
                "'grouped' or 'full'."
            )
        return tuple((h,) for h in range(n_target))
    if groups is None:
        if len(counts) != 1:
            raise FitError(
                f"The source layers of target layer {target_layer} have {sorted(counts)} KV "
                f"heads; state the groups, or give {named('head_mapping', 'full')}."
            )
        return even_groups(next(iter(counts)), n_target)
    if len(groups) != n_target or any(not 0 <= g < min(counts) for one in groups for g in one):
        raise FitError(
            f"The groups {[list(g) for g in groups]} do not fit target layer {target_layer}: it "
            f"has {n_target} KV heads, its source layers have {sorted(counts)}."
        )
    return groups
