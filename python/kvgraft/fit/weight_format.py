"""How solved weights are stored: 16- or 32-bit floats, or quantised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.head_mapping import head_groups
from kvgraft.models.geometry import ModelGeometry
from kvgraft.ops.quantized import Weight, quantize
from kvgraft.option_names import named

__all__ = ["is_quantized", "storage_problem", "store_weight"]

Float64 = NDArray[np.float64]

_FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def is_quantized(config: FitConfig) -> bool:
    """Whether a config asks for quantised weights."""
    return config.weight_format not in _FLOATS


def storage_problem(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> str | None:
    """Why the weights of a config cannot be quantised as it asks; ``None`` if they can.

    Inputs are quantised in groups, so the group size must divide their number. That
    number is known before a fit if all source layers are alike; where they differ,
    :func:`store_weight` raises.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        config: Settings; those that are still ``"auto"`` are not checked.

    Raises:
        FitError: If the head mapping does not fit the head counts.
    """
    if not is_quantized(config) or config.head_mapping == "auto":
        return None
    n = len(source.layers)
    parts = (("key_dim", "k"), ("value_dim", "k" if config.k_values is None else "k_values"))
    for dim, name in parts:
        widths = {
            len(heads) * getattr(source.layers[s], dim)
            for layer in range(len(target.layers))
            for s in range(n)
            for heads in head_groups(source, target, layer, [s], config.head_mapping, config.groups)
            or [range(source.layers[s].n_kv_heads)]
        }
        k = getattr(config, name)
        if len(widths) != 1 or k == "auto":
            continue
        width = widths.pop()
        inputs = width * (n if k == "all" else min(int(k), n))
        if inputs % config.group_size:
            fitting = [i for i in range(1, n + 1) if i * width % config.group_size == 0]
            return (
                f"{named('weight_format', config.weight_format)} groups {config.group_size} "
                f"inputs, and {named('head_mapping', config.head_mapping)} with {named(name, k)} "
                f"has {inputs}" + (f"; {named(name, fitting[0])} would do" if fitting else "")
            )
    return None


def store_weight(dense: Float64, config: FitConfig, where: str) -> Weight:
    """Convert solved weights to the format they are stored in.

    Args:
        dense: ``[n_heads, in_dim, out_dim]`` weights.
        config: ``weight_format`` and ``group_size`` say how.
        where: Which map this is, for messages.

    Raises:
        FitError: If a weight is out of the format's range, or the group size does not
            divide the inputs.
    """
    weight = mx.array(dense.astype(np.float32))
    if is_quantized(config):
        _check_range(dense, mx.float16, where)
        if dense.shape[1] % config.group_size:
            raise FitError(
                f"{where}: {dense.shape[1]} inputs don't divide into groups of "
                f"{config.group_size}. Give {named('weight_format', 'float16')}, or from Python a "
                "group_size of 32, 64 or 128 that does."
            )
        return quantize(
            weight.astype(mx.float16),
            bits=int(config.weight_format[0]),
            group_size=config.group_size,
        )
    dtype = _FLOATS[config.weight_format]
    _check_range(dense, dtype, where)
    return weight.astype(dtype)


def _check_range(dense: Float64, dtype: mx.Dtype, where: str) -> None:
    largest = float(np.abs(dense).max(initial=0.0))
    limit = float(mx.finfo(dtype).max)
    if largest > limit:
        raise FitError(
            f"{where}: a weight of {largest:.3g} is beyond the range of {dtype} ({limit:.3g}). "
            f"Give {named('weight_format', 'bfloat16')} or {named('weight_format', 'float32')}, or "
            f"raise {named('ridge_lambda')}."
        )
