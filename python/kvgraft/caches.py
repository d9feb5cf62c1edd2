"""mlx-lm's cache objects: the only module that touches them.

Caches are read and built by attributes (``keys``, ``values``, ``offset``),
never through ``.state``: its meaning changed between mlx-lm 0.31 and 0.32.

Arrays that mlx-lm writes to (``cache.keys[..., a:b, :] = x``) change the Python
object in place, so two caches holding one object write into each other. What is
read here is a new object over the same memory, and what is built never holds an
object of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvgraft.errors import CacheError, GeometryError, UnsupportedCacheError
from kvgraft.geometry import ModelGeometry
from kvgraft.reference import saturate

if TYPE_CHECKING:
    from mlx_lm.models.cache import KVCache

__all__ = [
    "CacheSnapshot",
    "Provenance",
    "build_cache",
    "check_mappable",
    "is_mapped",
    "provenance_of",
    "read_cache",
]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_MARK = "kvgraft_provenance"

# What to do about each class that is not read or built.
_ADVICE = {
    "RotatingKVCache": "it keeps only the last tokens of the text; make the cache without "
    "max_kv_size, or re-prefill",
    "QuantizedKVCache": "generate without --kv-bits, or dequantise it into a KVCache first",
    "ConcatenateKVCache": "copy its keys, values and offset into a KVCache",
    "ChunkedKVCache": "it drops the front of the text; re-prefill",
    "ArraysCache": "it holds recurrent state, which has no per-token keys and values; re-prefill",
    "MambaCache": "it holds recurrent state, which has no per-token keys and values; re-prefill",
    "CacheList": "it holds several caches per layer; re-prefill",
    "BatchKVCache": "take one conversation out of it with extract(i)",
    "BatchRotatingKVCache": "it keeps only the last tokens of each text; re-prefill",
}


@dataclass(frozen=True)
class CacheSnapshot:
    """Keys and values of a cache, as they are now.

    Attributes:
        keys: Per layer ``[B, H, N, D]``, with RoPE, in the cache's dtype.
        values: Per layer ``[B, H, N, D]``.
        offset: Number of tokens ``N``; they sit at positions ``0 … N-1``.
    """

    keys: tuple[mx.array, ...]
    values: tuple[mx.array, ...]
    offset: int

    @property
    def batch_size(self) -> int:
        """Number of conversations, all of the same length."""
        return int(self.keys[0].shape[0])

    @property
    def positions(self) -> mx.array:
        """Absolute positions of the tokens, ``[N]`` int32."""
        return mx.arange(self.offset, dtype=mx.int32)

    @property
    def layers(self) -> list[tuple[mx.array, mx.array]]:
        """``(keys, values)`` per layer."""
        return list(zip(self.keys, self.values, strict=True))


@dataclass(frozen=True)
class Provenance:
    """Where a mapped cache comes from. Native caches carry none.

    A mapped cache is an approximation: code that stores caches for reuse must
    not let it answer for a native one. The mark stays on the cache objects
    through generation and ``copy.deepcopy``, but not through
    ``save_prompt_cache``, ``merge`` or ``to_quantized``, which make new objects.

    Attributes:
        source: The model whose cache was mapped.
        target: The model that the result is for.
        mapper: The mapper, by path or digest.
        n_tokens: Mapped tokens; what follows them was written by the target.
    """

    source: str = "unknown"
    target: str = "unknown"
    mapper: str = "unknown"
    n_tokens: int = 0


def read_cache(cache: Sequence[Any], geometry: ModelGeometry | None = None) -> CacheSnapshot:
    """Read the keys and values out of an mlx-lm cache list.

    The source cache is not changed, and later writes to it don't show in the
    result. Nothing is copied or evaluated.

    Args:
        cache: What ``make_prompt_cache`` returned and a model then filled.
        geometry: Geometry of the model that filled it; the cache is checked
            against it. The dtype is not: a model may run in another one than
            its mapper was fitted with.

    Returns:
        A snapshot of the first ``offset`` tokens of every layer.

    Raises:
        UnsupportedCacheError: If a layer's cache is not a ``KVCache``, naming
            its class and what to do.
        CacheError: If the cache is empty, its layers disagree or its counters
            don't fit its buffers.
        GeometryError: If it doesn't fit ``geometry``.
    """
    if not isinstance(cache, (list, tuple)):
        raise CacheError(
            f"Expected the list of caches that make_prompt_cache returns, got "
            f"{type(cache).__name__}."
        )
    if geometry is not None:
        check_mappable(geometry, "source")
    for layer, entry in enumerate(cache):
        _check_class(entry, layer)
    if not cache:
        raise CacheError("The cache list is empty: it has no layers.")
    if geometry is not None and len(cache) != len(geometry.layers):
        raise GeometryError(
            f"The cache has {len(cache)} layers, {geometry.model_type} has "
            f"{len(geometry.layers)}: another model made it, or a draft model's cache is "
            "appended to it."
        )
    offsets = [_read_offset(entry, layer) for layer, entry in enumerate(cache)]
    for layer, offset in enumerate(offsets):
        if offset != offsets[0]:
            raise CacheError(
                f"The layers disagree: layer 0 holds {offsets[0]} tokens, layer {layer} holds "
                f"{offset}. The cache was trimmed or filled only in part; re-prefill."
            )
    keys, values = [], []
    for layer, entry in enumerate(cache):
        k, v = _check_arrays(entry, layer, offsets[0])
        if k.shape[0] != cache[0].keys.shape[0]:
            raise CacheError(
                f"Layer {layer} holds a batch of {k.shape[0]}, layer 0 one of "
                f"{cache[0].keys.shape[0]}."
            )
        if geometry is not None:
            expected = geometry.layers[layer]
            found = (k.shape[1], k.shape[3], v.shape[1], v.shape[3])
            heads = expected.n_kv_heads
            if found != (heads, expected.key_dim, heads, expected.value_dim):
                raise GeometryError(
                    f"Layer {layer} holds keys {tuple(k.shape)} and values {tuple(v.shape)}; "
                    f"{geometry.model_type} writes {heads} heads of {expected.key_dim} and "
                    f"{expected.value_dim}: another model made this cache."
                )
        # Slicing makes new array objects even where it cuts nothing off.
        keys.append(k[..., : offsets[0], :])
        values.append(v[..., : offsets[0], :])
    return CacheSnapshot(tuple(keys), tuple(values), offsets[0])


def build_cache(
    target: Any,
    layers: Iterable[tuple[mx.array, mx.array]],
    *,
    dtype: mx.Dtype | None = None,
    provenance: Provenance | None = None,
) -> list[KVCache]:
    """Make the cache that a model would hold after reading ``N`` tokens.

    The arrays are cast to the dtype that the model writes, since a buffer in
    another one is either cast silently or grows into the wider of the two, and
    evaluated, since a lazy array made in one thread fails in another.

    Args:
        target: The model that will read on, or its geometry. A model is probed
            (see :func:`kvgraft.probe.read_geometry`); pass the geometry when it
            is at hand.
        layers: ``(keys, values)`` per cache, ``[B, H, N, D]`` or ``[H, N, D]``,
            keys with RoPE at positions ``0 … N-1``. A generator is consumed
            layer by layer, so that each can be dropped once it is stored; a
            list is checked as a whole before any work.
        dtype: dtype to store; default that of the geometry. Values beyond its
            range are clamped to its largest.
        provenance: Mark the result as mapped.

    Returns:
        One ``KVCache`` per layer, ready for
        ``generate_step(..., prompt_cache=...)`` with at least one token left.

    Raises:
        GeometryError: If the arrays don't fit the target, or its layers attend
            through a sliding window.
        CacheError: If there are no tokens, or a value is NaN or infinite.
    """
    if isinstance(target, ModelGeometry):
        geometry = target
    else:
        from kvgraft.probe import read_geometry

        geometry = read_geometry(target)
    check_mappable(geometry, "target")
    store = geometry.mx_dtype if dtype is None else dtype
    if store not in _FLOATS:
        raise GeometryError(f"A cache cannot be stored as {store}; use a float dtype.")
    if isinstance(layers, (list, tuple)):
        first: mx.array | None = None
        for layer, (k, v) in enumerate(layers):
            checked, _ = _check_layer(geometry, layer, k, v, first)
            first = checked if first is None else first
        _check_count(geometry, len(layers))

    caches: list[KVCache] = []
    for layer, (k, v) in enumerate(layers):
        k, v = _check_layer(geometry, layer, k, v, caches[0].keys if caches else None)
        finite = mx.logical_and(mx.isfinite(k).all(), mx.isfinite(v).all())
        k, v = _own(k, store), _own(v, store)
        mx.eval(k, v, finite)
        if not finite.item():
            raise CacheError(
                f"Layer {layer} holds NaN or infinite values. One of them would spoil every "
                "later token; re-prefill."
            )
        caches.append(_new_cache(k, v, provenance))
    _check_count(geometry, len(caches))
    return caches


def provenance_of(cache: Sequence[Any]) -> Provenance | None:
    """The mark of a mapped cache; ``None`` for a native one."""
    for entry in cache:
        mark = getattr(entry, _MARK, None)
        if isinstance(mark, Provenance):
            return mark
    return None


def is_mapped(cache: Sequence[Any]) -> bool:
    """Whether any layer of the cache was mapped, so that it is an approximation."""
    return provenance_of(cache) is not None


def check_mappable(geometry: ModelGeometry, role: str) -> None:
    """Raise :class:`GeometryError` if a model has layers that can't be handed over yet.

    Args:
        geometry: The model's geometry.
        role: ``"source"`` or ``"target"``, for the message.
    """
    for layer, entry in enumerate(geometry.layers):
        if entry.window is not None:
            raise GeometryError(
                f"The {role} {geometry.model_type} attends through a sliding window of "
                f"{entry.window} tokens in cache {layer}, which forgets the tokens before it. "
                "Sliding layers are not supported yet; re-prefill, or choose a model with full "
                "attention."
            )


def _check_class(entry: Any, layer: int) -> None:
    cls = type(entry)
    if cls.__name__ == "KVCache" and cls.__module__ == "mlx_lm.models.cache":
        return
    advice = _ADVICE.get(cls.__name__, "kvgraft does not know what it holds; use KVCache")
    raise UnsupportedCacheError(
        f"Layer {layer} uses {cls.__name__}, which is not supported: {advice}."
    )


def _read_offset(entry: Any, layer: int) -> int:
    offset = entry.offset
    if isinstance(offset, mx.array):
        # mlx-lm may change such an array in place, so take the number out.
        if offset.size != 1:
            raise CacheError(
                f"Layer {layer} has {offset.size} offsets: it is a batch of conversations. Take "
                "one out of it with extract(i)."
            )
        offset = offset.item()
    if isinstance(offset, bool) or int(offset) != offset:
        raise CacheError(f"Layer {layer}: offset {offset!r} is not a number of tokens.")
    return int(offset)


def _check_arrays(entry: Any, layer: int, offset: int) -> tuple[mx.array, mx.array]:
    k, v = entry.keys, entry.values
    if k is None or v is None or offset == 0:
        raise CacheError(
            f"Layer {layer} of the cache is empty: let the source model read the text first."
        )
    if isinstance(k, (tuple, list)) or isinstance(v, (tuple, list)):
        raise UnsupportedCacheError(
            f"Layer {layer} holds quantised keys and values (a tuple): "
            f"{_ADVICE['QuantizedKVCache']}."
        )
    if not isinstance(k, mx.array) or not isinstance(v, mx.array):
        raise CacheError(
            f"Layer {layer}: keys are {type(k).__name__} and values {type(v).__name__}, not "
            "mlx arrays."
        )
    if k.ndim != 4 or v.ndim != 4 or k.shape[0] != v.shape[0]:
        raise CacheError(
            f"Layer {layer}: keys {tuple(k.shape)} and values {tuple(v.shape)} are not "
            "[batch, heads, tokens, head_dim]."
        )
    for name, x in (("keys", k), ("values", v)):
        if x.dtype not in _FLOATS:
            raise CacheError(f"Layer {layer}: {name} are {x.dtype}, not floats.")
        if not 0 < offset <= x.shape[2]:
            raise CacheError(
                f"Layer {layer} says that it holds {offset} tokens, but its {name} have room "
                f"for {x.shape[2]}. A trim went wrong; re-prefill."
            )
    return k, v


def _check_layer(
    geometry: ModelGeometry, layer: int, k: mx.array, v: mx.array, first: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Check one layer's arrays against the target and the first layer; add a batch axis."""
    if layer >= len(geometry.layers):
        _check_count(geometry, layer + 1)
    k, v = _batched(k, layer, "keys"), _batched(v, layer, "values")
    batch, n = (k if first is None else first).shape[0], (k if first is None else first).shape[2]
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


def _new_cache(k: mx.array, v: mx.array, provenance: Provenance | None) -> KVCache:
    from mlx_lm.models import cache as mlx_lm_cache

    make: Any = mlx_lm_cache.KVCache
    cache = make()
    cache.keys, cache.values, cache.offset = k, v, int(k.shape[2])
    if provenance is not None:
        setattr(cache, _MARK, provenance)
    built: KVCache = cache
    return built


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
