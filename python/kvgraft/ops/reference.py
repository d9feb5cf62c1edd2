"""The operation in plain MLX, to be read beside the paper.

Heo et al. (arXiv:2608.03893), equation 3 and section 3.3, for one target layer
with source layers S and positions t::

    K_hat[h] = R_t(t) ( concat_{l in S} R_s(t)^-1 K_s[l]  W_K[h] + b_K[h] )
    V_hat[h] =          concat_{l in S}           V_s[l]  W_V[h] + b_V[h]

Every faster path of kvgraft is tested against :func:`map_layer`. Only tests, the
self-test and benchmarks import this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvgraft.models.rope import RopeTable, rotate_pairs
from kvgraft.ops.checks import HeadMapping, check_map_layer
from kvgraft.ops.dtypes import saturate
from kvgraft.ops.quantized import Weight, dequantize, weight_shape

__all__ = ["map_layer"]


def map_layer(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None = None,
    *,
    heads: HeadMapping | None = None,
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
            axis runs over source layers, then heads of the mapping, then dims.
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
