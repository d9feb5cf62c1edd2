"""Building mlx-lm's cache objects, on every mlx-lm that is supported."""

from __future__ import annotations

import copy
import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from small_caches import DIM as D
from small_caches import HEADS as H
from small_caches import arrays, numbered, numbers

from kvgraft.cache import SizeLimit, build_cache, read_cache
from kvgraft.errors import CacheError, GeometryError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec
from kvgraft.models.token_ranges import TokenRanges

PLAIN = ModelGeometry((LayerGeometry(H, D, D, RopeSpec(D, base=1e4)),) * 3, "float32", "toy")


def geometry(layers: int = 1, *, window: int | None = None, dim: int = D) -> ModelGeometry:
    layer = LayerGeometry(H, dim, dim, RopeSpec(dim, base=1e4), window)
    return ModelGeometry((layer,) * layers, "float32", "toy")


@pytest.mark.parametrize("n", [3, 256])
def test_built_caches_share_nothing(n: int) -> None:
    # Two caches holding one array object write into each other.
    pairs = arrays(n)
    first, second = build_cache(PLAIN, pairs), build_cache(PLAIN, pairs)
    for a, b, (k, v) in zip(first, second, pairs, strict=True):
        assert a.keys is not k and a.values is not v and a.keys is not b.keys
    kept = [mx.array(k) for k, _ in pairs]
    row = mx.ones((1, H, 1, D))
    for a, b in zip(first, second, strict=True):
        a.update_and_fetch(7 * row, 7 * row)
        b.update_and_fetch(9 * row, 9 * row)
        a.keys[..., :1, :] = 5.0
        assert a.keys[0, 0, n, 0].item() == 7 and b.keys[0, 0, n, 0].item() == 9
        assert b.keys[0, 0, 0, 0].item() != 5
    for (k, _), want in zip(pairs, kept, strict=True):
        assert mx.array_equal(k, want)


def test_a_branch_of_a_built_cache_is_independent() -> None:
    built = build_cache(PLAIN, arrays(3))
    branch = copy.deepcopy(built)
    row = mx.ones((1, H, 1, D))
    built[0].update_and_fetch(7 * row, 7 * row)
    branch[0].update_and_fetch(9 * row, 9 * row)
    assert built[0].keys[0, 0, 3, 0].item() == 7


def test_built_arrays_are_evaluated() -> None:
    # A lazy array made in one thread fails in another.
    lazy = [(k * 2 + 1, v * 2 + 1) for k, v in arrays(4)]
    built = build_cache(PLAIN, lazy)
    seen: list[Any] = []

    def use() -> None:
        try:
            seen.append([float(entry.keys.sum()) for entry in built])
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [[float(entry.keys.sum()) for entry in built]]


def test_views_build_the_same_cache() -> None:
    plain = arrays(6)
    want = build_cache(PLAIN, plain)

    def padded(x: mx.array) -> mx.array:
        return mx.concatenate([x, mx.full((1, H, 250, D), 9.0)], axis=2)[..., :6, :]

    def transposed(x: mx.array) -> mx.array:
        return mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    def reversed_twice(x: mx.array) -> mx.array:
        return mx.contiguous(x[..., ::-1, :])[..., ::-1, :]

    def strided(x: mx.array) -> mx.array:
        return mx.repeat(x, 2, axis=2)[:, :, ::2]

    def unbatched(x: mx.array) -> mx.array:
        return x[0]

    for view in (padded, transposed, reversed_twice, strided, unbatched):
        got = build_cache(PLAIN, [(view(k), view(v)) for k, v in plain])
        for a, b in zip(got, want, strict=True):
            assert mx.array_equal(a.keys, b.keys) and mx.array_equal(a.values, b.values)
            assert a.keys.shape == (1, H, 6, D) and a.offset == 6


def test_layers_may_come_one_by_one() -> None:
    pairs = arrays(4)
    built = build_cache(PLAIN, (pair for pair in pairs))
    assert [entry.offset for entry in built] == [4, 4, 4]
    with pytest.raises(GeometryError, match="3 caches, got arrays for 2"):
        build_cache(PLAIN, (pair for pair in pairs[:2]))
    with pytest.raises(GeometryError, match="3 caches, got arrays for 4"):
        build_cache(PLAIN, (pair for pair in [*pairs, pairs[0]]))


def test_stored_in_the_dtype_that_the_target_writes() -> None:
    half = ModelGeometry(PLAIN.layers, "bfloat16", "toy")
    built = build_cache(half, arrays(3))
    assert {entry.keys.dtype for entry in built} == {mx.bfloat16}
    # and stays in it when the buffer grows
    row = mx.ones((1, H, 1, D), dtype=mx.bfloat16)
    k, v = built[0].update_and_fetch(row, row)
    assert k.dtype == v.dtype == mx.bfloat16
    assert build_cache(half, arrays(3), dtype=mx.float16)[0].keys.dtype == mx.float16


