"""From arrays to mlx-lm's cache objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvgraft import _ext
from kvgraft.cache.provenance import Provenance, mark
from kvgraft.cache.read import inner_caches, read_entry
from kvgraft.cache.required_ranges import required_positions
from kvgraft.cache.snapshot import QuantizedRows, SizeLimit
from kvgraft.errors import CacheError, GeometryError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.token_ranges import TokenRanges
from kvgraft.ops.dtypes import saturate
from kvgraft.option_names import named

__all__ = ["build_cache", "check_mappable", "check_quantizable", "compact"]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_GROUP_SIZES = (32, 64, 128)
_BITS = (2, 3, 4, 5, 6, 8)


def build_cache(
    target: Any,
    layers: Iterable[tuple[mx.array, mx.array]],
    *,
    dtype: mx.Dtype | None = None,
    provenance: Provenance | None = None,
    token_ranges: Sequence[TokenRanges] | None = None,
    size_limit: SizeLimit | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> list[Any]:
    """Make the cache that a model would hold after reading ``N`` tokens.

    The arrays are cast to the dtype that the model writes, since a buffer in
    another one is either cast silently or grows into the wider of the two, and
    evaluated, since a lazy array made in one thread fails in another.

    Args:
        target: The model that will continue from the cache, or its geometry. A model is
            probed (see :func:`kvgraft.models.probe.read_geometry`), so pass the geometry
            when it is known.
        layers: ``(keys, values)`` per cache, ``[B, H, N, D]`` or ``[H, N, D]``,
            keys with RoPE at positions ``0 … N-1``. A generator is consumed
            layer by layer, so that each can be dropped once it is stored; a
            list is checked as a whole before any work.
        dtype: dtype to store; default that of the geometry. Values beyond its
            range are clamped to its largest.
        provenance: Mark the result as mapped.
        token_ranges: Per cache, the tokens whose rows are given, where these are not
            all tokens of the text. A sliding layer needs the last ``window``.
        size_limit: Make a cache of limited size, as ``max_kv_size`` does; models
            with sliding layers have no such limit.
        kv_bits: Quantise with so many bits, as ``--kv-bits`` does.
        kv_group_size: Numbers that share a scale when quantised.

    Returns:
        One cache per layer, ready for ``generate_step(..., prompt_cache=...)``
        with at least one token left: ``KVCache``, or ``RotatingKVCache`` for a
        sliding layer or with ``size_limit``, or ``QuantizedKVCache`` with ``kv_bits``.

    Raises:
        GeometryError: If the arrays don't fit the target, or it cannot be
            quantised so.
        CacheError: If there are no tokens, tokens are missing that a layer
            needs, or a value is NaN or infinite.
    """
    geometry = target if isinstance(target, ModelGeometry) else read_geometry(target)
    store = geometry.mx_dtype if dtype is None else dtype
    if store not in _FLOATS:
        raise GeometryError(f"A cache cannot be stored as {store}; use a float dtype.")
    if kv_bits is not None:
        check_quantizable(geometry, kv_bits, kv_group_size, size_limit)
    if token_ranges is not None:
        _check_count(geometry, len(token_ranges))
    if isinstance(layers, (list, tuple)):
        for _ in _checked(geometry, layers, token_ranges):
            pass
    caches: list[Any] = []
    for layer, (k, v, given) in enumerate(_checked(geometry, layers, token_ranges)):
        k, v = _required_rows(geometry, layer, k, v, given, size_limit)
        k, v = _own(k, store), _own(v, store)
        mx.eval(k, v)
        made = _new_cache(k, v, given.stop, geometry.layers[layer], size_limit)
        if kv_bits is not None:
            made = made.to_quantized(group_size=kv_group_size, bits=kv_bits)
            mx.eval(made.keys, made.values)
        caches.append(made)
    if provenance is not None:
        mark(caches, provenance)
    return caches


def _checked(
    geometry: ModelGeometry,
    layers: Iterable[tuple[mx.array, mx.array]],
    token_ranges: Sequence[TokenRanges] | None,
) -> Iterator[tuple[mx.array, mx.array, TokenRanges]]:
    """Each layer's keys, values and tokens, once they fit the target and the first layer."""
    n, first = 0, None
    for k, v in layers:
        k, v = _check_layer(geometry, n, k, v, first, token_ranges)
        first = (k.shape[0], k.shape[2]) if first is None else first
        yield k, v, TokenRanges.all(k.shape[2]) if token_ranges is None else token_ranges[n]
        n += 1
    _check_count(geometry, n)


