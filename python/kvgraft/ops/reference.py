"""The operation in plain MLX, to be read beside the paper.

Heo et al. (arXiv:2608.03893), equation 3 and section 3.3, for one target layer
with source layers S and positions t::

    K_hat[h] = R_t(t) ( concat_{l in S} R_s(t)^-1 K_s[l]  W_K[h] + b_K[h] )
    V_hat[h] =          concat_{l in S}           V_s[l]  W_V[h] + b_V[h]

Every faster path of kvgraft is tested against :func:`map_layer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvgraft.errors import GeometryError
from kvgraft.models.rope import RopeTable, rotate_pairs
from kvgraft.ops.quantized import Weight, dequantize, weight_shape

__all__ = ["HeadPlan", "check_map_layer", "map_layer", "saturate"]

HeadPlan = Sequence[Sequence[int]]
"""For each target head, the source heads that feed it, in the order of the weights."""

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def saturate(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast to ``dtype``; what lies beyond its range becomes its largest value.

    A float16 cache with an ``inf`` in it poisons every later token, while a
    clamped entry only costs accuracy. NaN stays NaN, so that checks see it.
    """
    if dtype == mx.float32 or x.dtype == dtype:
        return x.astype(dtype)
    limit = float(mx.finfo(dtype).max)
    # In float32: bfloat16 would round float16's limit up to what is beyond it.
    return mx.clip(x.astype(mx.float32), -limit, limit).astype(dtype)


def check_map_layer(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None,
    heads: HeadPlan | None,
    strip: Sequence[RopeTable | None] | None,
    rotate: RopeTable | None,
) -> None:
    """Raise :class:`GeometryError` unless the arguments of a map fit together."""
    if not sources:
        raise GeometryError("map_layer: no source layers given.")
    first = sources[0]
    if first.ndim not in (3, 4):
        raise GeometryError(
            f"map_layer: sources must be [H, N, D] or [B, H, N, D], got {first.ndim} axes."
        )
    for i, s in enumerate(sources):
        if s.dtype not in _FLOATS:
            raise GeometryError(f"map_layer: source {i} has dtype {s.dtype}; use a float dtype.")
        if (
            s.ndim != first.ndim
            or s.shape[-2] != first.shape[-2]
            or (s.ndim == 4 and s.shape[0] != first.shape[0])
        ):
            raise GeometryError(
                f"map_layer: source {i} has shape {tuple(s.shape)}, which does not match "
                f"{tuple(first.shape)} in batch or tokens."
            )
    n_heads, in_dim, out_dim = weight_shape(weight)
    if heads is None:
        widths = {sum(s.shape[-3] * s.shape[-1] for s in sources)}
    else:
        if len(heads) != n_heads:
            raise GeometryError(
                f"map_layer: the head plan lists {len(heads)} heads, the weights have {n_heads}."
            )
        for h, group in enumerate(heads):
            for g in group:
                for i, s in enumerate(sources):
                    if not 0 <= g < s.shape[-3]:
                        raise GeometryError(
                            f"map_layer: target head {h} wants source head {g}, but source "
                            f"{i} has {s.shape[-3]} heads."
                        )
        widths = {sum(len(group) * s.shape[-1] for s in sources) for group in heads}
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
    widths_of = [*zip(strip or [], (s.shape[-1] for s in sources)), (rotate, out_dim)]
    for table, head_dim in widths_of:
        if table is None:
            continue
        if table.dims > head_dim:
            raise GeometryError(
                f"map_layer: a RoPE table rotates {table.dims} dims of heads of {head_dim}."
            )
        if table.cos.shape[-2] != first.shape[-2]:
            raise GeometryError(
                f"map_layer: a RoPE table covers {table.cos.shape[-2]} positions, the cache "
                f"holds {first.shape[-2]} tokens."
            )
        if table.cos.ndim == 3 and (first.ndim == 3 or table.cos.shape[0] != first.shape[0]):
            raise GeometryError("map_layer: batched RoPE tables need a batch of the same size.")


def map_layer(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None = None,
    *,
    heads: HeadPlan | None = None,
    strip: Sequence[RopeTable | None] | None = None,
    rotate: RopeTable | None = None,
    dtype: mx.Dtype | None = None,
) -> mx.array:
    """Map the keys (or values) of the source layers to those of one target layer.

    Args:
        sources: One ``[H_s, N, D_s]`` or ``[B, H_s, N, D_s]`` array per source
            layer, in the order of the weights' input axis. float32, float16 or
            bfloat16; any strides. Layers may differ in heads and head_dim.
        weight: ``[H_t, in_dim, D_t]``, plain or :class:`AffineWeight`. The input
            axis runs over source layers, then heads of the plan, then dims.
        bias: ``[H_t, D_t]`` or ``None``.
        heads: Source heads per target head (``local``, ``grouped``); ``None``
            feeds all of them to each (``full``, the paper's).
        strip: For keys, one stripping table per source layer (``None`` where
            that layer has no RoPE); ``None`` for values.
        rotate: For keys, the target's table; ``None`` for values.
        dtype: dtype of the result; default that of the first source.

    Returns:
        ``[H_t, N, D_t]`` or ``[B, H_t, N, D_t]``. Arithmetic is float32.

    Raises:
        GeometryError: If shapes, dtypes or tables do not fit together.
    """
    check_map_layer(sources, weight, bias, heads, strip, rotate)
    n_heads, _, _ = weight_shape(weight)
    w = dequantize(weight).astype(mx.float32)
    tables = strip if strip is not None else [None] * len(sources)
    stripped = [rotate_pairs(s, t) for s, t in zip(sources, tables, strict=True)]

    def features(group: Sequence[int] | None) -> mx.array:
        """``[..., N, in_dim]``: layers, then heads, then dims, side by side."""
        parts = []
        for s in stripped:
            chosen = s if group is None else s[..., mx.array(list(group)), :, :]
            rows = chosen.swapaxes(-2, -3)  # [..., N, H, D]
            parts.append(rows.flatten(-2, -1))
        return mx.concatenate(parts, axis=-1)

    inputs = [features(None)] * n_heads if heads is None else [features(group) for group in heads]
    mapped = []
    for h in range(n_heads):
        y = inputs[h] @ w[h]
        mapped.append(y if bias is None else y + bias[h].astype(mx.float32))
    out = rotate_pairs(mx.stack(mapped, axis=-3), rotate)
    return saturate(out, sources[0].dtype if dtype is None else dtype)
