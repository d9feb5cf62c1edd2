"""A whole hand-off between live mlx-lm models."""

from __future__ import annotations

import mlx.core as mx
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import is_mapped, provenance_of
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, KvgraftError, PairMismatchError
from kvgraft.models.forward import prefill

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3]


def make(name: str):
    mx.random.seed(1)
    return zoo.make(name)


@pytest.mark.parametrize("n", [1, 12, 300])
@pytest.mark.parametrize("name", ["qwen3", "llama llama3", "qwen2 yarn"])
def test_an_identity_map_changes_nothing(name, n):
    model = make(name)
    tokens = (TOKENS * 30)[:n]
    native = prefill(model, tokens)
    grafted = map_cache(native, identity_mapper(model), model)
    assert is_mapped(grafted) and not is_mapped(native)
    assert provenance_of(grafted).n_tokens == n
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
