"""Element types of caches and casts between them."""

from __future__ import annotations

import mlx.core as mx

__all__ = ["CACHE_DTYPES", "saturate"]

CACHE_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
"""What keys, values, plain weights and biases may be."""


def saturate(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast to ``dtype``; values beyond its range become its largest value.

    An ``inf`` in a float16 cache poisons every later token, while a clamped entry
    only costs accuracy. NaN stays NaN, so that checks see it.

    Args:
        x: Any float array.
        dtype: float32, float16 or bfloat16.

    Returns:
        An array of the same shape.
    """
    if dtype == mx.float32 or x.dtype == dtype:
        return x.astype(dtype)
    limit = float(mx.finfo(dtype).max)
    # In float32: bfloat16 would round float16's limit up to what is beyond it.
    return mx.clip(x.astype(mx.float32), -limit, limit).astype(dtype)
