"""From mlx-lm's cache objects to a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvgraft.cache.snapshot import CacheSnapshot, LayerRows, QuantizedRows, SizeLimit
from kvgraft.errors import CacheError, GeometryError, UnsupportedCacheError
from kvgraft.models.cache_classes import UNSUPPORTED, is_from_mlx_lm
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["advice", "inner_caches", "read_cache", "read_entry", "read_offset"]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_BATCHES = ("BatchKVCache", "BatchRotatingKVCache")
_READ = ("KVCache", "QuantizedKVCache", "RotatingKVCache", *_BATCHES)
_TRIMMED = "A trim went wrong; re-prefill."

# What to do about each class that is not supported.
_ADVICE = {
    "ConcatenateKVCache": "copy its keys, values and offset into a KVCache",
    **{cls: f"it holds {content}; re-prefill" for cls, content in UNSUPPORTED.items()},
}


def read_cache(
    cache: Sequence[Any], geometry: ModelGeometry | None = None, *, row: int | None = None
) -> CacheSnapshot:
    """Read the keys and values out of an mlx-lm cache list.

    The source cache is not changed, and later writes to it don't show in the
    result. Nothing is copied or evaluated, except that the rows of a ring which
    has wrapped are put in order, lazily.

    Read are ``KVCache``; ``QuantizedKVCache``, dequantised when its rows are
    used; ``RotatingKVCache``, of a sliding layer or of ``max_kv_size``, with
    the tokens that it still holds; one row of ``BatchKVCache`` or
    ``BatchRotatingKVCache``; and ``CacheList`` of these, as consecutive layers.

    Args:
        cache: What ``make_prompt_cache`` returned and a model then filled.
        geometry: Geometry of the model that filled it; the cache is checked
            against it. The dtype is not: a model may run in another one than
            its mapper was fitted with.
        row: Which conversation of a batch cache to read.

    Returns:
        A snapshot of what every layer holds of the first ``offset`` tokens.

    Raises:
        UnsupportedCacheError: If a layer's cache is of another class, naming it
            and what to do, or is a batch and ``row`` is missing.
        CacheError: If the cache is empty, its layers disagree or its counters
            don't fit its buffers.
        GeometryError: If it doesn't fit ``geometry``.
    """
    if not isinstance(cache, (list, tuple)):
        raise CacheError(
            f"Expected the list of caches that make_prompt_cache returns, got "
            f"{type(cache).__name__}."
        )
    entries = [
        (name, entry)
        for layer, outer in enumerate(cache)
        for name, entry in _flatten(outer, str(layer))
    ]
    for name, entry in entries:
        _check_class(entry, name, row)  # of all layers, before any work
    if not entries:
        raise CacheError("The cache list is empty: it has no layers.")
    if geometry is not None and len(entries) != len(geometry.layers):
        raise GeometryError(
            f"The cache has {len(entries)} layers, {geometry.model_type} has "
            f"{len(geometry.layers)}: another model made it, or a draft model's cache is "
            "appended to it."
        )
    read = [read_entry(entry, name, row) for name, entry in entries]
    offset = read[0].token_ranges.stop
    for (name, _), layer in zip(entries, read, strict=True):
        if layer.token_ranges.stop != offset:
            raise CacheError(
                f"The layers disagree: layer {entries[0][0]} holds {offset} tokens, layer {name} "
                f"holds {layer.token_ranges.stop}. The cache was trimmed or filled only in part; "
                "re-prefill."
            )
    batch = read[0].keys.shape[0]
    for i, ((name, _), layer) in enumerate(zip(entries, read, strict=True)):
        if layer.keys.shape[0] != batch:
            raise CacheError(
                f"Layer {name} holds a batch of {layer.keys.shape[0]}, layer {entries[0][0]} one "
                f"of {batch}."
            )
        if geometry is not None:
            _check_shape(layer, name, geometry.layers[i], geometry.model_type)
    return CacheSnapshot(tuple(read), offset, _bound([e for _, e in entries], read, geometry))


def inner_caches(entry: Any) -> Sequence[Any] | None:
    """The caches in an mlx-lm ``CacheList``; ``None`` for anything else."""
    if type(entry).__name__ == "CacheList" and is_from_mlx_lm(entry):
        inner: Sequence[Any] = entry.caches
        return inner
    return None


def _flatten(entry: Any, name: str) -> list[tuple[str, Any]]:
    inner = inner_caches(entry)
    if inner is None:
        return [(name, entry)]
    return [pair for i, c in enumerate(inner) for pair in _flatten(c, f"{name}.{i}")]


def _check_class(entry: Any, name: str, row: int | None) -> None:
    cls = type(entry).__name__
    if cls not in _READ or not is_from_mlx_lm(entry):
        raise UnsupportedCacheError(
            f"Layer {name} uses {cls}, which is not supported: {advice(cls)}."
        )
    if cls in _BATCHES and row is None:
        raise UnsupportedCacheError(
            f"Layer {name} uses {cls}, which holds several conversations: say which one "
            "(row=i), or take it out with extract(i)."
        )
    if cls not in _BATCHES and row is not None:
        raise CacheError(
            f"Row {row} was asked for, but layer {name} uses {cls}, which is no batch of "
            "conversations of their own lengths. Leave the row out."
        )


def read_entry(entry: Any, name: str, row: int | None = None) -> LayerRows:
    """Read one cache object; see :func:`read_cache`, which checks them together.

    Args:
        entry: The cache object.
        name: What to call the layer in messages.
        row: Which conversation of a batch.
    """
    _check_class(entry, name, row)
    cls = type(entry).__name__
    if cls in _BATCHES:
        assert row is not None
        return _read_batch_row(entry, name, row)
    offset = read_offset(entry.offset, name)
    if entry.keys is None or entry.values is None or offset == 0:
        raise CacheError(
            f"Layer {name} of the cache is empty: let the source model read the text first."
        )
    if cls == "RotatingKVCache":
        return _read_ring(entry, name, offset)
    quantized = isinstance(entry.keys, (tuple, list))
    if quantized != isinstance(entry.values, (tuple, list)):
        raise CacheError(f"Layer {name}: only one of keys and values is quantised.")
    if quantized or cls == "QuantizedKVCache":
        return _read_quantized(entry, name, offset)
    k, v = _float_arrays(entry, name)
    _check_room(name, offset, k.shape[2], v.shape[2])
    # Slicing makes new array objects even where it cuts nothing off.
    return LayerRows(k[..., :offset, :], v[..., :offset, :], TokenRanges.all(offset))


# ------------------------------------------------------------------- quantised


def _read_quantized(entry: Any, name: str, offset: int) -> LayerRows:
    group_size, bits = getattr(entry, "group_size", None), getattr(entry, "bits", None)
    if not isinstance(group_size, int) or not isinstance(bits, int):
        raise UnsupportedCacheError(
            f"Layer {name} holds quantised keys and values (a tuple) in a "
            f"{type(entry).__name__}, which doesn't say how they are packed. Use mlx-lm's "
            "QuantizedKVCache."
        )
    keys = _packed(entry.keys, "keys", name, group_size, bits)
    values = _packed(entry.values, "values", name, group_size, bits)
    _check_room(name, offset, keys.shape[2], values.shape[2])

    def first(x: QuantizedRows) -> QuantizedRows:
        packed, scales, biases = (part[..., :offset, :] for part in (x.packed, x.scales, x.biases))
        return QuantizedRows(packed, scales, biases, group_size, bits)

    return LayerRows(first(keys), first(values), TokenRanges.all(offset))


def _packed(parts: Any, what: str, name: str, group_size: int, bits: int) -> QuantizedRows:
    arrays = isinstance(parts, (tuple, list)) and all(isinstance(x, mx.array) for x in parts)
    if not arrays or len(parts) != 3 or any(x.ndim != 4 for x in parts):
        raise UnsupportedCacheError(
            f"Layer {name}: quantised {what} are not the three arrays (packed, scales, biases) "
            "of mx.quantize's affine mode. Generate without --kv-bits, or re-prefill."
        )
    packed, scales, biases = parts
    width = scales.shape[3] * group_size
    if (
        packed.dtype != mx.uint32
        or scales.dtype not in _FLOATS
        or packed.shape[:3] != scales.shape[:3]
        or scales.shape != biases.shape
        or packed.shape[3] * 32 != width * bits
    ):
        raise CacheError(
            f"Layer {name}: quantised {what} {tuple(packed.shape)} ({packed.dtype}) with scales "
            f"{tuple(scales.shape)} are not {bits}-bit numbers in groups of {group_size}. "
            "mlx-lm packs 5 and 6 bits wrongly when a cache starts out quantised; re-prefill."
        )
    return QuantizedRows(packed, scales, biases, group_size, bits)


# ----------------------------------------------------------------------- rings


def _read_ring(entry: Any, name: str, offset: int) -> LayerRows:
    """Rows of a ``RotatingKVCache`` in the order of the text.

    Single tokens are written round a ring of ``max_size`` rows that starts at
    ``keep``, with ``_idx`` behind the newest; more than one at a time put the
    ring in order first and are appended, so that the buffer may be longer.
    """
    k, v = _float_arrays(entry, name)
    if k.shape[2] != v.shape[2]:
        raise CacheError(f"Layer {name}: keys {tuple(k.shape)} and values {tuple(v.shape)}.")
    size, keep = _count(entry.max_size, "max_size", name), _count(entry.keep, "keep", name)
    newest, room = _count(entry._idx, "_idx", name), k.shape[2]
    if not 0 <= keep < size:
        raise CacheError(f"Layer {name} keeps {keep} tokens of {size}, which leaves no room.")
    broken = CacheError(
        f"Layer {name} says that it holds {offset} tokens and wrote the last one to row "
        f"{newest - 1} of {room}, in a ring of {size}. It was trimmed after it had dropped tokens, "
        "which mlx-lm does not check, so that its rows are not what it says; re-prefill."
    )
    if not 0 < newest <= room or newest > offset:
        raise broken
    if newest == room or newest == offset:
        order = [(0, newest)]
    elif room == size and newest > keep:
        order = [(0, keep), (newest, room), (keep, newest)]
    else:
        raise broken
    token_ranges = TokenRanges.last(offset, sum(b - a for a, b in order), keep)

    def rows(x: mx.array) -> mx.array:
        parts = [x[..., a:b, :] for a, b in order if a < b]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    return LayerRows(rows(k), rows(v), token_ranges)


def _bound(
    entries: Sequence[Any], read: Sequence[LayerRows], geometry: ModelGeometry | None
) -> SizeLimit | None:
    """The ``max_kv_size`` of a cache list; checks rings against the model's windows."""
    rings = {
        i: (int(entry.max_size), int(getattr(entry, "keep", 0)))
        for i, entry in enumerate(entries)
        if type(entry).__name__ in ("RotatingKVCache", "BatchRotatingKVCache")
    }
    if geometry is None:
        limits = set(rings.values())
        if len(rings) < len(entries) or len(limits) != 1 or not next(iter(limits))[1]:
            return None  # most likely sliding layers
        return SizeLimit(*limits.pop())
    windows = {i: layer.window for i, layer in enumerate(geometry.layers)}
    if not any(windows.values()):
        if not rings:
            return None
        if len(rings) < len(entries) or len(set(rings.values())) != 1:
            raise CacheError(
                "Some layers of this cache have a size limit and others none or another one "
                f"({sorted(set(rings.values()))}). Make it with make_prompt_cache."
            )
        size_limit = SizeLimit(*rings[0])
        for i, entry in enumerate(entries):
            whole = read[i].token_ranges == TokenRanges.all(read[i].token_ranges.stop)
            if type(entry).__name__ == "BatchRotatingKVCache" and not whole:
                raise UnsupportedCacheError(
                    f"Layer {i} uses BatchRotatingKVCache for a limited cache that has dropped "
                    "tokens, and does not remember which first tokens it kept; re-prefill."
                )
        return size_limit
    for i, window in windows.items():
        limit = rings.get(i)
        if limit is not None and limit != (window, 0):
            raise GeometryError(
                f"Layer {i} is a ring of {limit[0]} tokens that keeps the first {limit[1]}; "
                f"{geometry.model_type} has "
                + (f"a window of {window} tokens" if window else "full attention")
                + " there: another model made this cache."
            )
    return None


