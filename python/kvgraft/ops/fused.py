"""The fused operation.

:func:`map_layer` takes the arguments of :func:`kvgraft.ops.reference.map_layer` and
returns the same result: by a kernel where there is one for the device, composed of
MLX's own operations elsewhere. :func:`explain` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvgraft import _ext
from kvgraft.errors import ArgumentError
from kvgraft.models.rope import RopeTable
from kvgraft.ops.checks import HeadMapping, check_map_layer
from kvgraft.ops.quantized import AffineWeight, Weight

__all__ = ["explain", "map_layer", "num_threads", "set_num_threads"]


def _table(table: RopeTable | None) -> tuple[mx.array, mx.array, bool] | None:
    return None if table is None else (table.cos, table.sin, table.traditional)


def _arguments(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None,
    heads: HeadMapping | None,
    strip: Sequence[RopeTable | None] | None,
    rotate: RopeTable | None,
    dtype: mx.Dtype | None,
) -> dict[str, Any]:
    """The arguments of ``_ext.map_layer`` and ``_ext.path``, checked."""
    check_map_layer(sources, weight, bias, heads, strip, rotate)
    affine = weight if isinstance(weight, AffineWeight) else None
    return {
        "sources": list(sources),
        "weight": weight.packed if isinstance(weight, AffineWeight) else weight,
        "scales": affine and affine.scales,
        "biases": affine and affine.biases,
        "group_size": affine.group_size if affine else 0,
        "bits": affine.bits if affine else 0,
        "bias": bias,
        "heads": None if heads is None else [list(group) for group in heads],
        "strip": [] if strip is None else [_table(t) for t in strip],
        "rotate": _table(rotate),
        "dtype": dtype,
    }


def map_layer(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None = None,
    *,
    heads: HeadMapping | None = None,
    strip: Sequence[RopeTable | None] | None = None,
    rotate: RopeTable | None = None,
    dtype: mx.Dtype | None = None,
    composed: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Map the keys (or values) of the source layers to those of one target layer.

    Lazy like any MLX operation; works under ``mx.compile``, ``mx.vmap``,
    ``mx.async_eval``, and has gradients (``mx.grad``, ``mx.vjp``, ``mx.jvp``) with
    respect to sources, plain weights, bias and the tables' cosines and sines; of
    quantised weights with respect to scales and biases. Gradients, and results under
    ``mx.vmap``, come from MLX's own operations.

    Args:
        sources: One ``[H_s, N, D_s]`` or ``[B, H_s, N, D_s]`` array per source
            layer, in the order of the weights' input axis. float32, float16 or
            bfloat16; any strides, none is copied. Layers may differ in heads
            and head_dim.
        weight: ``[H_t, in_dim, D_t]``, plain or :class:`AffineWeight`.
        bias: ``[H_t, D_t]`` or ``None``.
        heads: Source heads per target head; ``None`` feeds all to each.
        strip: For keys, one stripping table per source layer (``None`` where
            that layer has no RoPE); ``None`` for values.
        rotate: For keys, the target's table; ``None`` for values.
        dtype: dtype of the result; default that of the first source.
        composed: Use MLX's own operations even where there is a kernel. Slower, but
            ``mx.export_function`` takes it: MLX can export its own operations only.
        stream: Stream or device to run on.

    Returns:
        ``[H_t, N, D_t]`` or ``[B, H_t, N, D_t]``. Arithmetic is float32; values
        beyond the range of ``dtype`` become its largest value.

    Raises:
        GeometryError: If shapes, dtypes or tables do not fit together.
        ValueError: When differentiated with respect to the packed integers of
            quantised weights.
    """
    arguments = _arguments(sources, weight, bias, heads, strip, rotate, dtype)
    return _ext.map_layer(**arguments, composed=composed, stream=stream)


def explain(
    sources: Sequence[mx.array],
    weight: Weight,
    bias: mx.array | None = None,
    *,
    heads: HeadMapping | None = None,
    strip: Sequence[RopeTable | None] | None = None,
    rotate: RopeTable | None = None,
    dtype: mx.Dtype | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> str:
    """Which path :func:`map_layer` takes for these arguments; nothing is computed.

    Returns:
        ``"cpu"`` or ``"metal"`` for the kernel of that device, ``"composed"``
        for MLX's own operations.

    Raises:
        GeometryError: If shapes, dtypes or tables do not fit together.
    """
    return _ext.path(
        **_arguments(sources, weight, bias, heads, strip, rotate, dtype), stream=stream
    )


def set_num_threads(count: int) -> None:
    """Limit the threads that CPU kernels use at one time, over all streams.

    Args:
        count: The limit; 0 for the default, which is ``KVGRAFT_NUM_THREADS`` if
            that is set and otherwise the cores this process may use.

    Raises:
        ArgumentError: If that is no number of threads.
    """
    if not isinstance(count, int) or count < 0:
        raise ArgumentError(f"The limit is a number of threads, or 0, not {count!r}.")
    _ext.set_num_threads(count)


def num_threads() -> int:
    """The most threads that CPU kernels use at one time."""
    return _ext.num_threads()
