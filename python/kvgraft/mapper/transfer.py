"""Map a source cache into the target's layout, layer by layer.

The names and shapes are those of VeloxQuant-MLX (``load_mapper``,
``transfer_layer``, ``transfer_cache``) and of the molt mappers (``apply``):
arrays in, arrays out. :mod:`kvgraft.cache` reads and builds mlx-lm's cache
objects.

NaN and infinity in the source are refused where the arrays are evaluated anyway,
layer by layer (a mapper that is read from its file, and ``unload_after``), and on
request by ``check_finite``. Elsewhere these functions are lazy, as MLX's own are,
and looking would evaluate the arrays. There a NaN comes out as NaN, and an infinite
value as the largest value of a half-precision ``dtype``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvgraft.errors import ArgumentError, CacheError, GeometryError
from kvgraft.mapper.data import MapperData, SourceKV
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.transfer_checks import (
    LAST_POSITION,
    Pairs,
    check_arrays,
    check_dtype,
    check_kinds,
    check_mapper,
    check_reach,
    check_sources,
    refuse_nonfinite,
    to_positions,
)
from kvgraft.models.rope import RopeSpec, RopeTable
from kvgraft.models.token_ranges import TokenRanges
from kvgraft.ops.fused import map_layer

__all__ = [
    "apply",
    "iter_transfer",
    "transfer_cache",
    "transfer_layer",
]

_TABLE_BLOCK = 1024  # positions


def transfer_layer(
    mapper: MapperData,
    target_layer: int,
    source_kv: SourceKV,
    positions: mx.array | Sequence[int] | None = None,
    *,
    dtype: mx.Dtype | None = None,
) -> tuple[mx.array, mx.array]:
    """Produce one target layer's keys and values.

    Args:
        mapper: The mapper. Its weights are read if they are not in memory, and
            stay there.
        target_layer: Index in the target's cache list.
        source_kv: ``{source layer: (keys, values)}``, each ``[n_kv_heads, N,
            head_dim]`` or ``[B, n_kv_heads, N, head_dim]``, keys as they lie in
            the cache (post-RoPE). Layers that the mapper doesn't read may be
            absent.
        positions: ``[N]`` or ``[B, N]`` absolute positions; default ``0 … N-1``.
        dtype: dtype of the result; default that of the source.

    Returns:
        ``(keys, values)`` in the target's heads and head_dim, keys carrying the
        target's RoPE at the same positions. Lazy.

    Raises:
        GeometryError: If layers are missing, or shapes, dtypes or positions
            don't fit the mapper.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> import mlx.core as mx
        >>> mapper = kvgraft.load_mapper(bundled("mapper"))
        >>> shape = (2, 5, 32)  # KV heads, tokens, head_dim
        >>> source_kv = {layer: (mx.zeros(shape), mx.zeros(shape)) for layer in range(6)}
        >>> keys, values = kvgraft.transfer_layer(mapper, 1, source_kv, positions=range(10, 15))
        >>> keys.shape
        (2, 5, 32)
    """
    check_kinds(mapper, source_kv)
    check_dtype(dtype)
    m = mapper.layer(target_layer)
    frame = _frame(mapper, [m], source_kv, positions)
    return _map(
        mapper, mapper.read_layer(target_layer, keep=True), _pairs(source_kv, m), frame, dtype
    )


def transfer_cache(
    source_kv: SourceKV,
    mapper: MapperData,
    positions: mx.array | Sequence[int] | None = None,
    unload_after: bool = True,
    *,
    dtype: mx.Dtype | None = None,
    check_finite: bool | None = None,
) -> dict[int, tuple[mx.array, mx.array]]:
    """Produce every target layer's keys and values.

    Args:
        source_kv: See :func:`transfer_layer`.
        mapper: The mapper for this pair of models.
        positions: ``[N]`` or ``[B, N]`` absolute positions; default ``0 … N-1``.
        unload_after: Hold one layer's weights at a time: read, map, evaluate,
            drop. Meanwhile the operating system reads the next layer's from disk
            into its page cache. With ``False`` the weights stay for the next cache, and the
            result is lazy. A mapper that is only in memory keeps its weights,
            since nothing could bring them back, and is mapped lazily.
        dtype: dtype of the result; default that of the source.
        check_finite: Refuse NaN and infinity in the source, which evaluates it.
            Default: where layers are evaluated one at a time anyway.

    Returns:
        ``{target_layer: (keys, values)}``. Never shares memory with the source.

    Raises:
        ArgumentError: If an argument is of another kind, such as a path for the
            mapper or NumPy arrays.
        GeometryError: If layers are missing, or shapes, dtypes or positions
            don't fit the mapper; before any work.
        CacheError: If NaN or infinity was looked for and found.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> import mlx.core as mx
        >>> mapper = kvgraft.load_mapper(bundled("mapper"))
        >>> shape = (2, 5, 32)  # KV heads, tokens, head_dim
        >>> source_kv = {layer: (mx.zeros(shape), mx.zeros(shape)) for layer in range(6)}
        >>> target_kv = kvgraft.transfer_cache(source_kv, mapper)
        >>> {layer: keys.shape for layer, (keys, values) in target_kv.items()}
        {0: (2, 5, 32), 1: (2, 5, 32), 2: (2, 5, 32)}
    """
    check_mapper(mapper)
    if check_finite is None:
        check_finite = unload_after and mapper.store is not None
    mapped = iter_transfer(
        source_kv, mapper, positions, unload_after, dtype=dtype, check_finite=check_finite
    )
    return {target_layer: (keys, values) for target_layer, keys, values in mapped}


def iter_transfer(
    source_kv: SourceKV,
    mapper: MapperData,
    positions: mx.array | Sequence[int] | None = None,
    unload_after: bool = True,
    *,
    dtype: mx.Dtype | None = None,
    consume: bool = False,
    available: Mapping[int, TokenRanges] | None = None,
    required: Mapping[int, TokenRanges] | None = None,
    check_finite: bool = False,
) -> Iterator[tuple[int, mx.array, mx.array]]:
    """Like :func:`transfer_cache`, one target layer at a time.

    Where layers hold different tokens (sliding windows), ``available`` and ``required``
    say which; ``N`` differs from layer to layer then.

    Args:
        source_kv: See :func:`transfer_layer`.
        mapper: The mapper for this pair of models.
        positions: See :func:`transfer_cache`. Not with ``available``.
        unload_after: See :func:`transfer_cache`.
        dtype: See :func:`transfer_cache`.
        consume: Remove each source layer from ``source_kv``, which must be
            mutable, as soon as no later target layer reads it. The result is
            evaluated then, so that its memory can be given back.
        available: Per source layer, the tokens whose rows it holds.
        required: Per target layer, the tokens to produce; default, all that each
            of its source layers has.
        check_finite: Check each source layer for NaN and infinity when it is first used,
            which evaluates it.

    Yields:
        ``(target_layer, keys, values)``, target layers ascending.

    Raises:
        GeometryError: Before any work; see :func:`transfer_cache`.
        CacheError: Before any work, if a source layer lacks tokens that are
            required; on the way, if ``check_finite`` finds NaN or infinity.
    """
    check_kinds(mapper, source_kv)
    check_dtype(dtype)
    if consume and not isinstance(source_kv, MutableMapping):
        raise GeometryError("iter_transfer: consume needs a dict, to remove layers from.")
    frames: dict[int, _Frame]
    if available is None and required is None:
        frame = _frame(mapper, mapper.layers, source_kv, positions)
        frames = {m.target_layer: frame for m in mapper.layers}
    elif available is None or positions is not None:
        raise ArgumentError(
            "iter_transfer: `required` goes with `available`, and neither with positions."
        )
    else:
        frames = _frames(mapper, source_kv, available, required or {})
    return _iterate(source_kv, mapper, frames, unload_after, dtype, consume, check_finite)


def apply(
    mapper: MapperData,
    src_pairs: Sequence[tuple[mx.array, mx.array]],
    offset: int = 0,
    *,
    dtype: mx.Dtype | None = None,
) -> list[tuple[mx.array, mx.array]]:
    """Map a whole cache given as one ``(keys, values)`` pair per source layer.

    Args:
        mapper: A mapper that produces every layer of its target.
        src_pairs: One pair per source layer, in order; keys post-RoPE.
        offset: Position of the first token, in the source and in the target.
        dtype: dtype of the result; default that of the source.

    Returns:
        One ``(keys, values)`` pair per target layer, in order.

    Raises:
        GeometryError: If the number of pairs is not the source's number of
            layers, the mapper leaves out target layers, or as for
            :func:`transfer_cache`.
    """
    check_mapper(mapper)
    if isinstance(src_pairs, (str, bytes, Mapping)) or not isinstance(src_pairs, Sequence):
        raise ArgumentError(
            "apply takes a list of (keys, values), one pair per source layer, not a "
            f"{type(src_pairs).__name__}."
        )
    if len(src_pairs) != len(mapper.source.layers):
        raise GeometryError(
            f"{len(src_pairs)} pairs of keys and values given, the source has "
            f"{len(mapper.source.layers)} layers. Give one pair for each, in order."
        )
    absent = set(range(len(mapper.target.layers))) - {m.target_layer for m in mapper.layers}
    if absent:
        raise GeometryError(
            f"This mapper doesn't produce target layers {sorted(absent)}. Use transfer_cache, "
            "which names the layers it gives."
        )
    try:
        offset = operator.index(offset)
    except TypeError as error:
        raise ArgumentError(f"The offset is a number of tokens, not {offset!r}.") from error
    if offset < 0:
        raise GeometryError(f"The offset must not be negative, got {offset}.")
    if offset > LAST_POSITION:
        raise GeometryError(f"The offset must not be beyond {LAST_POSITION:,}, got {offset}.")
    source_kv = dict(enumerate(src_pairs))
    for s in mapper.source_layers:
        check_arrays(s, source_kv[s])
    shape = source_kv[mapper.source_layers[0]][0].shape
    n_tokens = int(shape[-2]) if len(shape) > 1 else 0
    positions = mx.arange(offset, offset + n_tokens, dtype=mx.int32)
    return list(transfer_cache(source_kv, mapper, positions, dtype=dtype).values())


@dataclass
class _Frame:
    """Positions of some rows, and the RoPE tables made for them so far.

    Tables depend on positions and spec alone, and most layers of a model share
    one spec: two tables serve a whole transfer.

    Attributes:
        positions: Where the rows are.
        cut: Per source layer, what it holds and what of it is used; none where
            all rows are.
    """

    positions: mx.array
    tables: dict[tuple[RopeSpec, bool], RopeTable | None] = field(default_factory=dict)
    cut: Mapping[int, tuple[TokenRanges, TokenRanges]] = field(default_factory=dict)

    def table(self, spec: RopeSpec, *, inverse: bool = False) -> RopeTable | None:
        key = (spec, inverse)
        if key not in self.tables:
            other = self.tables.get((spec, not inverse))
            if other is not None and spec.magnitude == 1.0:
                # Models of one family often share the rotation. The sines differ in
                # sign, whichever table came first.
                sin = -other.sin
                mx.eval(sin)
                self.tables[key] = RopeTable(other.cos, sin, other.traditional)
            else:
                self.tables[key] = _make_table(spec, self.positions, inverse)
        return self.tables[key]

    def take(self, s: int, x: mx.array) -> mx.array:
        """The rows of source layer ``s`` that are at these positions."""
        if s not in self.cut:
            return x
        has, part = self.cut[s]
        return has.take(part, x)


def _make_table(spec: RopeSpec, positions: mx.array, inverse: bool) -> RopeTable | None:
    """An evaluated table, a block at a time: the way to a table takes several times its memory."""
    n = positions.shape[-1]
    if n <= _TABLE_BLOCK:
        table = spec.table(positions, inverse=inverse)
        if table is not None:
            mx.eval(table.cos, table.sin)
        return table
    shape = (*positions.shape, spec.dims // 2)
    cos, sin = mx.zeros(shape), mx.zeros(shape)
    for first in range(0, n, _TABLE_BLOCK):
        at = slice(first, first + _TABLE_BLOCK)
        block = spec.table(positions[..., at], inverse=inverse)
        if block is None:
            return None
        cos[..., at, :], sin[..., at, :] = block.cos, block.sin
        mx.eval(cos, sin)  # writes into the buffers that are there
    return RopeTable(cos, sin, spec.traditional)


def _iterate(
    source_kv: SourceKV,
    mapper: MapperData,
    frames: dict[int, _Frame],
    unload_after: bool,
    dtype: mx.Dtype | None,
    consume: bool,
    check_finite: bool,
) -> Iterator[tuple[int, mx.array, mx.array]]:
    drop = unload_after and mapper.store is not None
    layers = sorted(mapper.layers, key=lambda m: m.target_layer)
    last = {s: i for i, m in enumerate(layers) for s in m.sources}
    checked: set[int] = set()
    for i, described in enumerate(layers):
        target_layer = described.target_layer
        pairs = _pairs(source_kv, described)
        if check_finite:
            refuse_nonfinite({s: pair for s, pair in pairs.items() if s not in checked})
            checked |= set(pairs)
        m = mapper.read_layer(target_layer, keep=not drop)
        keys, values = _map(mapper, m, pairs, frames[target_layer], dtype)
        if drop and i + 1 < len(layers) and mapper.store is not None:
            # Disk and processor at work at the same time; the next layer waits in
            # the page cache, so that still only one is in memory.
            mx.async_eval(keys, values)  # type: ignore[no-untyped-call]
            if not layers[i + 1].is_loaded:
                mapper.store.read_ahead(layers[i + 1])
        if drop or consume:
            # Unevaluated results would keep weights and sources alive.
            mx.eval(keys, values)
        del m, pairs
        if drop:
            described.unload()
        if consume and isinstance(source_kv, MutableMapping):
            for s in [s for s, at in last.items() if at == i]:
                del source_kv[s]
        yield target_layer, keys, values


def _pairs(source_kv: SourceKV, m: LayerMap) -> Pairs:
    # Each once: a mapping may make its arrays when it is asked for them.
    return {s: source_kv[s] for s in sorted(m.sources)}


def _map(
    mapper: MapperData,
    m: LayerMap,
    pairs: Pairs,
    frame: _Frame,
    dtype: mx.Dtype | None,
) -> tuple[mx.array, mx.array]:
    if dtype is None:
        dtype = pairs[m.keys.sources[0]][0].dtype
    strip, rotate = None, None
    if mapper.content_space:
        ropes = [mapper.source.layers[s].rope for s in m.keys.sources]
        strip = [frame.table(rope, inverse=True) for rope in ropes]
        rotate = frame.table(mapper.target.layers[m.target_layer].rope)

    def one(part: LinearMap, index: int, **tables: object) -> mx.array:
        assert part.weight is not None
        sources = [frame.take(s, pairs[s][index]) for s in part.sources]
        return map_layer(
            sources,
            part.weight,
            part.bias,
            heads=part.heads,
            dtype=dtype,
            **tables,  # type: ignore[arg-type]
        )

    return one(m.keys, 0, strip=strip, rotate=rotate), one(m.values, 1)


def _frame(
    mapper: MapperData,
    layers: Sequence[LayerMap],
    source_kv: SourceKV,
    positions: mx.array | Sequence[int] | None,
) -> _Frame:
    """Check everything that can be checked before any work, and fix the positions."""
    needed, lead = check_sources(mapper, layers, source_kv, None)
    where = to_positions(positions, lead[-1], lead[:-1])
    if mapper.content_space:
        check_reach(mapper, layers, needed, where)
    return _Frame(where)


def _frames(
    mapper: MapperData,
    source_kv: SourceKV,
    available: Mapping[int, TokenRanges],
    required: Mapping[int, TokenRanges],
) -> dict[int, _Frame]:
    """Like :func:`_frame`, where layers hold different tokens: one per target layer."""
    needed, _ = check_sources(mapper, mapper.layers, source_kv, available)
    shared: dict[TokenRanges, dict[tuple[RopeSpec, bool], RopeTable | None]] = {}
    frames = {}
    for m in mapper.layers:
        sources = sorted(m.sources)
        common = available[sources[0]]
        for s in sources[1:]:
            common = common & available[s]
        part = required.get(m.target_layer, common)
        for s in sources:
            if not available[s].covers(part):
                raise CacheError(
                    f"Target layer {m.target_layer} is made for tokens {part} from source layers "
                    f"{sources}, and source layer {s} holds only tokens {available[s]} any more. "
                    "Re-prefill, or switch before the window has passed."
                )
        if not len(part):
            raise CacheError(
                f"The source layers {sources} of target layer {m.target_layer} have no tokens in "
                "common; re-prefill."
            )
        cut = {s: (available[s], part) for s in sources if available[s] != part}
        frames[m.target_layer] = _Frame(part.positions, shared.setdefault(part, {}), cut)
    if mapper.content_space:
        check_reach(
            mapper, mapper.layers, needed, mx.array([h.stop - 1 for h in available.values()])
        )
    return frames