def _required_rows(
    geometry: ModelGeometry,
    layer: int,
    k: mx.array,
    v: mx.array,
    given: TokenRanges,
    size_limit: SizeLimit | None,
) -> tuple[mx.array, mx.array]:
    """The rows that a layer's cache holds, out of those of the ``given`` tokens."""
    required = required_positions(geometry.layers[layer], given.stop, size_limit)
    if not given.covers(required):
        raise CacheError(
            f"Cache {layer} of {geometry.model_type} needs tokens {required}, and tokens {given} "
            "are given."
        )
    k, v = given.take(required, k), given.take(required, v)
    if not (_ext.all_finite(k) and _ext.all_finite(v)):
        raise CacheError(
            f"Layer {layer} holds NaN or infinite values. One of them would spoil every later "
            "token; re-prefill."
        )
    return k, v


def check_mappable(geometry: ModelGeometry, role: str) -> None:
    """Raise :class:`GeometryError` if a model has sliding-window layers.

    Such layers can be mapped, but a fit cannot search or tune by loss on them.

    Args:
        geometry: The model's geometry.
        role: ``"source"`` or ``"target"``, for the message.
    """
    for layer, entry in enumerate(geometry.layers):
        if entry.window is not None:
            raise GeometryError(
                f"The {role} {geometry.model_type} attends through a sliding window of "
                f"{entry.window} tokens in cache {layer}, which forgets the tokens before it."
            )


def check_quantizable(
    geometry: ModelGeometry, bits: int, group_size: int, size_limit: SizeLimit | None = None
) -> None:
    """Refuse a quantised cache that mlx-lm could not make or extend.

    Raises:
        GeometryError: With the group sizes that are possible.
    """
    if bits not in _BITS:
        raise GeometryError(f"{named('kv_bits')} is one of {_BITS}, not {bits}.")
    if size_limit is not None or any(layer.window is not None for layer in geometry.layers):
        raise GeometryError(
            "mlx-lm has no quantised cache for sliding layers or with max_kv_size. Leave out "
            f"{named('kv_bits')}."
        )
    dims = sorted({d for layer in geometry.layers for d in (layer.key_dim, layer.value_dim)})
    fitting = [g for g in _GROUP_SIZES if all(d % g == 0 for d in dims)]
    if group_size not in fitting:
        use = f"use {' or '.join(map(str, fitting))}"
        if not fitting:
            use = f"leave out {named('kv_bits')}"
        raise GeometryError(
            f"{named('kv_group_size')} {group_size} does not divide {geometry.model_type}'s "
            f"head_dim of {', '.join(map(str, dims))}, or is none of {_GROUP_SIZES}; {use}."
        )


def _check_layer(
    geometry: ModelGeometry,
    layer: int,
    k: mx.array,
    v: mx.array,
    first: tuple[int, int] | None,
    token_ranges: Sequence[TokenRanges] | None,
) -> tuple[mx.array, mx.array]:
    """Check one layer's arrays against the target and the first layer; add a batch axis."""
    if layer >= len(geometry.layers):
        _check_count(geometry, layer + 1)
    k, v = _batched(k, layer, "keys"), _batched(v, layer, "values")
    batch, n = (k.shape[0], k.shape[2]) if first is None else first
    if token_ranges is not None:
        n = len(token_ranges[layer])
        if token_ranges[layer].stop != token_ranges[0].stop:
            raise CacheError(
                f"Layer {layer} ends with token {token_ranges[layer].stop}, layer 0 with "
                f"{token_ranges[0].stop}."
            )
    shape = geometry.layers[layer]
    for name, x, dim in (("keys", k, shape.key_dim), ("values", v, shape.value_dim)):
        expected = (batch, shape.n_kv_heads, n, dim)
        if tuple(x.shape) != expected:
            raise GeometryError(
                f"Layer {layer}: {name} have shape {tuple(x.shape)}, expected {expected}."
            )
        if x.dtype not in _FLOATS:
            raise GeometryError(f"Layer {layer}: {name} are {x.dtype}, not floats.")
    if n == 0:
        raise CacheError("There are no tokens to build a cache from.")
    return k, v


