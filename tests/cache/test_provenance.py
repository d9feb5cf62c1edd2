"""Which tokens of a cache were mapped, and how often."""

from __future__ import annotations

import copy

import mlx.core as mx
import zoo
from identity import identity_mapper

from kvgraft.cache import (
    MappedRange,
    Provenance,
    build_cache,
    is_mapped,
    mapped_ranges,
    provenance_of,
    read_cache,
    trim,
)
from kvgraft.cache.map import map_cache
from kvgraft.models.forward import extend_cache, prefill
from kvgraft.models.probe import read_geometry

PROMPT = list(range(3, 23))


def test_rows_mapped_again_count_twice_and_the_others_once() -> None:
    first = Provenance(start=2, n_tokens=6)
    second = Provenance(start=4, n_tokens=10, before=first)
    assert first.ranges == (MappedRange(2, 8, 1),)
    assert second.ranges == (MappedRange(4, 8, 2), MappedRange(8, 14, 1))
    third = Provenance(start=0, n_tokens=14, before=second)
    assert third.ranges == (MappedRange(0, 4, 1), MappedRange(4, 8, 3), MappedRange(8, 14, 2))


def test_a_native_start_may_hold_rows_mapped_earlier() -> None:
    mark = Provenance(start=12, n_tokens=3, native_start=Provenance(start=4, n_tokens=6))
    assert mark.ranges == (MappedRange(4, 10, 1), MappedRange(12, 15, 1))
    joined = Provenance(start=8, n_tokens=3, native_start=Provenance(start=4, n_tokens=6))
    assert joined.ranges == (MappedRange(4, 11, 1),)  # only what comes before ``start``
    assert Provenance.from_json(mark.to_json()) == mark


def test_the_mark_of_the_first_tokens() -> None:
    mark = Provenance(start=12, n_tokens=3, native_start=Provenance(start=4, n_tokens=6))
    for n, want in (
        (14, (MappedRange(4, 10, 1), MappedRange(12, 14, 1))),
        (12, (MappedRange(4, 10, 1),)),
        (5, (MappedRange(4, 5, 1),)),
    ):
        found = mark.first(n)
        assert found is not None and found.ranges == want
    assert mark.first(4) is None


def test_what_is_written_after_a_cut_is_native() -> None:
    model = zoo.make("qwen3")
    start = prefill(model, PROMPT[:4])
    cache = map_cache(prefill(model, PROMPT[:-1]), identity_mapper(model), model, start_cache=start)
    assert mapped_ranges(cache) == (MappedRange(4, 19, 1),)
    assert trim(cache, 10)
    extend_cache(model, PROMPT[10:], cache)
    assert mapped_ranges(cache) == (MappedRange(4, 10, 1),)
    assert trim(cache, 4)
    assert not is_mapped(cache) and provenance_of(cache) is None


def test_a_mapped_start_of_the_targets_own_is_remembered() -> None:
    model = zoo.make("qwen3")
    mapper, source = identity_mapper(model), prefill(model, PROMPT)
    start = map_cache(source, mapper, model, n_tokens=6)
    extend_cache(model, PROMPT[6:9], start)
    cache = map_cache(source, mapper, model, start_cache=start)
    assert mapped_ranges(cache) == (MappedRange(0, 6, 1), MappedRange(9, 20, 1))
    again = map_cache(cache, mapper, model, n_tokens=12)
    want = (MappedRange(0, 6, 2), MappedRange(6, 9, 1), MappedRange(9, 12, 2))
    assert mapped_ranges(again) == want


def test_mapped_caches_carry_their_mark() -> None:
    mark = Provenance("big", "small", "mapper-dir", 4)
    model = zoo.make("qwen3")
    geometry = read_geometry(model)
    native = prefill(model, PROMPT[:4])
    assert provenance_of(native) is None and not is_mapped(native)
    mapped = build_cache(geometry, read_cache(native).layers, provenance=mark)
    assert provenance_of(mapped) == mark and is_mapped(mapped)
    mx.eval(model(mx.array([[5]]), cache=mapped))  # generation continues
    assert is_mapped(copy.deepcopy(mapped))  # as mlx-lm's server stores it
    assert not is_mapped(build_cache(geometry, read_cache(native).layers))
