"""Map a source cache into the target's layout, layer by layer.

The names and shapes are those of VeloxQuant-MLX (``load_mapper``,
``transfer_layer``, ``transfer_cache``) and of the molt mappers (``apply``):
arrays in, arrays out. :mod:`kvgraft.caches` reads and builds mlx-lm's cache
objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvgraft import artifact
from kvgraft.errors import GeometryError
from kvgraft.mapper import LayerMap, LinearMap, Mapper, SourceKV
from kvgraft.ops import map_layer
from kvgraft.rope import RopeSpec, RopeTable

__all__ = [
    "apply",
    "iter_transfer",
    "load_mapper",
    "transfer_cache",
    "transfer_layer",
]

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def load_mapper(path: str | os.PathLike[str]) -> Mapper:
    """Open an artifact; see :func:`kvgraft.artifact.load`."""
    return artifact.load(path)


def transfer_layer(
    mapper: Mapper,
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
    """
    m = mapper.layer(target_layer)
    frame = _frame(mapper, [m], source_kv, positions)
    return _map(mapper, mapper.read_layer(target_layer, keep=True), source_kv, frame, dtype)


def transfer_cache(
    source_kv: SourceKV,
    mapper: Mapper,
    positions: mx.array | Sequence[int] | None = None,
    unload_after: bool = True,
    *,
    dtype: mx.Dtype | None = None,
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

    Returns:
        ``{target_layer: (keys, values)}``. Never shares memory with the source.

    Raises:
        GeometryError: If layers are missing, or shapes, dtypes or positions
            don't fit the mapper; before any work.
    """
    mapped = iter_transfer(source_kv, mapper, positions, unload_after, dtype=dtype)
    return {target_layer: (keys, values) for target_layer, keys, values in mapped}


def iter_transfer(
    source_kv: SourceKV,
    mapper: Mapper,
    positions: mx.array | Sequence[int] | None = None,
    unload_after: bool = True,
    *,
    dtype: mx.Dtype | None = None,
    consume: bool = False,
) -> Iterator[tuple[int, mx.array, mx.array]]:
    """Like :func:`transfer_cache`, one target layer at a time.

    Args:
        source_kv: See :func:`transfer_layer`.
        mapper: The mapper for this pair of models.
        positions: See :func:`transfer_cache`.
        unload_after: See :func:`transfer_cache`.
        dtype: See :func:`transfer_cache`.
        consume: Remove each source layer from ``source_kv``, which must be
            mutable, as soon as no later target layer reads it. The result is
            evaluated then, so that its memory can be given back.

    Yields:
        ``(target_layer, keys, values)``, target layers ascending.

    Raises:
        GeometryError: Before any work; see :func:`transfer_cache`.
    """
    frame = _frame(mapper, mapper.layers, source_kv, positions)
    if consume and not isinstance(source_kv, MutableMapping):
        raise GeometryError("iter_transfer: consume needs a dict, to remove layers from.")
    return _iterate(source_kv, mapper, frame, unload_after, dtype, consume)


def apply(
    mapper: Mapper,
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
    if offset < 0:
        raise GeometryError(f"The offset must not be negative, got {offset}.")
    source_kv = dict(enumerate(src_pairs))
    shape = source_kv[mapper.source_layers[0]][0].shape
    n_tokens = int(shape[-2]) if len(shape) > 1 else 0
    positions = mx.arange(offset, offset + n_tokens, dtype=mx.int32)
    return [(k, v) for _, k, v in iter_transfer(source_kv, mapper, positions, dtype=dtype)]


@dataclass
class _Frame:
    """Positions of a cache, and the RoPE tables made for them so far.

    Tables depend on positions and spec alone, and most layers of a model share
    one spec: two tables serve a whole transfer.
    """

    positions: mx.array
    tables: dict[tuple[RopeSpec, bool], RopeTable | None] = field(default_factory=dict)

    def table(self, spec: RopeSpec, *, inverse: bool = False) -> RopeTable | None:
        key = (spec, inverse)
        if key not in self.tables:
            table = spec.table(self.positions, inverse=inverse)
            if table is not None:
                mx.eval(table.cos, table.sin)
            self.tables[key] = table
        return self.tables[key]


def _iterate(
    source_kv: SourceKV,
    mapper: Mapper,
    frame: _Frame,
    unload_after: bool,
    dtype: mx.Dtype | None,
    consume: bool,
) -> Iterator[tuple[int, mx.array, mx.array]]:
    drop = unload_after and mapper.store is not None
    layers = sorted(mapper.layers, key=lambda m: m.target_layer)
    last = {s: i for i, m in enumerate(layers) for s in _sources(m)}
    for i, described in enumerate(layers):
        target_layer = described.target_layer
        m = mapper.read_layer(target_layer, keep=not drop)
        keys, values = _map(mapper, m, source_kv, frame, dtype)
        if drop and i + 1 < len(layers) and mapper.store is not None:
            # Disk and processor at work at the same time; the next layer waits in
            # the page cache, so that still only one is in memory.
            mx.async_eval(keys, values)  # type: ignore[no-untyped-call]
            if not layers[i + 1].is_loaded:
                mapper.store.read_ahead(layers[i + 1])
        if drop or consume:
            # Unevaluated results would keep weights and sources alive.
            mx.eval(keys, values)
        del m
        if drop:
            described.unload()
        if consume and isinstance(source_kv, MutableMapping):
            for s in [s for s, at in last.items() if at == i]:
                del source_kv[s]
        yield target_layer, keys, values


def _sources(m: LayerMap) -> set[int]:
    return {*m.keys.sources, *m.values.sources}


def _map(
    mapper: Mapper,
    m: LayerMap,
    source_kv: SourceKV,
    frame: _Frame,
    dtype: mx.Dtype | None,
) -> tuple[mx.array, mx.array]:
    if dtype is None:
        dtype = source_kv[m.keys.sources[0]][0].dtype
    strip, rotate = None, None
    if mapper.content_space:
        ropes = [mapper.source.layers[s].rope for s in m.keys.sources]
        strip = [frame.table(rope, inverse=True) for rope in ropes]
        rotate = frame.table(mapper.target.layers[m.target_layer].rope)

    def one(part: LinearMap, index: int, **tables: object) -> mx.array:
        assert part.weight is not None
        sources = [source_kv[s][index] for s in part.sources]
        return map_layer(
            sources,
            part.weight,
            part.bias,
            heads=part.heads,
            dtype=dtype,
            **tables,  # type: ignore[arg-type]
        )

    return one(m.keys, 0, strip=strip, rotate=rotate), one(m.values, 1)


# -------------------------------------------------------------------- checks


def _frame(
    mapper: Mapper,
    layers: Sequence[LayerMap],
    source_kv: SourceKV,
    positions: mx.array | Sequence[int] | None,
) -> _Frame:
    """Check everything that can be checked before any work, and fix the positions."""
    needed = sorted({s for m in layers for s in _sources(m)})
    if not needed:
        raise GeometryError("This mapper produces no layers.")
    missing = [s for s in needed if s not in source_kv]
    if missing:
        raise GeometryError(
            f"The cache lacks source layers {missing}; the mapper reads layers {needed}."
        )
    first = source_kv[needed[0]][0]
    lead = (*first.shape[:-3], int(first.shape[-2])) if first.ndim in (3, 4) else None
    if lead is None:
        raise GeometryError(
            f"Keys of source layer {needed[0]} have shape {tuple(first.shape)}; expected "
            "[n_kv_heads, N, head_dim] or [B, n_kv_heads, N, head_dim]."
        )
    for s in needed:
        _check_layer(mapper, s, source_kv[s], lead)
    n_tokens = lead[-1]
    if n_tokens == 0:
        raise GeometryError(
            "The source cache holds no tokens, so there is nothing to transfer. Prefill the "
            "source first, or start the target from an empty cache."
        )
    where = _positions(positions, n_tokens, lead[:-1])
    if mapper.content_space:
        _check_reach(mapper, layers, needed, where)
    return _Frame(where)


def _check_layer(
    mapper: Mapper, s: int, pair: tuple[mx.array, mx.array], lead: tuple[int, ...]
) -> None:
    if len(pair) != 2:
        raise GeometryError(f"Source layer {s} is no pair of keys and values.")
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
        if array.dtype not in _FLOATS:
            raise GeometryError(
                f"{name} of source layer {s} are {array.dtype}; a cache of floats is needed. "
                "Dequantise a quantised cache first."
            )


def _positions(
    given: mx.array | Sequence[int] | None, n_tokens: int, batch: tuple[int, ...]
) -> mx.array:
    if given is None:
        return mx.arange(n_tokens, dtype=mx.int32)
    positions = given if isinstance(given, mx.array) else _array(given)
    shape = tuple(positions.shape)
    if shape != (n_tokens,) and not (batch and shape == (*batch, n_tokens)):
        raise GeometryError(
            f"positions has shape {shape}, but the cache holds {n_tokens} tokens"
            + (f" in each of {batch[0]} rows." if batch else ".")
        )
    if not mx.issubdtype(positions.dtype, mx.integer):
        whole = positions.astype(mx.int32)
        if positions.dtype == mx.bool_ or not mx.array_equal(
            whole.astype(positions.dtype), positions
        ):
            raise GeometryError("positions must be whole numbers.")
        positions = whole
    return positions.astype(mx.int32)


def _array(given: Sequence[int]) -> mx.array:
    return mx.array(given if hasattr(given, "shape") else list(given))  # type: ignore[arg-type]


def _check_reach(
    mapper: Mapper, layers: Sequence[LayerMap], needed: Sequence[int], positions: mx.array
) -> None:
    specs = {mapper.source.layers[s].rope for s in needed}
    specs |= {mapper.target.layers[m.target_layer].rope for m in layers}
    limited = [spec for spec in specs if spec.max_position is not None]
    if limited:
        last = int(mx.max(positions).item())  # type: ignore[arg-type]  # of an integer array
        for spec in limited:
            spec.check_positions(last)
