"""What the transfer functions say to arguments of another kind, and to NaN."""

from __future__ import annotations

from typing import Any

import mappers
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from kvgraft.cache import read_cache
from kvgraft.cache.map import map_cache
from kvgraft.errors import (
    ArgumentError,
    CacheError,
    GeometryError,
    KvgraftError,
    UnsupportedCacheError,
)
from kvgraft.mapper.mapper import Mapper, load_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.mapper.transfer import (
    apply,
    iter_transfer,
    transfer_cache,
    transfer_layer,
)
from kvgraft.models.token_ranges import TokenRanges

MAPPER = mappers.mapper()
KV = mappers.cache(MAPPER.source, 5)
PAIRS = list(KV.values())


def mlx_lm_caches() -> list[KVCache]:
    made = []
    for k, v in PAIRS:
        entry = KVCache()
        entry.update_and_fetch(k[None], v[None])
        made.append(entry)
    return made


NUMPY = {i: (np.array(k), np.array(v)) for i, (k, v) in KV.items()}
CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "mlx-lm caches": (lambda: transfer_cache(mlx_lm_caches(), MAPPER), UnsupportedCacheError,
                      "map_cache"),
    "pairs in a list": (lambda: transfer_cache(PAIRS, MAPPER), ArgumentError, "transfer.apply"),
    "a path for a mapper": (lambda: transfer_cache(KV, "my-mapper"), ArgumentError, "load_mapper"),
    "swapped": (lambda: transfer_cache(MAPPER, KV), ArgumentError, "The order is"),
    "swapped for a layer": (lambda: transfer_layer(KV, 0, MAPPER), ArgumentError, "The order is"),
    "no mapper": (lambda: iter_transfer(KV, None), ArgumentError, "a NoneType"),
    "NumPy": (lambda: transfer_cache(NUMPY, MAPPER), ArgumentError, "ndarray. Make one with mx"),
    "NumPy for a layer": (lambda: transfer_layer(MAPPER, 0, NUMPY), ArgumentError, "ndarray"),
    "NumPy in pairs": (lambda: apply(MAPPER, list(NUMPY.values())), ArgumentError, "ndarray"),
    "caches for pairs": (lambda: apply(MAPPER, mlx_lm_caches()), GeometryError, "no pair"),
    "a dict for pairs": (lambda: apply(MAPPER, KV), ArgumentError, "list of .keys, values."),
    "a path in apply": (lambda: apply("my-mapper", PAIRS), ArgumentError, "load_mapper"),
    "half an offset": (lambda: apply(MAPPER, PAIRS, 1.5), ArgumentError, "not 1.5"),
    "text for positions": (lambda: transfer_cache(KV, MAPPER, "01234"), ArgumentError, "whole"),
    "one position": (lambda: transfer_cache(KV, MAPPER, 3), ArgumentError, "whole numbers"),
    "a dtype's name": (lambda: transfer_cache(KV, MAPPER, dtype="float16"), ArgumentError,
                       "mx.float16"),
    "a dtype of integers": (lambda: transfer_cache(KV, MAPPER, dtype=mx.int8), ArgumentError,
                            "int8"),
    "required without available": (lambda: iter_transfer(KV, MAPPER, required={}), ArgumentError,
                                   "available"),
    "available with positions": (lambda: iter_transfer(KV, MAPPER, [0, 1, 2, 3, 4],
                                                  available={i: TokenRanges.all(5) for i in KV}),
                            ArgumentError, "neither with positions"),
    "a layer without available": (lambda: iter_transfer(KV, MAPPER,
                                                        available={0: TokenRanges.all(5)}),
                             ArgumentError, r"source layers \[1, 2, 3\]"),
    "available of another length": (lambda: iter_transfer(
                                   KV, MAPPER, available={i: TokenRanges.all(6) for i in KV}),
                               GeometryError, "have shape"),
    "a path for map_cache": (lambda: map_cache(mlx_lm_caches(), "my-mapper", None),
                               ArgumentError, "load_mapper"),
    "map_cache, swapped": (lambda: map_cache(MAPPER, mlx_lm_caches(), None), ArgumentError,
                             "not a list"),
    "a path for check_pair": (lambda: check_pair("my-mapper"), ArgumentError, "load_mapper"),
    "a number for a path": (lambda: load_mapper(3), ArgumentError, "not by a int"),
    "bytes for a path": (lambda: load_mapper(b"m"), ArgumentError, "not by a bytes"),
    "a mapper for a path": (lambda: load_mapper(MAPPER), ArgumentError, "open already"),
    "nothing in common": (lambda: iter_transfer(KV, MAPPER, available={
        i: TokenRanges.of([(10 * i, 10 * i + 5)]) for i in KV}), CacheError, "no tokens in common"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_arguments_of_another_kind_are_named_before_any_work(case: str, monkeypatch: Any) -> None:
    call, error, message = CASES[case]

    def work(*args: Any, **kwargs: Any) -> None:
        pytest.fail("mapped")

    monkeypatch.setattr("kvgraft.mapper.transfer.map_layer", work)
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, KvgraftError)
    if error is ArgumentError:
        assert isinstance(caught.value, TypeError)


