"""Whole caches mapped: against the float64 oracle, layer by layer, within memory."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import sys
import threading
import types
from dataclasses import replace
from typing import Any

import mappers
import mlx.core as mx
import numpy as np
import oracle
import pytest

import kvgraft
from kvgraft.errors import GeometryError
from kvgraft.files.safetensors import read_header
from kvgraft.mapper.mapper import load_mapper
from kvgraft.mapper.transfer import (
    _make_table,
    apply,
    iter_transfer,
    transfer_cache,
    transfer_layer,
)
from kvgraft.models.rope import RopeSpec

N = 21
GROUPS = [[0, 1], [2, 3]]
# Squared error over squared norm: the rounding of the result, and a little.
NMSE = {mx.float32: 1e-10, mx.float16: 2e-7, mx.bfloat16: 1e-5}


MIXED = mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True, k=3)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "mapper",
    [
        mappers.mapper(),
        MIXED,
        mappers.mapper(mappers.geometry(4, heads=4), heads=GROUPS, dtype=mx.float16),
        mappers.mapper(heads=[[1], [0]], bits=8, separate=True),
        mappers.mapper(content_space=False, dtype=mx.bfloat16),
    ],
    ids=["full", "mixed", "grouped", "local 8bit", "rotated"],
)
@pytest.mark.parametrize("start", [0, 300])
def test_every_layer_is_what_the_paper_says(tmp_path, mapper, dtype, start):
    loaded = load_mapper(mapper.save(tmp_path / "a"))
    source_kv = mappers.cache(mapper.source, N, dtype=dtype)
    positions = mx.arange(start, start + N)
    out = transfer_cache(source_kv, loaded, positions)
    assert list(out) == list(range(len(mapper.target.layers)))
    for layer, pair in out.items():
        want = oracle.map_cache_layer(mapper, source_kv, layer, np.arange(start, start + N))
        there = mapper.target.layers[layer]
        for got, ref, dim in zip(pair, want, (there.key_dim, there.value_dim)):
            assert got.dtype == dtype and got.shape == (there.n_kv_heads, N, dim)
            assert oracle.nmse(oracle.to_numpy(got), ref) < NMSE[dtype]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("own_positions", [False, True])
def test_a_batch_is_its_rows_one_by_one(rows, own_positions):
    source_kv = mappers.cache(MIXED.source, N, batch=rows)
    positions = mx.arange(5, 5 + N)
    if own_positions:
        positions = mx.stack([positions + 100 * r for r in range(rows)])
    out = transfer_cache(source_kv, MIXED, positions)
    for r in range(rows):
        one = {s: (k[r], v[r]) for s, (k, v) in source_kv.items()}
        alone = transfer_cache(one, MIXED, positions[r] if own_positions else positions)
        for layer, pair in out.items():
            for got, want in zip(pair, alone[layer]):
                assert got.shape == (rows, *want.shape)
                assert mx.allclose(got[r], want, rtol=1e-5, atol=1e-5)


def test_positions_start_at_zero_and_take_many_forms():
    mapper = mappers.mapper()
    source_kv = mappers.cache(mapper.source, N)
    want = transfer_cache(source_kv, mapper)[1][0]
    for positions in (
        mx.arange(N),
        mx.arange(N, dtype=mx.uint32),
        mx.arange(N, dtype=mx.float32),
        list(range(N)),
        range(N),
        np.arange(N),
    ):
        assert mappers.same(transfer_cache(source_kv, mapper, positions)[1][0], want)
    other = transfer_cache(source_kv, mapper, mx.arange(1, N + 1))[1][0]
    assert not mx.allclose(other, want, atol=1e-3)


def test_positions_may_have_gaps():
    mapper = mappers.mapper()
    positions = np.array([0, 1, 2, 3, *range(500, 500 + N - 4)])
    source_kv = mappers.cache(mapper.source, N)
    got = transfer_cache(source_kv, mapper, mx.array(positions))[2][0]
    want = oracle.map_cache_layer(mapper, source_kv, 2, positions)[0]
    assert oracle.nmse(oracle.to_numpy(got), want) < 1e-9


def test_one_layer_is_that_layer_of_the_whole(tmp_path):
    made = mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True)
    mapper = load_mapper(made.save(tmp_path / "a"))
    source_kv = mappers.cache(mapper.source, N)
    whole = transfer_cache(source_kv, mapper, mx.arange(7, 7 + N))
    for layer in (1, 0):
        needed = {*made.layers[layer].keys.sources, *made.layers[layer].values.sources}
        some = {s: source_kv[s] for s in needed}
        got = transfer_layer(mapper, layer, some, mx.arange(7, 7 + N))
        assert all(mappers.same(a, b) for a, b in zip(got, whole[layer]))
        assert mapper.layers[layer].is_loaded  # as VeloxQuant leaves it
    assert len(needed) < 4
    with pytest.raises(GeometryError, match=r"produces target layers \[0, 1\], not 2"):
        transfer_layer(mapper, 2, source_kv, mx.arange(N))


def test_layers_that_are_not_read_may_be_anything():
    mapper = mappers.mapper(mappers.geometry(9))
    source_kv: dict[int, Any] = mappers.cache(mapper.source, N)
    want = transfer_cache(source_kv, mapper)
    assert 8 not in mapper.source_layers
    source_kv[8] = None
    assert mappers.same(transfer_cache(source_kv, mapper)[0][0], want[0][0])


# ------------------------------------------------------------------ molt's call


def test_apply_takes_pairs_and_an_offset(tmp_path):
    mapper = kvgraft.KVMapper.load(mappers.mapper().save(tmp_path / "heo_k2.safetensors"))
    source_kv = mappers.cache(mapper.source, N)
    src_pairs = [source_kv[i] for i in range(4)]
    for offset in (0, 40):
        dst_pairs = mapper.apply(src_pairs, offset=offset)
        want = transfer_cache(source_kv, mapper, mx.arange(offset, offset + N))
        assert len(dst_pairs) == 3
        for i, pair in enumerate(dst_pairs):
            assert all(mappers.same(a, b) for a, b in zip(pair, want[i]))
    assert mappers.same(mapper.apply(src_pairs)[0][0], mapper.apply(src_pairs, 0)[0][0])
    half = apply(mapper, src_pairs, dtype=mx.float16)
    assert {x.dtype for pair in half for x in pair} == {mx.float16}


def test_apply_refuses_what_it_cant_line_up():
    mapper = mappers.mapper()
    source_kv = mappers.cache(mapper.source, N)
    pairs = list(source_kv.values())
    with pytest.raises(GeometryError, match="3 pairs .* the source has 4 layers"):
        mapper.apply(pairs[:3])
    with pytest.raises(GeometryError, match="must not be negative"):
        mapper.apply(pairs, -1)
    del mapper.layers[1]
    with pytest.raises(GeometryError, match=r"doesn't produce target layers \[1\]"):
        mapper.apply(pairs)


# ------------------------------------------------------------------- dtypes


def test_dtype_decides_the_result_and_float16_saturates():
    mapper = mappers.mapper()
    mapper.layers[0].values.bias = mx.full((2, 16), 1e6)
    source_kv = mappers.cache(mapper.source, N)
    for dtype in (mx.float16, mx.bfloat16):
        out = transfer_cache(source_kv, mapper, dtype=dtype)
        assert {x.dtype for pair in out.values() for x in pair} == {dtype}
    assert transfer_cache(source_kv, mapper, dtype=mx.float16)[0][1].max().item() == 65504


def test_the_default_dtype_is_that_of_the_first_source_keys():
    mapper = mappers.mapper()
    source_kv = {
        s: (k.astype(mx.bfloat16), v) for s, (k, v) in mappers.cache(mapper.source, N).items()
    }
    keys, values = transfer_cache(source_kv, mapper)[0]
    assert keys.dtype == values.dtype == mx.bfloat16


# ------------------------------------------------------------------- checks


class Untouchable:
    """A store that must not be read."""

    def fill(self, layer: Any) -> None:
        raise AssertionError("weights were read before the arguments were checked")


def _cut(source_kv: dict[int, Any], layer: int, index: int, cut: Any) -> None:
    pair = list(source_kv[layer])
    pair[index] = cut(pair[index])
    source_kv[layer] = tuple(pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv: kv.pop(1), r"lacks source layers \[1\]; the mapper reads"),
        (lambda kv: kv.clear(), r"lacks source layers \[0, 1, 2, 3\]"),
        (lambda kv: _cut(kv, 0, 0, lambda x: x[0]), "Keys of source layer 0 have shape"),
        (lambda kv: _cut(kv, 2, 0, lambda x: x[:1]), "Keys of source layer 2 have shape"),
        (
            lambda kv: _cut(kv, 2, 1, lambda x: x[..., :8]),
            r"Values of source layer 2 have .*, 16\)",
        ),
        (lambda kv: _cut(kv, 3, 1, lambda x: x[:, :-1]), "Values of source layer 3 have"),
        (lambda kv: _cut(kv, 3, 0, lambda x: x[None]), "Keys of source layer 3 have"),
        (
            lambda kv: _cut(kv, 1, 0, lambda x: x.astype(mx.int8)),
            "are mlx.core.int8; .* Dequantise",
        ),
        (lambda kv: kv.update({1: kv[1][:1]}), "Source layer 1 is no pair"),
    ],
)
def test_caches_that_dont_fit_are_refused_before_any_work(change, message):
    mapper = mappers.mapper()
    mapper.unload_all()
    mapper.store = Untouchable()
    source_kv = mappers.cache(mapper.source, N)
    change(source_kv)
    for call in (
        lambda: transfer_cache(source_kv, mapper),
        lambda: iter_transfer(source_kv, mapper),  # not only when the first layer is asked for
    ):
        with pytest.raises(GeometryError, match=message):
            call()


def test_an_empty_cache_is_refused():
    mapper = mappers.mapper()
    mapper.store = Untouchable()
    with pytest.raises(GeometryError, match="holds no tokens"):
        transfer_cache(mappers.cache(mapper.source, 0), mapper)


@pytest.mark.parametrize("n", [1, 2, 257])
def test_any_number_of_tokens(n):
    mapper = mappers.mapper()
    source_kv = mappers.cache(mapper.source, n)
    got = transfer_cache(source_kv, mapper)[1][0]
    want = oracle.map_cache_layer(mapper, source_kv, 1, np.arange(n))[0]
    assert oracle.nmse(oracle.to_numpy(got), want) < 1e-10


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (mx.arange(N - 1), rf"shape \({N - 1},\), but the cache holds {N} tokens"),
        (mx.arange(N)[None], "but the cache holds"),
        (mx.array(3), "but the cache holds"),
        (mx.arange(N) + 0.5, "whole numbers"),
        (mx.ones(N, dtype=mx.bool_), "whole numbers"),
        (mx.arange(N) - 1, "from 0 to 2,147,483,647"),
        ([2**32 + i for i in range(N)], "from 0 to 2,147,483,647"),
        (mx.arange(N).astype(mx.int64) + 2**33, "from 0 to 2,147,483,647"),
        (mx.full(N, 4_000_000_000, dtype=mx.uint32), "from 0 to 2,147,483,647"),
        (mx.full(N, float("nan")), "whole numbers"),
    ],
)
def test_positions_that_dont_fit(positions, message):
    mapper = mappers.mapper()
    with pytest.raises(GeometryError, match=message):
        transfer_cache(mappers.cache(mapper.source, N), mapper, positions)


def test_batched_positions_need_the_batch():
    mapper = mappers.mapper()
    with pytest.raises(GeometryError, match="in each of 2 rows"):
        transfer_cache(mappers.cache(mapper.source, N, batch=2), mapper, mx.zeros((3, N), mx.int32))


@pytest.mark.parametrize("side", ["source", "target"])
def test_positions_beyond_what_rope_describes(side):
    limited = RopeSpec(16, base=1e4, max_position=100)
    mapper = mappers.mapper(**{side: mappers.geometry(4, rope=limited)})
    source_kv = mappers.cache(mapper.source, N)
    transfer_cache(source_kv, mapper, mx.arange(100 - N, 100))
    with pytest.raises(GeometryError, match="Position 100 is beyond 100"):
        transfer_cache(source_kv, mapper, mx.arange(101 - N, 101))
    # Keys that stay rotated need no table.
    transfer_cache(source_kv, replace(mapper, content_space=False), mx.arange(101 - N, 101))


def test_a_mapper_without_layers():
    mapper = replace(mappers.mapper(), layers=[])
    with pytest.raises(GeometryError, match="produces no layers"):
        transfer_cache(mappers.cache(mapper.source, N), mapper)


# ---------------------------------------------------------- tables and aliasing


def test_tables_are_made_once_for_all_layers(monkeypatch):
    made: list[tuple[RopeSpec, bool]] = []
    table = RopeSpec.table

    def counted(self: RopeSpec, positions: mx.array, *, inverse: bool = False) -> Any:
        made.append((self, inverse))
        return table(self, positions, inverse=inverse)

    monkeypatch.setattr(RopeSpec, "table", counted)
    mapper = mappers.mapper(mappers.geometry(6), mappers.geometry(6, rope=RopeSpec(16, base=1e6)))
    transfer_cache(mappers.cache(mapper.source, N), mapper)
    assert sorted(i for _, i in made) == [False, True]
    made.clear()
    transfer_cache(mappers.cache(MIXED.source, N), MIXED)
    assert len(made) == len(set(made)) == 4 + 2


def address(x: mx.array) -> tuple[int, int]:
    view = np.array(x, copy=False)
    return view.__array_interface__["data"][0], view.nbytes


def test_results_share_no_memory_with_the_source():
    """Not even through the identity map, with nothing to rotate."""
    g = mappers.geometry(1, 1, 16, rope=RopeSpec(0))
    mapper = mappers.mapper(g, g, k=1)
    for part in (mapper.layers[0].keys, mapper.layers[0].values):
        part.weight, part.bias = mx.eye(16)[None], mx.zeros((1, 16))
    source_kv = mappers.cache(g, N)
    out = transfer_cache(source_kv, mapper)
    for got, had in zip(out[0], source_kv[0]):
        mx.eval(got, had)
        assert mx.allclose(got, had)
        (a, size), (b, _) = address(got), address(had)
        assert abs(a - b) >= size


def test_strided_sources_as_mlx_lm_keeps_them():
    """A slice of a buffer with room for 256 tokens."""
    mapper = mappers.mapper()
    roomy = mappers.cache(mapper.source, 256, batch=1)
    source_kv = {s: (k[..., :N, :], v[..., :N, :]) for s, (k, v) in roomy.items()}
    compact = {s: tuple(mx.contiguous(x) for x in pair) for s, pair in source_kv.items()}
    got, want = transfer_cache(source_kv, mapper), transfer_cache(compact, mapper)
    for layer in got:
        assert all(mx.allclose(a, b, atol=1e-6) for a, b in zip(got[layer], want[layer]))


# --------------------------------------------------------------------- memory


@pytest.fixture
def big(tmp_path):
    """Eight layers of 2.1 MB on disk, and a cache that is small beside them."""
    g = mappers.geometry(8, 4, 64)
    mappers.mapper(g, g, k=4).save(tmp_path / "a")
    gc.collect()
    return load_mapper(tmp_path / "a"), mappers.cache(g, 4)


LAYER = 2 * 4 * (4 * 4 * 64) * 64 * 4


def peak_of(call: Any) -> int:
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    call()
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_at_most_one_layer_is_resident(big):
    mapper, source_kv = big
    mx.eval(list(source_kv.values()))
    transfer_cache(source_kv, mapper)  # compile and warm what there is
    peak = peak_of(lambda: transfer_cache(source_kv, mapper))
    assert LAYER <= peak < 1.5 * LAYER
    assert not any(m.is_loaded for m in mapper.layers)
    after = mx.get_active_memory()
    assert peak_of(lambda: transfer_cache(source_kv, mapper, unload_after=False)) > 7.5 * LAYER
    assert all(m.is_loaded for m in mapper.layers)
    out = transfer_cache(source_kv, mapper)  # drops them as it goes
    assert not any(m.is_loaded for m in mapper.layers)
    del out
    assert mx.get_active_memory() - after < LAYER


class Watched:
    """A store that notes what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[tuple[str, int]] = []

    def fill(self, layer: Any) -> None:
        self.calls.append(("fill", layer.target_layer))
        self.store.fill(layer)

    def read_ahead(self, layer: Any) -> None:
        self.calls.append(("ahead", layer.target_layer))
        self.store.read_ahead(layer)


