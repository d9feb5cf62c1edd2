"""Mapping a cache, and a prompt with native start and end, between live mlx-lm models."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    BatchKVCache,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from kvgraft.cache import is_mapped, n_tokens, provenance_of
from kvgraft.cache.map import PromptSplit, map_cache, map_prompt, split_prompt
from kvgraft.errors import CacheError, KvgraftError, NothingToMapError, PairMismatchError
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.transfer import transfer_cache
from kvgraft.models.forward import prefill
from kvgraft.models.probe import read_geometry

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3]


def make(name: str):
    mx.random.seed(1)
    return zoo.make(name)


@pytest.mark.parametrize("n", [1, 12, 255, 256, 257])
@pytest.mark.parametrize("name", ["qwen3", "llama llama3", "qwen2 yarn"])
def test_an_identity_map_changes_nothing(name, n):
    model = make(name)
    tokens = (TOKENS * 30)[:n]
    native = prefill(model, tokens)
    grafted = map_cache(native, identity_mapper(model), model)
    assert is_mapped(grafted) and not is_mapped(native)
    assert provenance_of(grafted).n_tokens == n
    # Not the room of the buffer (claude-code-local PR 47).
    assert all(entry.offset == n == entry.keys.shape[2] for entry in grafted)
    for following in ([1], [2, 3, 4], [5]):
        want = model(mx.array([following]), cache=native)
        got = model(mx.array([following]), cache=grafted)
        assert mx.allclose(got, want, atol=1e-4)


def test_the_source_cache_stays_as_it_was():
    model = make("qwen3")
    native = prefill(model, TOKENS)
    before = [mx.array(entry.keys[..., : entry.offset, :]) for entry in native]
    mx.eval(before)
    grafted = map_cache(native, identity_mapper(model), model)
    model(mx.array([[1, 2, 3]]), cache=grafted)
    for entry, keys in zip(native, before, strict=True):
        assert entry.offset == len(TOKENS)
        assert mx.array_equal(entry.keys[..., : entry.offset, :], keys)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_target_gets_the_dtype_it_writes(dtype):
    model = make("qwen3")
    mapper = identity_mapper(model)
    native = prefill(model, TOKENS)
    model.set_dtype(dtype)
    grafted = map_cache(native, mapper, model)
    assert all(entry.keys.dtype == dtype == entry.values.dtype for entry in grafted)


def test_a_foreign_target_is_refused_before_any_work():
    mapper = identity_mapper(make("qwen3"))
    source = make("qwen3")
    with pytest.raises(PairMismatchError):
        map_cache(prefill(source, TOKENS), mapper, make("llama linear"))


def test_an_empty_cache_is_refused():
    model = make("qwen3")
    with pytest.raises(CacheError, match="empty"):
        map_cache(make_prompt_cache(model), identity_mapper(model), model)


def test_nan_never_reaches_the_target():
    model = make("qwen3")
    native = prefill(model, TOKENS)
    native[0].keys[..., 0, 0] = float("nan")
    with pytest.raises(KvgraftError, match="NaN"):
        map_cache(native, identity_mapper(model), model)


# ------------------------------------------------------------------------- map_prompt


def test_the_native_end_counts_the_token_that_generation_continues_from():
    split = split_prompt(12, 0, 1)
    assert split == PromptSplit(12, 0, 12) and (split.mapped, split.native_end) == (12, 1)
    split = split_prompt(12, 3, 4)
    assert (split.native_start, split.stop, split.mapped, split.native_end) == (3, 9, 6, 4)
    # What the source has not read is not mapped.
    split = split_prompt(12, 3, 1, available=7)
    assert (split.mapped, split.native_end) == (4, 6)
    assert split_prompt(12, 3, 4, available=11).stop == 9


@pytest.mark.parametrize(
    ("n", "start", "end", "available"),
    [(0, 0, 1, None), (12, 12, 1, None), (12, 0, 13, None), (12, 6, 7, None), (12, 4, 1, 4)],
)
def test_nothing_left_to_map_is_an_error_of_its_own(n, start, end, available):
    with pytest.raises(NothingToMapError, match="nothing is left to map"):
        split_prompt(n, start, end, available=available)


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (0, 0)])
def test_native_ends_out_of_range_are_refused(start, end):
    with pytest.raises(CacheError, match="native_"):
        split_prompt(12, start, end)


def rows(cache):
    return [entry.keys[..., : entry.offset, :] for entry in cache]


@pytest.mark.parametrize(("start", "end"), [(0, 1), (4, 1), (0, 5), (3, 6)])
def test_a_prompt_is_native_mapped_native(start, end):
    source, target = make("qwen3"), zoo.make("qwen3", seed=2)
    n = len(TOKENS) - 1
    cache = prefill(source, TOKENS[:n])
    mapper = identity_mapper(source)
    got = map_prompt(cache, mapper, target, TOKENS, n_tokens=n, native_start=start, native_end=end)
    assert (got.native_start, got.mapped, got.native_end) == (start, n + 1 - start - end, end)
    parts = {"native_start": start > 0, "map": True, "native_end": end > 1}
    assert set(got.seconds) == {name for name, taken in parts.items() if taken}
    own = prefill(target, TOKENS[:start]) if start else None
    want = map_cache(cache, mapper, target, n_tokens=n + 1 - end, start_cache=own)
    if end > 1:
        target(mx.array([TOKENS[n + 1 - end : n]]), cache=want)
    assert n_tokens(got.cache) == n
    for a, b in zip(rows(got.cache), rows(want), strict=True):
        assert mx.array_equal(a, b)


def test_what_the_target_has_is_neither_read_nor_mapped():
    source, target = make("qwen3"), zoo.make("qwen3", seed=2)
    own = prefill(target, TOKENS[:5])
    read = []
    got = map_prompt(
        prefill(source, TOKENS), identity_mapper(source), target, TOKENS, native_start=7,
        native_end=1, start_cache=own, step=1, on_start_step=read.append,
    )  # fmt: skip
    assert (got.reused, got.native_start, got.mapped) == (5, 7, len(TOKENS) - 7)
    assert read == [1, 2] and own == []  # used up
    native = prefill(target, TOKENS[:7])
    for a, b in zip(rows(got.cache), rows(native), strict=True):
        assert mx.allclose(a[..., :7, :], b, atol=1e-5)
    # The start cache is the least that is native.
    again = prefill(target, TOKENS[:5])
    got = map_prompt(
        prefill(source, TOKENS), identity_mapper(source), target, native_start=0, native_end=1,
        start_cache=again,
    )  # fmt: skip
    assert (got.reused, got.native_start) == (5, 5)
    # A refusal leaves it as it was.
    again = prefill(target, TOKENS)
    with pytest.raises(NothingToMapError):
        map_prompt(
            prefill(source, TOKENS), identity_mapper(source), target, native_start=0,
            native_end=1, start_cache=again,
        )  # fmt: skip
    assert n_tokens(again) == len(TOKENS)


def test_native_ends_default_to_what_the_evaluation_recommends():
    model = make("qwen3")
    mapper = identity_mapper(model)
    mapper.quality = Quality(native_start=2, native_end=4)
    got = map_prompt(prefill(model, TOKENS), mapper, model, TOKENS)
    assert (got.native_start, got.native_end) == (2, 4)
    with pytest.raises(CacheError, match="none were given"):
        map_prompt(prefill(model, TOKENS), mapper, model)
    with pytest.raises(CacheError, match="3 were given"):
        map_prompt(prefill(model, TOKENS), mapper, model, TOKENS[:3])


# ------------------------------------------------- reports of bugs in other programs


# mlx-lm 80, mlx-engine 372, VeloxQuant PR 92: empty caches, unknown classes, either file.
# The files themselves: tests/cache/test_prompt_files.py.
def test_what_cannot_be_read_is_refused_before_any_work(monkeypatch: Any) -> None:
    model = zoo.make("qwen3")
    mapper = identity_mapper(model)
    geometry = read_geometry(model)

    class FromTheFuture:
        keys = values = None
        offset = 0

    def work(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("mapped")

    monkeypatch.setattr("kvgraft.mapper.transfer.map_layer", work)
    n = len(geometry.layers)
    trimmed = prefill(model, TOKENS)
    trim_prompt_cache(trimmed, len(TOKENS))
    for cache in (
        make_prompt_cache(model),
        trimmed,
        [],
        [FromTheFuture() for _ in range(n)],
        [ChunkedKVCache(8) for _ in range(n)],
        [mlx_lm_cache.ArraysCache(2) for _ in range(n)],
        [None] * n,
    ):
        with pytest.raises(KvgraftError):
            map_cache(cache, mapper, model, target_geometry=geometry)


# mlx-lm 439, 1906: padding of shorter rows read as tokens.
def test_rows_of_different_lengths_map_like_single_conversations() -> None:
    model = zoo.make("qwen3")
    geometry = read_geometry(model)
    mapper = identity_mapper(model)
    lengths = (2, 9, 13)
    longest = max(lengths)
    padded = [[77] * (longest - n) + TOKENS[:n] for n in lengths]
    batch = [BatchKVCache([longest - n for n in lengths]) for _ in geometry.layers]
    mx.eval(model(mx.array(padded), cache=batch))
    for i, n in enumerate(lengths):
        alone = map_cache(prefill(model, TOKENS[:n]), mapper, model)
        row = map_cache(batch, mapper, model, row=i)
        for a, b in zip(row, alone, strict=True):
            assert a.offset == b.offset == n and a.keys.shape[2] == n
            assert mx.allclose(a.keys, b.keys, atol=1e-4)
            assert mx.allclose(a.values, b.values, atol=1e-4)


# mlx-lm PR 1100, mlx-engine 310: tuples where arrays are expected.
def test_quantised_rows_are_told_by_their_form_and_dequantised() -> None:
    model = zoo.make("qwen3")
    mapper = identity_mapper(model)
    native = prefill(model, TOKENS)
    quantised = [entry.to_quantized(group_size=32, bits=8) for entry in native]
    assert all(isinstance(entry.keys, (tuple, list)) for entry in quantised)
    mapped = map_cache(quantised, mapper, model)
    for entry, kept in zip(mapped, native, strict=True):
        assert type(entry) is KVCache and entry.offset == len(TOKENS)
        assert mx.allclose(entry.keys, kept.keys[..., : len(TOKENS), :], atol=0.1)
    # Lists as some programs make them, and as files give them back.
    for entry in quantised:
        entry.keys, entry.values = list(entry.keys), list(entry.values)
    again = map_cache(quantised, mapper, model)
    assert all(mx.array_equal(a.keys, b.keys) for a, b in zip(again, mapped, strict=True))
    # The same where a mapper expects arrays is refused with a word about it.
    pairs = {i: (entry.keys, entry.values) for i, entry in enumerate(quantised)}
    with pytest.raises(TypeError, match="must be an MLX array, not a list"):
        transfer_cache(pairs, mapper)


def test_a_mapped_cache_works_in_another_thread() -> None:
    model = zoo.make("qwen3")
    mapped = map_cache(prefill(model, TOKENS), identity_mapper(model), model)
    seen: list[Any] = []

    def use() -> None:
        try:
            seen.append([float(mx.abs(entry.keys).sum().item()) for entry in mapped])
            seen.append(model(mx.array([[5]]), cache=mapped).tolist())
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(seen) == 2 and not isinstance(seen[1], Exception), seen


def test_a_token_is_left_to_read() -> None:
    # An exact hit in mlx-lm's store leaves no token, and generation fails on
    # none; so all but the last one are handed over.
    model = zoo.make("qwen3")
    native = prefill(model, TOKENS)
    store = LRUPromptCache()
    store.insert_cache("m", TOKENS, native)
    _, rest = store.fetch_nearest_cache("m", TOKENS)
    assert rest == []
    mapped = map_cache(native, identity_mapper(model), model, n_tokens=len(TOKENS) - 1)
    assert mapped[0].offset == len(TOKENS) - 1
    want = [t for t, _ in generate_step(mx.array(TOKENS), model, max_tokens=5)]
    last = mx.array(TOKENS[-1:])
    got = [t for t, _ in generate_step(last, model, max_tokens=5, prompt_cache=mapped)]
    assert got == want