def test_numpy_integers_are_numbers() -> None:
    want = apply(MAPPER, PAIRS, 7)
    got = apply(MAPPER, PAIRS, np.int64(7))
    assert all(mx.array_equal(a[0], b[0]) for a, b in zip(got, want, strict=True))


def test_layers_may_hold_different_tokens() -> None:
    # Source layers 1 and 3 have lost the beginning; each target layer is made
    # for what both of its sources have.
    available = {
        0: TokenRanges.all(5),
        1: TokenRanges.last(5, 3),
        2: TokenRanges.all(5),
        3: TokenRanges.last(5, 3, 1),
    }
    cut = {
        i: tuple(TokenRanges.all(5).take(available[i], x) for x in pair) for i, pair in KV.items()
    }
    whole = transfer_cache(KV, MAPPER)
    for t, keys, values in iter_transfer(cut, MAPPER, available=available):
        sources = MAPPER.layer(t).keys.sources
        part = available[sources[0]] & available[sources[1]]
        assert keys.shape[-2] == len(part) < 5
        for got, want in zip((keys, values), whole[t], strict=True):
            assert mx.allclose(got, TokenRanges.all(5).take(part, want), atol=1e-6)
    # Fewer, on request.
    required = {t: TokenRanges.last(5, 2) for t in range(3)}
    for t, keys, _ in iter_transfer(cut, MAPPER, available=available, required=required):
        assert mx.allclose(keys, whole[t][0][:, -2:], atol=1e-6)
    with pytest.raises(CacheError, match="Target layer 0 is made for tokens 0…4"):
        iter_transfer(cut, MAPPER, available=available, required={0: TokenRanges.all(5)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_are_looked_at_where_they_are_evaluated(bad: float, tmp_path: Any) -> None:
    spoilt = dict(KV)
    k = mx.array(KV[2][0])
    k[0, 1, 2] = bad
    spoilt[2] = (k, KV[2][1])
    found = "Source layer 2 of the cache: NaN or infinite"
    MAPPER.save(tmp_path / "m")
    from_file = Mapper.load(tmp_path / "m")
    with pytest.raises(CacheError, match=found):
        transfer_cache(spoilt, from_file)
    with pytest.raises(CacheError, match=found):
        apply(from_file, list(spoilt.values()))
    with pytest.raises(CacheError, match=found):
        transfer_cache(spoilt, MAPPER, check_finite=True)
    # Lazy: nothing is looked at.
    transfer_cache(spoilt, from_file, unload_after=False)
    transfer_cache(spoilt, from_file, check_finite=False)
    mapped = transfer_cache(spoilt, MAPPER)
    assert not mx.isfinite(mapped[1][0]).all()  # of source layers 1 and 2
    assert mx.isfinite(mapped[2][0][:, 0]).all()
    layers = iter_transfer(spoilt, MAPPER, check_finite=True)
    assert next(layers)[0] == 0  # of layers 0 and 1: nothing wrong yet
    with pytest.raises(CacheError, match="Source layer 2 of the cache: NaN or infinite"):
        next(layers)


def test_large_values_are_not_infinite() -> None:
    large = {i: (mx.full(k.shape, 3e38), v) for i, (k, v) in KV.items()}  # the sum overflows
    transfer_cache(large, MAPPER, check_finite=True)
    half = {i: (mx.full(k.shape, 6e4, mx.float16), v) for i, (k, v) in KV.items()}
    transfer_cache(half, MAPPER, check_finite=True)


def test_half_precision_hides_an_infinite_source() -> None:
    # Documented: the reason why a hand-off looks at the source.
    spoilt = {i: (mx.full(k.shape, float("inf")), v) for i, (k, v) in KV.items()}
    keys, _ = transfer_layer(MAPPER, 0, spoilt, dtype=mx.float16)
    assert not mx.isinf(keys).any()


def test_a_snapshot_is_a_source() -> None:
    kv = read_cache(mlx_lm_caches()).source_kv()
    want = transfer_cache(KV, MAPPER)
    for t, (k, v) in transfer_cache(kv, MAPPER).items():
        assert mx.allclose(k[0], want[t][0], atol=1e-6)
        assert mx.allclose(v[0], want[t][1], atol=1e-6)
    assert sorted(kv) == [0, 1, 2, 3] and len(kv) == 4
    list(iter_transfer(kv, MAPPER, consume=True))
    assert len(kv) == 0
