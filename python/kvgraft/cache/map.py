"""From a cache that one model filled to a cache that another can go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from kvgraft import cache as caches
from kvgraft.cache.required_ranges import required_ranges
from kvgraft.cache.snapshot import LayerRows
from kvgraft.errors import CacheError
from kvgraft.mapper import transfer
from kvgraft.mapper.data import require_mapper
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["map_cache"]


def map_cache(
    source_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    *,
    target_geometry: ModelGeometry | None = None,
    row: int | None = None,
    unload_after: bool = True,
    n_tokens: int | None = None,
    head: Sequence[Any] | None = None,
    consume: bool = False,
    on_layer: Callable[[int], None] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> list[Any]:
    """Map a source model's prompt cache into one for ``target``.

    The cache covers the same tokens at the same positions. Give the target the
    last token of the conversation to read itself: hand over all but one token.

    Args:
        source_cache: mlx-lm prompt cache filled by the source; not changed unless
            ``consume``.
        mapper: Mapper for this pair.
        target: The live target model; its dtype and geometry decide what is written.
        target_geometry: The target's geometry if it was read before.
        row: Which conversation of a batch cache to map.
        unload_after: Keep at most one layer's mapper weights in memory.
        n_tokens: Hand over only the first ``n_tokens``; default all.
        head: A cache of the target's own that holds the first of these tokens.
            Its rows are taken as they are, and only those after them are mapped.
        consume: Empty ``source_cache``, a list, and drop each of its layers as
            soon as no later target layer needs it.
        on_layer: Called after each target layer with its index.
        kv_bits: See :func:`kvgraft.cache.build_cache`.
        kv_group_size: See :func:`kvgraft.cache.build_cache`.

    Returns:
        A prompt cache for ``target``, evaluated, marked as mapped.

    Raises:
        CacheError: If a cache is empty, inconsistent or of a class that is not
            read, holds fewer tokens than asked for, or ``head`` leaves nothing
            to map.
        PairMismatchError: If the cache or the target is not what the mapper was
            fitted for.
    """
    require_mapper(mapper)
    geometry = read_geometry(target) if target_geometry is None else target_geometry
    check_pair(mapper, target=geometry)
    snapshot = caches.read_cache(source_cache, mapper.source, row=row)
    before = caches.provenance_of(source_cache)
    stop = snapshot.offset if n_tokens is None else n_tokens
    own = None if head is None else caches.read_cache(head, geometry)
    start = 0 if own is None else own.offset
    if not 0 <= start < stop <= snapshot.offset:
        raise CacheError(
            f"Nothing to map between token {start} (the target's own head) and {stop}: the source "
            f"cache holds {snapshot.offset} tokens."
        )
    snapshot = cut_snapshot(snapshot, stop, mapper.source)
    plan = required_ranges(snapshot, geometry)
    if kv_bits is not None:
        caches.check_quantizable(geometry, kv_bits, kv_group_size, plan.size_limit)
    rows = snapshot.source_kv()
    del snapshot
    if consume:
        if not isinstance(source_cache, list):
            raise CacheError("To be consumed, the source cache must be a list.")
        source_cache.clear()
        for layer in set(rows) - set(mapper.source_layers):
            del rows[layer]

    def layers() -> Iterator[tuple[mx.array, mx.array]]:
        mapped = transfer.iter_transfer(
            rows,
            mapper,
            unload_after=unload_after,
            dtype=geometry.mx_dtype,
            consume=consume,
            held=plan.held,
            wanted={i: want & TokenRanges.of([(start, stop)]) for i, want in plan.wanted.items()},
            check_finite=True,
        )
        for layer, keys, values in mapped:
            if own is not None:
                keys, values = _behind(own.rows[layer], plan.wanted[layer], keys, values)
            yield keys, values
            if on_layer is not None:
                on_layer(layer)

    return caches.build_cache(
        geometry,
        layers(),
        provenance=_provenance(mapper, start, stop, before, caches.provenance_of(head or ())),
        held=[plan.wanted[i] for i in range(len(geometry.layers))],
        size_limit=plan.size_limit,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )


def cut_snapshot(
    snapshot: caches.CacheSnapshot, stop: int, geometry: ModelGeometry
) -> caches.CacheSnapshot:
    """The same cache as it was after ``stop`` tokens.

    A ring that wrapped has dropped a token for each one that it took since. Of
    these the oldest place is the next to be overwritten and never seen again, so
    going back by one token is exact: that place is filled with a row of another.

    Raises:
        CacheError: If layers have dropped more tokens than that.
    """
    if stop == snapshot.offset:
        return snapshot
    rows = []
    for layer, row in enumerate(snapshot.rows):
        held = row.held & TokenRanges.all(stop)
        want = _ring(geometry.layers[layer], snapshot.size_limit, stop)
        if want is not None and not held.covers(want):
            if snapshot.offset - stop > 1:
                raise CacheError(
                    f"Layer {layer} has dropped tokens and cannot go back by "
                    f"{snapshot.offset - stop} of them. Hand over with a tail of 1, or re-prefill."
                )
            rows.append(_with_filler(row, held, want))
        else:
            rows.append(LayerRows(_take(row, held, "keys"), _take(row, held, "values"), held))
    return caches.CacheSnapshot(tuple(rows), stop, snapshot.size_limit)


def _ring(
    layer: LayerGeometry, size_limit: caches.SizeLimit | None, n_tokens: int
) -> TokenRanges | None:
    if layer.window is None and size_limit is None:
        return None
    return caches.required_positions(layer, n_tokens, size_limit)


def _take(row: LayerRows, part: TokenRanges, name: str) -> mx.array | caches.QuantizedRows:
    rows = row.keys if name == "keys" else row.values
    if isinstance(rows, caches.QuantizedRows):
        packed, scales, biases = (
            row.held.take(part, x) for x in (rows.packed, rows.scales, rows.biases)
        )
        return caches.QuantizedRows(packed, scales, biases, rows.group_size, rows.bits)
    return row.held.take(part, rows)


def _with_filler(row: LayerRows, held: TokenRanges, want: TokenRanges) -> LayerRows:
    """Rows of ``want``, of which ``held`` lacks one; its neighbour stands in for it."""
    have = held & want
    absent = next(p for start, stop in want.ranges for p in range(start, stop) if not _in(have, p))
    before = len(have & TokenRanges.all(absent))

    def fill(x: mx.array | caches.QuantizedRows) -> mx.array:
        assert isinstance(x, mx.array)  # rings are not quantised
        x = row.held.take(have, x)
        stand_in = x[..., before : before + 1, :]
        return mx.concatenate([x[..., :before, :], stand_in, x[..., before:, :]], axis=-2)

    return LayerRows(fill(row.keys), fill(row.values), want)


def _in(held: TokenRanges, position: int) -> bool:
    return held.covers(TokenRanges.of([(position, position + 1)]))


def _behind(
    own: LayerRows, want: TokenRanges, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Mapped rows after those of ``want`` that the target has itself."""
    part = own.held & want
    if not len(part):
        return keys, values
    k, v = own.pair()
    k, v = own.held.take(part, k), own.held.take(part, v)
    return (
        mx.concatenate([k.astype(keys.dtype), keys], axis=-2),
        mx.concatenate([v.astype(values.dtype), values], axis=-2),
    )


def _provenance(
    mapper: Mapper,
    start: int,
    stop: int,
    before: caches.Provenance | None,
    native_start: caches.Provenance | None,
) -> caches.Provenance:
    source, target = mapper.source_model, mapper.target_model
    return caches.Provenance(
        source=source.name if source else mapper.source.model_type,
        target=target.name if target else mapper.target.model_type,
        mapper=mapper.describe(),
        n_tokens=stop - start,
        start=start,
        before=before,
        native_start=None if native_start is None else native_start.first(start),
    )