def _check_count(geometry: ModelGeometry, n: int) -> None:
    if n != len(geometry.layers):
        raise GeometryError(
            f"{geometry.model_type} has {len(geometry.layers)} caches, got arrays for {n}."
        )


def _new_cache(
    k: mx.array, v: mx.array, offset: int, layer: LayerGeometry, size_limit: SizeLimit | None
) -> Any:
    from mlx_lm.models import cache as mlx_lm_cache

    kinds: Any = mlx_lm_cache
    if layer.window is not None:
        made = kinds.RotatingKVCache(max_size=layer.window)
    elif size_limit is not None:
        made = kinds.RotatingKVCache(max_size=size_limit.max_size, keep=size_limit.keep)
    else:
        made = kinds.KVCache()
    made.keys, made.values, made.offset = k, v, offset
    if hasattr(made, "_idx"):
        made._idx = int(k.shape[2])  # in order, the newest last
    return made


def _batched(x: mx.array, layer: int, name: str) -> mx.array:
    if not isinstance(x, mx.array) or x.ndim not in (3, 4):
        shape = tuple(x.shape) if isinstance(x, mx.array) else type(x).__name__
        raise GeometryError(
            f"Layer {layer}: {name} must be [B, H, N, D] or [H, N, D] arrays, got {shape}."
        )
    return x if x.ndim == 4 else x[None]


def _own(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """An array object of our own, without the rows of a larger buffer behind it."""
    return mx.contiguous(saturate(x, dtype)[...])


def compact(cache: Sequence[Any]) -> list[Any]:
    """Copies of cache objects that hold the rows in use and nothing else.

    What was trimmed away, padding and what has left a window are gone. The
    originals are not changed.

    Args:
        cache: The cache of one conversation.

    Raises:
        CacheError: If it is empty or not what its counters say.
        UnsupportedCacheError: If it is of a kind that isn't read, or a batch.
    """
    if not isinstance(cache, (list, tuple)):
        raise CacheError(f"Expected a list of caches, got {type(cache).__name__}.")
    return [_compact(entry, str(layer)) for layer, entry in enumerate(cache)]


def _compact(entry: Any, name: str) -> Any:
    from mlx_lm.models import cache as mlx_lm_cache

    kinds: Any = mlx_lm_cache
    inner = inner_caches(entry)
    if inner is not None:
        return kinds.CacheList(*(_compact(c, f"{name}.{i}") for i, c in enumerate(inner)))
    rows = read_entry(entry, name)
    if isinstance(rows.keys, QuantizedRows) and isinstance(rows.values, QuantizedRows):
        made = kinds.QuantizedKVCache(group_size=rows.keys.group_size, bits=rows.keys.bits)
        made.keys, made.values = (
            tuple(mx.contiguous(part) for part in (x.packed, x.scales, x.biases))
            for x in (rows.keys, rows.values)
        )
        made.offset = rows.token_ranges.stop
        return made
    k, v = rows.pair()
    if type(entry).__name__ == "RotatingKVCache":
        part = TokenRanges.last(rows.token_ranges.stop, entry.max_size, entry.keep)
        if rows.token_ranges.covers(part):
            k, v = rows.token_ranges.take(part, k), rows.token_ranges.take(part, v)
        made = kinds.RotatingKVCache(max_size=entry.max_size, keep=entry.keep)
        made._idx = int(k.shape[2])
    else:
        made = kinds.KVCache()
    made.keys, made.values, made.offset = mx.contiguous(k), mx.contiguous(v), rows.token_ranges.stop
    return made
