"""Weights of one linear map: plain, or in MLX affine groups."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvgraft.errors import GeometryError

__all__ = ["AffineWeight", "Weight", "dequantize", "quantize", "weight_shape"]


@dataclass(frozen=True)
class AffineWeight:
    """``[n_heads, in_dim, out_dim]`` weights quantised along ``in_dim``.

    The layout is that of ``mx.quantize`` on ``[n_heads, out_dim, in_dim]``, the
    one MLX's own quantised matrices have: groups run along the input axis.

    Attributes:
        packed: ``[n_heads, out_dim, in_dim * bits / 32]`` uint32.
        scales: ``[n_heads, out_dim, in_dim / group_size]``.
        biases: Same shape as ``scales``.
        group_size: 32, 64 or 128.
        bits: 4 or 8.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


Weight = mx.array | AffineWeight


def weight_shape(weight: Weight) -> tuple[int, int, int]:
    """``(n_heads, in_dim, out_dim)`` of either kind of weight."""
    if isinstance(weight, AffineWeight):
        heads, out_dim, words = weight.packed.shape
        return heads, words * 32 // weight.bits, out_dim
    heads, in_dim, out_dim = weight.shape
    return heads, in_dim, out_dim


def dequantize(weight: Weight) -> mx.array:
    """The plain ``[n_heads, in_dim, out_dim]`` array behind a weight.

    Quantised weights come back in float32: ``scale * q + bias`` rounded to
    float16 would add an error as large as that of a float16 result.
    """
    if isinstance(weight, AffineWeight):
        full = mx.dequantize(
            weight.packed,
            weight.scales.astype(mx.float32),
            weight.biases.astype(mx.float32),
            group_size=weight.group_size,
            bits=weight.bits,
        )
        return full.swapaxes(-1, -2)
    return weight


def quantize(weight: mx.array, *, bits: int, group_size: int = 64) -> AffineWeight:
    """Quantise ``[n_heads, in_dim, out_dim]`` weights in affine groups.

    Raises:
        GeometryError: If ``bits`` is not 4 or 8, or ``in_dim`` is no multiple of
            ``group_size``.
    """
    if bits not in (4, 8):
        raise GeometryError(f"Weights can be quantised to 4 or 8 bits, not {bits}.")
    if weight.shape[1] % group_size:
        raise GeometryError(
            f"in_dim {weight.shape[1]} is not a multiple of the group size {group_size}; "
            "use a smaller group (32, 64 or 128) or keep these weights unquantised."
        )
    packed, scales, biases = mx.quantize(weight.swapaxes(-1, -2), group_size=group_size, bits=bits)
    return AffineWeight(packed, scales, biases, group_size, bits)


def relative_change(before: Weight, after: Weight) -> float:
    """Norm of the difference of two weights of one shape, over that of the first."""
    a, b = (dequantize(w).astype(mx.float32) for w in (before, after))
    size = mx.sqrt(mx.square(a).sum())
    return float(mx.sqrt(mx.square(a - b).sum()) / mx.maximum(size, 1e-30))