# --------------------------------------------------------------------- batches


def _read_batch_row(entry: Any, name: str, row: int) -> LayerRows:
    """One conversation of a left-padded batch, without the padding."""
    if entry.keys is None or entry.values is None:
        raise CacheError(
            f"Layer {name} of the cache is empty: let the source model read the text first."
        )
    k, v = _float_arrays(entry, name)
    if not 0 <= row < k.shape[0]:
        raise CacheError(f"Row {row} was asked for; layer {name} holds {k.shape[0]} rows.")
    if getattr(entry, "_right_padding", None) is not None or (
        getattr(entry, "_lengths", None) is not None
    ):
        raise CacheError(
            f"Layer {name} is in the middle of reading prompts of different lengths. Read it "
            "after finalize()."
        )
    # mlx-lm may change these arrays in place, so take the numbers out.
    offset = read_offset(entry.offset[row], name)
    padding = read_offset(entry.left_padding[row], name)
    stop = _count(entry._idx, "_idx", name)
    if offset <= 0:
        raise CacheError(
            f"Row {row} of layer {name} is empty"
            + (f" (offset {offset}: trimmed below its length)." if offset else ".")
        )
    ring = type(entry).__name__ == "BatchRotatingKVCache"
    if ring and entry.rotated:
        # A ring of max_size rows without a kept prefix; _idx is behind the newest.
        k, v = (mx.roll(x[row : row + 1], -stop, 2) for x in (k, v))
        stop = k.shape[2]
    else:
        k, v = k[row : row + 1], v[row : row + 1]
    start = max(0, padding)
    n_rows = stop - start
    fits = start < stop <= min(k.shape[2], v.shape[2])
    if not fits or n_rows > offset or (not ring and n_rows != offset):
        raise CacheError(
            f"Row {row} of layer {name} says that it holds {offset} tokens, but there are "
            f"{n_rows} rows between its padding and the end. {_TRIMMED}"
        )
    token_ranges = TokenRanges.last(offset, n_rows)
    return LayerRows(k[..., start:stop, :], v[..., start:stop, :], token_ranges)


