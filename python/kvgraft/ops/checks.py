"""Whether the arguments of a map fit together; shared by the operation and its reference."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvgraft.errors import GeometryError
from kvgraft.models.rope import RopeTable
from kvgraft.ops.dtypes import CACHE_DTYPES
from kvgraft.ops.quantized import Weight, weight_shape

__all__ = ["HeadMapping", "check_map_layer"]

HeadMapping = Sequence[Sequence[int]]
"""For each target head, the source heads that feed it, in the order of the weights."""


def check_map_layer(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None,
    heads: HeadMapping | None,
    strip: Sequence[RopeTable | None] | None,
    rotate: RopeTable | None,
) -> None:
    """Check the arguments of :func:`kvgraft.ops.fused.map_layer`.

    Raises:
        GeometryError: If shapes, dtypes or tables do not fit together.
    """
    _check_sources(sources)
    n_heads, in_dim, out_dim = weight_shape(weight)
    widths = _feature_counts(sources, heads, n_heads)
    if widths != {in_dim}:
        raise GeometryError(
            f"map_layer: the sources give {sorted(widths)} features per target head, the "
            f"weights take {in_dim}."
        )
    if bias is not None and tuple(bias.shape) != (n_heads, out_dim):
        raise GeometryError(
            f"map_layer: bias has shape {tuple(bias.shape)}, expected {(n_heads, out_dim)}."
        )
    if strip is not None and len(strip) != len(sources):
        raise GeometryError(
            f"map_layer: {len(strip)} strip tables for {len(sources)} source layers."
        )
    for table, source in zip(strip or [], sources):
        _check_table(table, source.shape[-1], sources[0])
    _check_table(rotate, out_dim, sources[0])


def _check_sources(sources: Sequence[mx.array]) -> None:
    if not sources:
        raise GeometryError("map_layer: no source layers given.")
    first = sources[0]
    if first.ndim not in (3, 4):
        raise GeometryError(
            f"map_layer: sources must be [H, N, D] or [B, H, N, D], got {first.ndim} axes."
        )
    for i, s in enumerate(sources):
        if s.dtype not in CACHE_DTYPES:
            raise GeometryError(
                f"map_layer: source {i} has dtype {s.dtype}; use float32, float16 or bfloat16."
            )
        if (
            s.ndim != first.ndim
            or s.shape[-2] != first.shape[-2]
            or (s.ndim == 4 and s.shape[0] != first.shape[0])
        ):
            raise GeometryError(
                f"map_layer: source {i} has shape {tuple(s.shape)}, which does not match "
                f"{tuple(first.shape)} in batch or tokens."
            )


def _feature_counts(
    sources: Sequence[mx.array], heads: HeadMapping | None, n_heads: int
) -> set[int]:
    """Input features per target head; one number if all heads have the same."""
    if heads is None:
        return {sum(s.shape[-3] * s.shape[-1] for s in sources)}
    if len(heads) != n_heads:
        raise GeometryError(
            f"map_layer: the head mapping lists {len(heads)} heads, the weights have {n_heads}."
        )
    for h, group in enumerate(heads):
        for g in group:
            for i, s in enumerate(sources):
                if not 0 <= g < s.shape[-3]:
                    raise GeometryError(
                        f"map_layer: target head {h} wants source head {g}, but source "
                        f"{i} has {s.shape[-3]} heads."
                    )
    return {sum(len(group) * s.shape[-1] for s in sources) for group in heads}


def _check_table(table: RopeTable | None, head_dim: int, source: mx.array) -> None:
    if table is None:
        return
    if table.dims > head_dim:
        raise GeometryError(
            f"map_layer: a RoPE table rotates {table.dims} dims of heads of {head_dim}."
        )
    if table.cos.shape[-2] != source.shape[-2]:
        raise GeometryError(
            f"map_layer: a RoPE table covers {table.cos.shape[-2]} positions, the cache "
            f"holds {source.shape[-2]} tokens."
        )
    if table.cos.ndim == 3 and (source.ndim == 3 or table.cos.shape[0] != source.shape[0]):
        raise GeometryError("map_layer: batched RoPE tables need a batch of the same size.")
