"""From a snapshot of the source's cache to the target's cache, layer by layer.

Everything between the two live models: which tokens each target layer needs,
whether the source layers that feed it hold them, the map, and the new cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvgraft.caches import (
    Bound,
    CacheSnapshot,
    Provenance,
    build_cache,
    check_quantizable,
    place,
)
from kvgraft.errors import GeometryError
from kvgraft.geometry import ModelGeometry
from kvgraft.held import Held
from kvgraft.mapper import Mapper
from kvgraft.transfer import iter_transfer

__all__ = ["Handover", "graft_snapshot", "plan_handover"]


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


def plan_handover(
    snapshot: CacheSnapshot, target: ModelGeometry, n_tokens: int | None = None
) -> Handover:
    """Say which tokens each layer of the target needs.

    A full layer needs the whole text, a sliding one its window. If the source's
    cache was made with ``max_kv_size``, the target's gets the same limit and the
    same tokens at the same positions, as if it had been made so itself.

    Args:
        snapshot: What the source's cache holds.
        target: Geometry of the target.
        n_tokens: Hand over the first so many tokens only; default all.

    Raises:
        GeometryError: If there are not so many, or the source has dropped tokens because of
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
    n = snapshot.offset if n_tokens is None else n_tokens
    if not 0 < n <= snapshot.offset:
        raise GeometryError(f"Cannot hand over {n} tokens of {snapshot.offset}.")
    wanted = {i: place(layer, n, bound) for i, layer in enumerate(target.layers)}
    return Handover(dict(enumerate(snapshot.held)), wanted, bound)


def graft_snapshot(
    snapshot: CacheSnapshot,
    mapper: Mapper,
    target: ModelGeometry,
    *,
    unload_after: bool = True,
    provenance: Provenance | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    n_tokens: int | None = None,
    head: CacheSnapshot | None = None,
) -> list[Any]:
    """Map what the source's cache holds into a cache of the target.

    Args:
        snapshot: What :func:`kvgraft.caches.read_cache` returned.
        mapper: Mapper for this pair; the caller has checked that it fits.
        target: Geometry of the live target: its dtype is what is stored.
        unload_after: See :func:`kvgraft.transfer.transfer_cache`.
        provenance: Mark of the result.
        kv_bits: See :func:`kvgraft.caches.build_cache`.
        kv_group_size: See :func:`kvgraft.caches.build_cache`.
        n_tokens: Hand over the first so many tokens only; default all.
        head: What the target's own cache holds of the first tokens. These are
            exact, since no later token changes them, and take the place of
            mapped ones.

    Returns:
        The target's cache, evaluated, marked as mapped.

    Raises:
        CacheError: If source layers lack tokens that the target needs, or hold
            NaN or infinity.
        GeometryError: If the parts don't fit together.
    """
    plan = plan_handover(snapshot, target, n_tokens)
    if kv_bits is not None:
        check_quantizable(target, kv_bits, kv_group_size, plan.bound)
    own = {i: Held.of(()) for i in plan.wanted}
    if head is not None:
        if len(head.rows) != len(target.layers):
            raise GeometryError(
                f"The head has {len(head.rows)} layers, {target.model_type} has "
                f"{len(target.layers)}."
            )
        own = {i: part & head.rows[i].held for i, part in plan.wanted.items()}
    mapped = {i: part - own[i] for i, part in plan.wanted.items()}
    if not all(map(len, mapped.values())):
        raise GeometryError("The head leaves nothing to map; read the text natively.")
    layers = iter_transfer(
        snapshot.source_kv(),
        mapper,
        unload_after=unload_after,
        dtype=target.mx_dtype,
        held=plan.held,
        wanted=mapped,
        check_finite=True,
    )

    def whole() -> Iterator[tuple[mx.array, mx.array]]:
        for i, keys, values in layers:
            if head is None or not len(own[i]):
                yield keys, values
                continue
            row = head.rows[i]
            k, v = (row.held.take(own[i], x).astype(target.mx_dtype) for x in row.pair())
            yield (
                mx.concatenate([k, keys], axis=-2),
                mx.concatenate([v, values], axis=-2),
            )

    return build_cache(
        target,
        whole(),
        provenance=provenance,
        held=[plan.wanted[i] for i in range(len(target.layers))],
        bound=plan.bound,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )
