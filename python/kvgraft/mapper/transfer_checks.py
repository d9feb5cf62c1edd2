"""What a source cache is checked for before it is mapped.

:mod:`kvgraft.ops.checks` compares shapes again for each map. These checks run before
any work, over all layers, and name the source layer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft import _ext
from kvgraft.errors import ArgumentError, CacheError, GeometryError, UnsupportedCacheError
from kvgraft.mapper.data import MapperData, SourceKV, require_mapper
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.models.token_ranges import TokenRanges

__all__ = [
    "FLOATS",
    "LAST_POSITION",
    "Pairs",
    "check_arrays",
    "check_dtype",
    "check_kinds",
    "check_mapper",
    "check_reach",
    "check_sources",
    "refuse_nonfinite",
    "to_positions",
]

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
LAST_POSITION = 2**31 - 1

Pairs = dict[int, tuple[mx.array, mx.array]]
"""``{source layer: (keys, values)}`` of the layers that one target layer is made from."""


def check_kinds(mapper: Any, source_kv: Any) -> None:
    """Say what is wrong when the arguments are swapped or of another kind."""
    check_mapper(mapper)
    if isinstance(source_kv, Mapping):
        return
    if isinstance(source_kv, (list, tuple)) and source_kv and hasattr(source_kv[0], "offset"):
        raise UnsupportedCacheError(
            "This is a list of mlx-lm's cache objects, and arrays are expected. Use "
            "kvgraft.handoff.map_cache, or give kvgraft.cache.read_cache(cache).source_kv()."
        )
    raise ArgumentError(
        "The source is given as {layer: (keys, values)}, not as a "
        f"{type(source_kv).__name__}. For a list of pairs use kvgraft.mapper.transfer.apply."
    )


def check_mapper(mapper: Any) -> None:
    """Refuse what is not a mapper, naming the order of the arguments."""
    require_mapper(
        mapper,
        " The order is transfer_layer(mapper, target_layer, source_kv) and "
        "transfer_cache(source_kv, mapper).",
    )


def check_arrays(s: int, pair: Any) -> None:
    """Refuse what is not a pair of MLX arrays."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise GeometryError(f"Source layer {s} is no pair of keys and values.")
    for name, x in zip(("Keys", "Values"), pair):
        if not isinstance(x, mx.array):
            made = " Make one with mx.array(...)." if hasattr(x, "shape") else ""
            raise ArgumentError(
                f"{name} of source layer {s} must be an MLX array, not a {type(x).__name__}.{made}"
            )


def refuse_nonfinite(pairs: Pairs) -> None:
    """Refuse NaN and infinity; evaluates the arrays.

    Raises:
        CacheError: Naming the source layers.
    """
    bad = [s for s, pair in pairs.items() if not all(_ext.all_finite(x) for x in pair)]
    if bad:
        raise CacheError(
            f"Source layer{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} of the cache: NaN or "
            "infinite values. The source model's dtype may have overflowed; load it as bfloat16, "
            "or re-prefill."
        )


def check_sources(
    mapper: MapperData,
    layers: Sequence[LayerMap],
    source_kv: SourceKV,
    available: Mapping[int, TokenRanges] | None,
) -> tuple[list[int], tuple[int, ...]]:
    """The source layers that are needed, and ``(batch, tokens)`` or ``(tokens,)`` of the first."""
    needed = sorted({s for m in layers for s in m.sources})
    if not needed:
        raise GeometryError("This mapper produces no layers.")
    missing = [s for s in needed if s not in source_kv]
    if missing:
        raise GeometryError(
            f"The cache lacks source layers {missing}; the mapper reads layers {needed}."
        )
    unknown = [] if available is None else [s for s in needed if s not in available]
    if unknown:
        raise ArgumentError(f"`available` does not say which tokens source layers {unknown} hold.")
    lead: tuple[int, ...] = ()
    for s in needed:
        pair = source_kv[s]
        check_arrays(s, pair)
        keys = pair[0]
        if not lead:
            if keys.ndim not in (3, 4):
                raise GeometryError(
                    f"Keys of source layer {s} have shape {tuple(keys.shape)}; expected "
                    "[n_kv_heads, N, head_dim] or [B, n_kv_heads, N, head_dim]."
                )
            lead = (*keys.shape[:-3], int(keys.shape[-2]))
        _check_layer(
            mapper, s, pair, lead if available is None else (*lead[:-1], len(available[s]))
        )
    if lead[-1] == 0:
        raise GeometryError(
            "The source cache holds no tokens, so there is nothing to transfer. Prefill the "
            "source first, or start the target from an empty cache."
        )
    return needed, lead


def _check_layer(
    mapper: MapperData, s: int, pair: tuple[mx.array, mx.array], lead: tuple[int, ...]
) -> None:
    geometry = mapper.source.layers[s]
    *batch, n_tokens = lead
    for name, array, dim in zip(
        ("Keys", "Values"), pair, (geometry.key_dim, geometry.value_dim), strict=True
    ):
        want = (*batch, geometry.n_kv_heads, n_tokens, dim)
        if tuple(array.shape) != want:
            raise GeometryError(
                f"{name} of source layer {s} have shape {tuple(array.shape)}; this mapper and the "
                f"other layers ask for {want}."
            )
        if array.dtype not in FLOATS:
            raise GeometryError(
                f"{name} of source layer {s} are {array.dtype}; a cache of floats is needed. "
                "Dequantise a quantised cache first."
            )


def to_positions(
    given: mx.array | Sequence[int] | None, n_tokens: int, batch: tuple[int, ...]
) -> mx.array:
    """Positions as int32, ``[N]`` or ``[B, N]``; ``0 … N-1`` if none are given.

    Raises:
        ArgumentError: If they are not numbers.
        GeometryError: If their shape does not fit, or they are not whole numbers
            from 0 on.
    """
    if given is None:
        return mx.arange(n_tokens, dtype=mx.int32)
    positions = given if isinstance(given, mx.array) else _array(given)
    shape = tuple(positions.shape)
    if shape != (n_tokens,) and not (batch and shape == (*batch, n_tokens)):
        raise GeometryError(
            f"positions has shape {shape}, but the cache holds {n_tokens} tokens"
            + (f" in each of {batch[0]} rows." if batch else ".")
        )
    whole = positions.astype(mx.int32)
    if (
        positions.dtype == mx.bool_
        or not mx.array_equal(whole.astype(positions.dtype), positions)
        or bool((whole < 0).any().item())
    ):
        raise GeometryError(f"positions must be whole numbers from 0 to {LAST_POSITION:,}.")
    return whole


def _array(given: Sequence[int]) -> mx.array:
    try:
        # By NumPy, which finds a dtype that holds them all.
        found = np.asarray(given if hasattr(given, "shape") else list(given))
        if found.dtype.kind not in "biuf":
            raise TypeError(found.dtype)
        return mx.array(found)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"positions must be whole numbers, [N] or [B, N], not {reprlib.repr(given)}."
        ) from error


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype that no cache has."""
    if dtype is not None and dtype not in FLOATS:
        raise ArgumentError(
            f"The result's dtype is mx.float32, mx.float16 or mx.bfloat16, not {dtype!r}."
        )


def check_reach(
    mapper: MapperData, layers: Sequence[LayerMap], needed: Sequence[int], positions: mx.array
) -> None:
    """Refuse positions beyond what a RoPE of the source or target is defined for."""
    specs = {mapper.source.layers[s].rope for s in needed}
    specs |= {mapper.target.layers[m.target_layer].rope for m in layers}
    limited = [spec for spec in specs if spec.max_position is not None]
    if limited:
        last = int(mx.max(positions).item())  # type: ignore[arg-type]  # of an integer array
        for spec in limited:
            spec.check_positions(last)
