"""Going back to fewer tokens: cutting a live cache, and a snapshot of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvgraft.cache.inspect import n_tokens
from kvgraft.cache.provenance import cut_mark
from kvgraft.cache.required_ranges import required_positions
from kvgraft.cache.snapshot import CacheSnapshot, LayerRows, QuantizedRows, SizeLimit
from kvgraft.errors import CacheError, UnsupportedCacheError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["cut_snapshot", "trim"]


def trim(cache: Sequence[Any], length: int) -> bool:
    """Cut a prompt cache to its first ``length`` tokens, in place.

    Entries may hold different numbers of tokens, as those of a draft model do that
    are appended to the model's; each is cut that holds more.

    Returns:
        Whether that could be done. A ring that wrapped has lost tokens that it
        would need, and the whole cache is left as it was.
    """
    longer = [(entry, surplus) for entry in cache if (surplus := _surplus(entry, length)) > 0]
    if longer and not all(entry.is_trimmable() for entry in cache):
        return False
    for entry, surplus in longer:
        entry.trim(surplus)
    if longer:
        cut_mark(cache, length)
    return True


def _surplus(entry: Any, length: int) -> int:
    try:
        return n_tokens([entry]) - length
    except UnsupportedCacheError:
        return 0  # it counts no tokens, and cannot be trimmed where others have to be


def cut_snapshot(snapshot: CacheSnapshot, n_tokens: int, geometry: ModelGeometry) -> CacheSnapshot:
    """The same cache as it was after ``n_tokens`` tokens.

    A ring buffer that wrapped has lost one row for each token that it took since. A
    full one can be cut by one token without loss, because its oldest slot is
    overwritten before it is attended to again; that slot is filled with a neighbouring
    row.

    Raises:
        CacheError: If a layer has lost more rows than that.
    """
    if n_tokens == snapshot.offset:
        return snapshot
    rows = []
    for layer, row in enumerate(snapshot.rows):
        left = row.token_ranges & TokenRanges.all(n_tokens)
        slots = _ring_slots(geometry.layers[layer], snapshot.size_limit, n_tokens)
        if slots is None or left.covers(slots):
            rows.append(LayerRows(_take(row, left, row.keys), _take(row, left, row.values), left))
            continue
        if snapshot.offset - n_tokens > 1:
            raise CacheError(
                f"Layer {layer} has dropped tokens and cannot go back by "
                f"{snapshot.offset - n_tokens} of them. Use a native end of 1, or re-prefill."
            )
        rows.append(_with_filler(row, left & slots, slots))
    return CacheSnapshot(tuple(rows), n_tokens, snapshot.size_limit)


def _ring_slots(
    layer: LayerGeometry, size_limit: SizeLimit | None, n_tokens: int
) -> TokenRanges | None:
    """What a ring buffer holds after ``n_tokens``; ``None`` for a cache that keeps all."""
    if layer.window is None and size_limit is None:
        return None
    return required_positions(layer, n_tokens, size_limit)


def _take(
    row: LayerRows, part: TokenRanges, x: mx.array | QuantizedRows
) -> mx.array | QuantizedRows:
    if isinstance(x, QuantizedRows):
        packed, scales, biases = (
            row.token_ranges.take(part, array) for array in (x.packed, x.scales, x.biases)
        )
        return QuantizedRows(packed, scales, biases, x.group_size, x.bits)
    return row.token_ranges.take(part, x)


def _with_filler(row: LayerRows, available: TokenRanges, slots: TokenRanges) -> LayerRows:
    """Rows of ``slots``, of which one is not available; its neighbour stands in for it."""
    missing = next(
        position
        for start, stop in slots.ranges
        for position in range(start, stop)
        if not available.covers(TokenRanges.of([(position, position + 1)]))
    )
    before = len(available & TokenRanges.all(missing))

    def fill(x: mx.array | QuantizedRows) -> mx.array:
        assert isinstance(x, mx.array)  # rings are not quantised
        x = row.token_ranges.take(available, x)
        stand_in = x[..., before : before + 1, :]
        return mx.concatenate([x[..., :before, :], stand_in, x[..., before:, :]], axis=-2)

    return LayerRows(fill(row.keys), fill(row.values), slots)
