"""Which tokens go where when one model's cache becomes another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgraft.cache.snapshot import CacheSnapshot, SizeLimit
from kvgraft.errors import GeometryError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["RequiredRanges", "required_positions", "required_ranges"]


def required_positions(
    layer: LayerGeometry, n_tokens: int, size_limit: SizeLimit | None = None
) -> TokenRanges:
    """Which of the first ``n_tokens`` tokens a layer's cache has to hold.

    All of them, the last ``window`` of a sliding layer, or what ``size_limit`` leaves.
    """
    if layer.window is not None:
        return TokenRanges.last(n_tokens, layer.window)
    if size_limit is not None:
        return TokenRanges.last(n_tokens, size_limit.max_size, size_limit.keep)
    return TokenRanges.all(n_tokens)


@dataclass(frozen=True)
class RequiredRanges:
    """Which tokens go where.

    Attributes:
        available: Per source layer, the tokens that it holds.
        required: Per target layer, the tokens to produce.
        size_limit: Limit of the target's cache, if the source's has one.
    """

    available: Mapping[int, TokenRanges]
    required: Mapping[int, TokenRanges]
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
    required = {
        i: required_positions(layer, snapshot.offset, size_limit)
        for i, layer in enumerate(target.layers)
    }
    return RequiredRanges(dict(enumerate(snapshot.token_ranges)), required, size_limit)