def test_the_next_layer_is_read_ahead_of_the_one_computed(big):
    mapper, source_kv = big
    mapper.store = Watched(mapper.store)
    mapper.load_layer(3)  # there already, so it is neither read ahead nor read
    mapper.store.calls.clear()
    transfer_cache(source_kv, mapper)
    want = [("fill", 0)]
    for layer in (1, 2, 4, 5, 6, 7):
        ahead = [("ahead", layer)]
        want += [*ahead, ("fill", layer)]
    assert mapper.store.calls == want
    mapper.store.calls.clear()
    transfer_cache(source_kv, mapper, unload_after=False)
    assert mapper.store.calls == [("fill", layer) for layer in range(8)]


@pytest.mark.parametrize("system", ["linux", "darwin", "another"])
def test_read_ahead_names_the_bytes_of_one_layer(tmp_path, monkeypatch, system):
    path = mappers.mapper(bits=4).save(tmp_path / "a")
    mapper = load_mapper(path)
    asked: list[tuple[int, int]] = []
    if system == "linux":
        monkeypatch.setattr(
            os, "posix_fadvise", lambda fd, at, size, advice: asked.append((at, size)), False
        )
        monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", False)
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(
            fcntl, "fcntl", lambda fd, command, advice: asked.append(struct.unpack("qi4x", advice))
        )
    mapper.store.read_ahead(mapper.layers[1])
    assert not mapper.layers[1].is_loaded
    if system == "another":
        assert asked == []
        return
    header = read_header(path / "mapper.safetensors")
    data = (path / "mapper.safetensors").read_bytes()
    parts = [info for name, info in header.tensors.items() if name.startswith("layers.1.")]
    assert len(parts) == 8
    assert sorted(asked) == sorted((info.start, info.stop - info.start) for info in parts)
    read = mapper.read_layer(1).keys.bias
    assert any(data[at : at + size] == bytes(memoryview(read).cast("B")) for at, size in asked)
    # It is advice: a file that is gone is somebody else's error to raise.
    (path / "mapper.safetensors").unlink()
    mapper.store.read_ahead(mapper.layers[2])


