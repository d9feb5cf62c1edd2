"""Reading mlx-lm's cache objects, on every mlx-lm that is supported."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from small_caches import DIM as D
from small_caches import HEADS as H
from small_caches import arrays, filled, numbered

from kvgraft.cache import build_cache, read_cache
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, GeometryError, UnsupportedCacheError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import RopeSpec

PLAIN = ModelGeometry((LayerGeometry(H, D, D, RopeSpec(D, base=1e4)),) * 3, "float32", "toy")
ONE_LAYER = ModelGeometry(PLAIN.layers[:1], "float32", "toy")


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[nn.Module, ModelGeometry]]:
    made = {}
    for name, dtype in (
        ("qwen3", mx.float32),
        ("llama", mx.float32),
        ("phi3 longrope 0.75", mx.float32),
        ("smollm3", mx.float32),
        ("stablelm", mx.float32),
        ("qwen2", mx.bfloat16),
        ("olmo2", mx.float16),
    ):
        model = zoo.make(name, dtype)
        made[name] = (model, read_geometry(model))
    return made


def tokens(n: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.randint(0, zoo.VOCAB, (batch, n), key=mx.random.key(1000 + seed))


def prefill(model: nn.Module, ids: mx.array) -> list[KVCache]:
    caches = make_prompt_cache(model)
    mx.eval(model(ids, cache=caches))
    return caches


# ---------------------------------------------------------------- continuation


@pytest.mark.parametrize("n", [1, 2, 3, 7, 255, 256, 257, 300])
@pytest.mark.parametrize(
    "name", ["qwen3", "llama", "phi3 longrope 0.75", "smollm3", "stablelm", "qwen2", "olmo2"]
)
def test_rebuilt_cache_continues_bit_for_bit(models: dict, name: str, n: int) -> None:
    model, geometry = models[name]
    native = prefill(model, tokens(n))
    rebuilt = build_cache(geometry, read_cache(native, geometry).layers)
    for step, length in enumerate((1, 1, 5, 1, 2)):
        ids = tokens(length, seed=step)
        want, got = model(ids, cache=native), model(ids, cache=rebuilt)
        assert mx.array_equal(want, got), (step, length)
    for mine, theirs in zip(rebuilt, native, strict=True):
        assert mine.offset == theirs.offset == n + 10
        assert mine.keys.dtype == theirs.keys.dtype == geometry.mx_dtype
        assert mx.array_equal(mine.keys[..., : n + 10, :], theirs.keys[..., : n + 10, :])


def test_a_batch_continues_bit_for_bit(models: dict) -> None:
    model, geometry = models["qwen3"]
    native = prefill(model, tokens(9, batch=3))
    snapshot = read_cache(native, geometry)
    assert snapshot.batch_size == 3
    rebuilt = build_cache(geometry, snapshot.layers)
    ids = tokens(2, seed=5, batch=3)
    assert mx.array_equal(model(ids, cache=native), model(ids, cache=rebuilt))


def test_generate_step_takes_a_built_cache(models: dict) -> None:
    model, geometry = models["qwen3"]
    ids = tokens(12)[0]
    want = [t for t, _ in generate_step(ids, model, max_tokens=6)]
    rebuilt = build_cache(model, read_cache(prefill(model, ids[None, :-1]), geometry).layers)
    got = [t for t, _ in generate_step(ids[-1:], model, max_tokens=6, prompt_cache=rebuilt)]
    assert got == want


# --------------------------------------------------------------------- reading


@pytest.mark.parametrize("n", [1, 2, 5, 255, 256, 257, 300])
def test_length_comes_from_the_offset(n: int) -> None:
    # Buffers grow in steps of 256 rows of zeros (claude-code-local PR 47).
    caches = filled(n)
    assert caches[0].keys.shape[2] % 256 == 0
    snapshot = read_cache(caches, PLAIN)
    assert snapshot.offset == n
    assert snapshot.positions.tolist() == list(range(n))
    for k, v in snapshot.layers:
        assert k.shape == v.shape == (1, H, n, D)
        assert mx.abs(k).min(axis=(0, 1, 3)).tolist().count(0.0) == 0
    assert mx.array_equal(snapshot.keys[1], caches[1].keys[..., :n, :])
    assert mx.array_equal(snapshot.values[1], caches[1].values[..., :n, :])


@pytest.mark.parametrize("n", [5, 256])
def test_later_writes_to_the_source_do_not_show(n: int) -> None:
    caches = filled(n)
    snapshot = read_cache(caches)
    mx.eval(snapshot.keys, snapshot.values)
    before = [mx.array(x) for x in snapshot.keys + snapshot.values]
    for entry in caches:
        entry.keys[..., :1, :] = 77.0
        entry.values[..., :1, :] = 77.0
        entry.update_and_fetch(mx.ones((1, H, 1, D)), mx.ones((1, H, 1, D)))
    for got, want in zip(snapshot.keys + snapshot.values, before, strict=True):
        assert mx.array_equal(got, want)


def test_reading_leaves_the_source_alone() -> None:
    caches = filled(5)
    held = [(entry.keys, entry.values, entry.offset) for entry in caches]
    build_cache(PLAIN, read_cache(caches, PLAIN).layers)
    for entry, (keys, values, offset) in zip(caches, held, strict=True):
        assert entry.keys is keys and entry.values is values and entry.offset == offset


def test_trimmed_tokens_are_not_read() -> None:
    caches = filled(10)
    trim_prompt_cache(caches, 6)
    snapshot = read_cache(caches, PLAIN)
    assert snapshot.offset == 4 and snapshot.keys[0].shape[2] == 4
    built = build_cache(PLAIN, snapshot.layers)
    assert built[0].keys.shape[2] == 4  # nor kept behind the offset


def test_array_offsets_are_copied() -> None:
    caches = filled(5)
    offset = mx.array(5)
    for entry in caches:
        entry.offset = offset
    snapshot = read_cache(caches)
    offset += 1  # mlx-lm changes such arrays in place (1097, 1699)
    assert snapshot.offset == 5 and isinstance(snapshot.offset, int)
    assert snapshot.positions.tolist() == [0, 1, 2, 3, 4]
    assert snapshot.keys[0].shape[2] == 5
    rows = [KVCache(), KVCache()]
    for n, row in zip((2, 6), rows, strict=True):
        row.update_and_fetch(numbered(0, n), numbered(0, n))
    batch = KVCache.merge(rows)
    snapshot = read_cache([batch], row=0)
    batch.offset += 9
    assert snapshot.offset == 2


def test_rows_of_a_batch_cache_read_as_single_conversations() -> None:
    rows = [filled(3, seed=1), filled(7, seed=2)]
    merged = [KVCache.merge([a, b]) for a, b in zip(*rows, strict=True)]
    with pytest.raises(UnsupportedCacheError, match="extract"):
        read_cache(merged)
    for i, row in enumerate(rows):
        got = read_cache([entry.extract(i) for entry in merged], PLAIN)
        want = read_cache(row, PLAIN)
        assert got.offset == want.offset
        for a, b in zip(got.keys + got.values, want.keys + want.values, strict=True):
            assert mx.array_equal(a, b)


def test_half_precision_caches_are_read_as_they_are() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        assert read_cache(filled(3, dtype=dtype), PLAIN).keys[0].dtype == dtype


# -------------------------------------------------------------------- refusals


READ = {"KVCache", "QuantizedKVCache", "RotatingKVCache", "CacheList"}


def other_cache_classes() -> list[type]:
    """Every class of this mlx-lm that ends up in cache lists, but those that are read.

    Batch caches are among them: they are read row by row, on request.
    """
    return [
        cls
        for name, cls in inspect.getmembers(mlx_lm_cache, inspect.isclass)
        if name.endswith(("Cache", "CacheList"))
        and cls.__module__ == mlx_lm_cache.__name__
        and not name.startswith(("_", "LRU"))
        and name not in READ
    ]


def instance(cls: type) -> Any:
    arguments = {
        "ChunkedKVCache": (8,),
        "ArraysCache": (2,),
        "BatchKVCache": ([0],),
        "BatchRotatingKVCache": (8, [0]),
    }
    return cls(*arguments.get(cls.__name__, ()))


@pytest.mark.parametrize("cls", other_cache_classes(), ids=lambda cls: cls.__name__)
def test_other_classes_are_refused_by_name(cls: type) -> None:
    caches = [*filled(3, layers=2), instance(cls)]
    with pytest.raises(UnsupportedCacheError, match=f"Layer 2 uses {cls.__name__}") as caught:
        read_cache(caches)
    assert isinstance(caught.value, TypeError)


def test_unknown_classes_are_refused() -> None:
    class MyKVCache(KVCache):
        """A subclass may lay its buffers out as it likes."""

    class NotFromMlxLm:
        keys = values = None
        offset = 0

    NotFromMlxLm.__name__ = "KVCache"
    for cls, name in ((MyKVCache, "MyKVCache"), (NotFromMlxLm, "KVCache"), (object, "object")):
        with pytest.raises(UnsupportedCacheError, match=f"Layer 0 uses {name}"):
            read_cache([cls()])


def test_empty_caches_are_refused() -> None:
    with pytest.raises(CacheError, match="no layers"):
        read_cache([])
    with pytest.raises(CacheError, match="Layer 0 of the cache is empty"):
        read_cache([KVCache(), KVCache()])
    trimmed = filled(4)
    trim_prompt_cache(trimmed, 4)
    with pytest.raises(CacheError, match="empty"):
        read_cache(trimmed)


def test_not_a_list_is_refused() -> None:
    with pytest.raises(CacheError, match="list of caches"):
        read_cache(filled(3)[0])  # type: ignore[arg-type]


def test_layers_that_disagree_are_named() -> None:
    # mlx-lm 1494, PR 1502.
    caches = filled(6)
    caches[2].trim(1)
    with pytest.raises(CacheError, match="layer 0 holds 6 tokens, layer 2 holds 5"):
        read_cache(caches)


def test_offsets_beyond_the_buffer_are_refused() -> None:
    built = build_cache(PLAIN, arrays(5))
    for entry in built:
        entry.trim(-5)  # mlx-lm lets a negative trim raise the offset (PR 1868)
    with pytest.raises(CacheError, match="holds 10 tokens, but its keys have room for 5"):
        read_cache(built)
    short_values = filled(5)
    short_values[0].values = short_values[0].values[..., :3, :]
    with pytest.raises(CacheError, match="values have room for 3"):
        read_cache(short_values)


@pytest.mark.parametrize("offset", [-1, 2.5, True, mx.array([3, 3])])
def test_senseless_offsets_are_refused(offset: Any) -> None:
    caches = filled(3)
    for entry in caches:
        entry.offset = offset
    with pytest.raises(CacheError):
        read_cache(caches)


def test_a_cache_of_another_model_is_refused() -> None:
    with pytest.raises(GeometryError, match="2 layers, toy has 3"):
        read_cache(filled(3, layers=2), PLAIN)
    wide = ModelGeometry((LayerGeometry(H, 16, D, RopeSpec(8, base=1e4)),) * 3, "float32", "wide")
    with pytest.raises(GeometryError, match="Layer 0 holds keys"):
        read_cache(filled(3), wide)
    mixed = filled(3)
    mixed[1] = filled(3, batch=2)[1]
    with pytest.raises(CacheError, match="Layer 1 holds a batch of 2"):
        read_cache(mixed)
    integers = filled(3)
    integers[1].keys = integers[1].keys.astype(mx.int32)
    with pytest.raises(CacheError, match="not floats"):
        read_cache(integers)
    flat = filled(3)
    flat[0].keys = flat[0].keys[0]
    with pytest.raises(CacheError, match="batch, heads, tokens"):
        read_cache(flat)


# ------------------------------------------------- reports of bugs in other programs


# mlx-lm PR 1512, 1776, mlx-swift-lm PR 584: trimming a ring that has wrapped.
def test_wrapped_rings_are_read_right_and_never_trimmed(monkeypatch: Any) -> None:
    ring = RotatingKVCache(max_size=8, keep=2)
    for i in range(21):
        ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))

    def forbidden(*args: Any) -> None:
        raise AssertionError("a ring was trimmed")

    monkeypatch.setattr(RotatingKVCache, "trim", forbidden)
    snapshot = read_cache([ring], ONE_LAYER)
    got = [int(x) for x in snapshot.keys[0][0, 0, :, 0].tolist()]
    assert got == snapshot.positions.tolist() == [0, 1, 15, 16, 17, 18, 19, 20]
    model = zoo.make("gemma3_text")
    map_cache(prefill(model, tokens(26)), identity_mapper(model), model)
    monkeypatch.undo()
    ring.trim(6)  # mlx-lm doesn't check
    assert ring._idx < 0 or ring._idx <= ring.keep
    with pytest.raises(CacheError, match="trimmed after it had dropped tokens"):
        read_cache([ring])


# mlx-lm PR 1673: valid tokens dropped because the buffer's shape was believed.
def test_valid_rows_come_from_the_counters() -> None:
    caches = filled(300)
    trim_prompt_cache(caches, 50)
    for entry in caches:
        entry.update_and_fetch(numbered(0, 1), numbered(0, 1))
    assert caches[0].keys.shape[2] == 512
    snapshot = read_cache(caches, PLAIN)
    assert snapshot.offset == 251
    assert mx.array_equal(snapshot.keys[0][..., 250:, :], numbered(0, 1))
    chunked = ChunkedKVCache(8)
    chunked.update_and_fetch(numbered(0, 12), numbered(0, 12))
    chunked.maybe_trim_front()
    with pytest.raises(UnsupportedCacheError, match="ChunkedKVCache.*drops the front"):
        read_cache([chunked])


def test_a_batch_trimmed_below_a_row() -> None:
    rows = [KVCache(), KVCache()]
    for n, entry in zip((2, 6), rows, strict=True):
        entry.update_and_fetch(numbered(0, n), numbered(0, n))
    batch = KVCache.merge(rows)
    batch.trim(4)
    assert min(batch.offset.tolist()) < 0
    with pytest.raises(CacheError, match="trimmed below its length"):
        read_cache([batch], row=0)


def test_a_merge_that_forgets_what_a_ring_keeps() -> None:
    ring = RotatingKVCache(max_size=8, keep=4)
    for i in range(20):
        ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))
    merged = RotatingKVCache.merge([ring])
    with pytest.raises(UnsupportedCacheError, match="does not remember"):
        read_cache([merged], ONE_LAYER, row=0)