# ---------------------------------------------------------------------- checks


def advice(cls: str) -> str:
    """What to do about a class that is not supported."""
    return _ADVICE.get(cls, "kvgraft does not know what it holds; use KVCache")


def read_offset(offset: Any, name: str) -> int:
    """A counter of tokens as a number; ``name`` is the layer's, for the message."""
    if isinstance(offset, mx.array):
        # mlx-lm may change such an array in place, so take the number out.
        if offset.size != 1:
            raise CacheError(
                f"Layer {name} has {offset.size} offsets: it is a batch of conversations. Take "
                "one out of it with extract(i)."
            )
        offset = offset.item()
    return _count(offset, "offset", name)


def _count(value: Any, what: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
        raise CacheError(f"Layer {name}: {what} {value!r} is not a number of tokens.")
    return int(value)


def _float_arrays(entry: Any, name: str) -> tuple[mx.array, mx.array]:
    k, v = entry.keys, entry.values
    if not isinstance(k, mx.array) or not isinstance(v, mx.array):
        raise CacheError(
            f"Layer {name}: keys are {type(k).__name__} and values {type(v).__name__}, not "
            "mlx arrays."
        )
    if k.ndim != 4 or v.ndim != 4 or k.shape[0] != v.shape[0]:
        raise CacheError(
            f"Layer {name}: keys {tuple(k.shape)} and values {tuple(v.shape)} are not "
            "[batch, heads, tokens, head_dim]."
        )
    for what, x in (("keys", k), ("values", v)):
        if x.dtype not in _FLOATS:
            raise CacheError(f"Layer {name}: {what} are {x.dtype}, not floats.")
    return k, v


def _check_room(name: str, offset: int, keys: int, values: int) -> None:
    for what, room in (("keys", keys), ("values", values)):
        if not 0 < offset <= room:
            raise CacheError(
                f"Layer {name} says that it holds {offset} tokens, but its {what} have room for "
                f"{room}. {_TRIMMED}"
            )


def _check_shape(layer: LayerRows, name: str, expected: LayerGeometry, model_type: str) -> None:
    k, v, heads = layer.keys.shape, layer.values.shape, expected.n_kv_heads
    if (k[1], k[3], v[1], v[3]) != (heads, expected.key_dim, heads, expected.value_dim):
        raise GeometryError(
            f"Layer {name} holds keys {tuple(k)} and values {tuple(v)}; {model_type} writes "
            f"{heads} heads of {expected.key_dim} and {expected.value_dim}: another model made "
            "this cache."
        )