def test_a_generator_holds_one_layer_too(big):
    mapper, source_kv = big
    mx.eval(list(source_kv.values()))
    want = transfer_cache(source_kv, mapper)
    seen = []

    def go() -> None:
        for layer, keys, values in iter_transfer(source_kv, mapper):
            seen.append(layer)
            assert mappers.same(keys, want[layer][0]) and mappers.same(values, want[layer][1])

    assert peak_of(go) < 1.5 * LAYER
    assert seen == list(range(8))


def test_a_mapper_in_memory_keeps_its_weights():
    mapper = mappers.mapper()
    source_kv = mappers.cache(mapper.source, N)
    for _ in range(2):
        assert len(transfer_cache(source_kv, mapper)) == 3
        assert all(m.is_loaded for m in mapper.layers)


def test_target_layers_come_ascending_whatever_the_order_in_the_mapper():
    mapper = mappers.mapper()
    mapper.layers.reverse()
    out = transfer_cache(mappers.cache(mapper.source, N), mapper)
    assert list(out) == [0, 1, 2]


def test_sources_can_be_given_up_on_the_way():
    mapper = mappers.mapper(mappers.geometry(6), mappers.geometry(4), k=2)
    source_kv = mappers.cache(mapper.source, N)
    want = transfer_cache(source_kv, mapper)
    left = []
    for layer, keys, _ in iter_transfer(source_kv, mapper, consume=True):
        left.append(sorted(source_kv))
        assert mappers.same(keys, want[layer][0])
    # Target layer t reads t and t + 1; layer 5 is read by none and stays.
    assert left == [[1, 2, 3, 4, 5], [2, 3, 4, 5], [3, 4, 5], [5]]
    frozen = types.MappingProxyType(mappers.cache(mapper.source, N))
    with pytest.raises(GeometryError, match="consume needs a dict"):
        iter_transfer(frozen, mapper, consume=True)