@pytest.mark.parametrize("given", [mx.float32, mx.bfloat16])
def test_values_beyond_float16_are_clamped(given: mx.Dtype) -> None:
    big = mx.zeros((1, H, 2, D))
    big[0, 0, 0, :4] = mx.array([6e4, 7e4, -1e9, 65504.0])
    pairs = [(big.astype(given), -big.astype(given))] * 3
    built = build_cache(PLAIN, pairs, dtype=mx.float16)
    for entry in built:
        assert mx.isfinite(entry.keys).all() and mx.isfinite(entry.values).all()
        got = entry.keys[0, 0, 0, :4].astype(mx.float32)
        assert got[1].item() == 65504 and got[2].item() == -65504
        assert abs(got[0].item() - 6e4) < 256


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_values_that_are_not_finite_are_refused(bad: float, which: int) -> None:
    pairs = [[mx.array(k), mx.array(v)] for k, v in arrays(3)]
    pairs[1][which][0, 1, 2, 3] = bad
    with pytest.raises(CacheError, match="Layer 1 holds NaN or infinite"):
        build_cache(PLAIN, [(k, v) for k, v in pairs], dtype=mx.float16)


def test_arrays_that_do_not_fit_are_refused() -> None:
    good = arrays(3)
    k, v = good[2]
    with pytest.raises(GeometryError, match="got arrays for 2"):
        build_cache(PLAIN, good[:2])
    for pair, message in (
        ((k[..., :2, :], v), "Layer 2: keys have shape"),
        ((k, v[..., :2, :]), "Layer 2: values have shape"),
        ((k[:, :1], v), "Layer 2: keys"),
        ((k[..., :4], v), "Layer 2: keys"),
        ((mx.concatenate([k, k]), v), "Layer 2: keys"),
        ((k[0, 0], v), "must be"),
        ((k.astype(mx.int32), v), "not floats"),
        ((None, v), "must be"),
    ):
        with pytest.raises(GeometryError, match=message):
            build_cache(PLAIN, [*good[:2], pair])
    with pytest.raises(GeometryError, match="float dtype"):
        build_cache(PLAIN, good, dtype=mx.int8)
    with pytest.raises(CacheError, match="no tokens"):
        build_cache(PLAIN, [(k[..., :0, :], v[..., :0, :]) for k, v in good])


def test_keys_and_values_may_differ_in_width() -> None:
    geometry = ModelGeometry((LayerGeometry(2, 12, 8, RopeSpec(12, base=1e4)),), "float32", "wide")
    built = build_cache(geometry, [(mx.ones((1, 2, 3, 12)), mx.ones((1, 2, 3, 8)))])
    snapshot = read_cache(built, geometry)
    assert snapshot.keys[0].shape[-1] == 12 and snapshot.values[0].shape[-1] == 8


def test_building_needs_the_tokens_that_a_layer_sees() -> None:
    x = numbered(0, 4)
    with pytest.raises(CacheError, match=r"needs tokens 0…9, and tokens 6…9 are given"):
        build_cache(geometry(), [(x, x)], token_ranges=[TokenRanges.last(10, 4)])
    built = build_cache(geometry(window=4), [(x, x)], token_ranges=[TokenRanges.last(10, 4)])
    assert built[0].offset == 10 and built[0]._idx == 4
    with pytest.raises(CacheError, match="Layer 1 ends with token 9, layer 0 with 10"):
        build_cache(
            geometry(2, window=4),
            [(x, x)] * 2,
            token_ranges=[TokenRanges.last(10, 4), TokenRanges.last(9, 4)],
        )
    with pytest.raises(GeometryError, match="expected"):
        build_cache(geometry(window=4), [(x, x)], token_ranges=[TokenRanges.last(10, 3)])


def test_a_window_is_cut_out_of_a_whole_text() -> None:
    x = numbered(0, 20)
    entry = build_cache(geometry(window=8), [(x, x)])[0]
    assert numbers(entry.keys) == list(range(12, 20)) and entry.offset == 20
    entry = build_cache(geometry(), [(x, x)], size_limit=SizeLimit(8, 3))[0]
    assert numbers(entry.keys) == [0, 1, 2, 15, 16, 17, 18, 19]


# mlx-vlm 2061, Rapid-MLX 1294: heads of 96 and groups of 64.
def test_groups_that_do_not_divide_the_head_are_named() -> None:
    pairs = [(x, -x) for x in (mx.random.normal((1, H, 3, 96)),) * 2]
    with pytest.raises(GeometryError, match="kv_group_size 64 does not divide.*96.*use 32"):
        build_cache(geometry(2, dim=96), pairs, kv_bits=8, kv_group_size=64)
    built = build_cache(geometry(2, dim=96), pairs, kv_bits=8, kv_group_size=32)
    assert all(isinstance(entry, QuantizedKVCache) for entry in built)
    again = read_cache(built, geometry(2, dim=96))
    assert mx.allclose(again.keys[0], pairs[0][0], atol=0.05)


def test_bits_that_a_fresh_quantised_cache_gets_wrong() -> None:
    for bits in (5, 6):
        pairs = [(x, -x) for x in (mx.random.normal((1, H, 3, 64)),) * 2]
        built = build_cache(geometry(2, dim=64), pairs, kv_bits=bits, kv_group_size=32)
        x = mx.random.normal((1, H, 300, 64))
        for entry in built:  # grows, unlike one that starts out so
            entry.update_and_fetch(x, x)
        again = read_cache(built, geometry(2, dim=64))
        assert again.offset == 303
        assert mx.allclose(again.keys[0][..., 3:, :], x, atol=0.25)


# The plain ones.
@pytest.mark.parametrize("layers", [1, 61])
def test_any_number_of_layers_in_their_order(layers: int) -> None:
    pairs = [(numbered(i, i + 1), numbered(i, i + 1)) for i in range(layers)]
    built = build_cache(geometry(layers), pairs)
    assert [e.keys[0, 0, 0, 0].item() for e in built] == list(range(layers))