def test_given_up_sources_are_freed():
    g = mappers.geometry(8, 4, 64)
    mapper = mappers.mapper(g, mappers.geometry(8, 1, 16), k=1)
    source_kv = mappers.cache(g, 256)
    mx.eval(list(source_kv.values()))
    pair = 2 * 4 * 256 * 64 * 4
    before = mx.get_active_memory()
    steps = iter_transfer(source_kv, mapper, consume=True)
    for done in range(1, 5):
        out = next(steps)
        del out
        assert before - mx.get_active_memory() > (done - 0.5) * pair


def test_threads_share_one_mapper(big):
    mapper, source_kv = big
    want = transfer_cache(source_kv, mapper)
    mx.eval(list(want.values()))
    wrong: list[Any] = []

    def work(unload_after: bool) -> None:
        try:
            for _ in range(3):
                out = transfer_cache(source_kv, mapper, unload_after=unload_after)
                wrong.extend(
                    layer
                    for layer, pair in out.items()
                    if not all(mappers.same(a, b) for a, b in zip(pair, want[layer]))
                )
        except Exception as error:  # shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("tokens", [0, 1, 1024, 1025, 2500])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("inverse", [False, True])
def test_tables_are_the_same_block_by_block(tokens: int, batch: tuple[int, ...], inverse: bool):
    spec = RopeSpec(16, traditional=tokens % 2 == 0, base=1e4, magnitude=1.25)
    positions = mx.broadcast_to(mx.arange(40, 40 + tokens), (*batch, tokens))
    whole = spec.table(positions, inverse=inverse)
    made = _make_table(spec, positions, inverse)
    assert whole is not None and made is not None
    assert made.traditional == whole.traditional
    assert made.cos.shape == (*batch, tokens, 8)
    assert mx.array_equal(made.cos, whole.cos)
    assert mx.array_equal(made.sin, whole.sin)
