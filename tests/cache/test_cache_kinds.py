"""Each class of mlx-lm cache, read, built and mapped, on every mlx-lm that is supported."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from small_caches import numbers

from kvgraft.cache import SizeLimit, build_cache, is_mapped, read_cache
from kvgraft.cache.map import map_cache
from kvgraft.cache.required_ranges import required_ranges
from kvgraft.errors import CacheError, GeometryError, UnsupportedCacheError
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import RopeSpec
from kvgraft.models.token_ranges import TokenRanges

H, D = 2, 32
WINDOW = zoo.WINDOW


def tokens(n: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.randint(0, zoo.VOCAB, (batch, n), key=mx.random.key(1000 + seed))


def fill(model: Any, cache: list[Any], lengths: list[int], seed: int = 0) -> list[Any]:
    """Let a model read text in calls of the given lengths."""
    ids = tokens(sum(lengths), seed)
    done = 0
    for n in lengths:
        mx.eval(model(ids[:, done : done + n], cache=cache))
        done += n
    return cache


def geometry(layers: int = 1, *, window: int | None = None, dim: int = D) -> ModelGeometry:
    layer = LayerGeometry(H, dim, dim, RopeSpec(dim, base=1e4), window)
    return ModelGeometry((layer,) * layers, "float32", "toy")


def numbered(start: int, stop: int, dim: int = D) -> mx.array:
    """Rows that say at which position they are."""
    rows = mx.arange(start, stop, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(rows, (1, H, stop - start, dim))


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), atol=2e-4).item())


# ------------------------------------------------------------------- quantised


@pytest.mark.parametrize("n", [1, 255, 256, 257])
@pytest.mark.parametrize(("group", "bits"), [(32, 4), (32, 8), (64, 6), (64, 5), (128, 3)])
def test_quantised_caches_are_dequantised(n: int, group: int, bits: int) -> None:
    plain = KVCache()
    k = mx.random.normal((1, H, n, 128)).astype(mx.bfloat16)
    plain.update_and_fetch(k, -k)
    quantized = plain.to_quantized(group_size=group, bits=bits)
    assert quantized.keys[0].shape[2] >= n
    snapshot = read_cache([quantized], geometry(dim=128))
    want = mx.dequantize(*mx.quantize(k, group_size=group, bits=bits), group_size=group, bits=bits)
    assert snapshot.offset == n and snapshot.keys[0].dtype == mx.bfloat16
    assert mx.array_equal(snapshot.keys[0], want)
    assert snapshot.rows[0].keys.shape == (1, H, n, 128)


def test_a_quantised_cache_that_grew_by_itself_is_read() -> None:
    model = zoo.make("qwen3")  # heads of 32
    cache = fill(model, make_prompt_cache(model), [5])
    quantized = [entry.to_quantized(group_size=32, bits=8) for entry in cache]
    fill(model, quantized, [1, 260, 1])
    snapshot = read_cache(quantized, read_geometry(model))
    assert snapshot.offset == 267
    for entry, (k, v) in zip(quantized, snapshot.layers, strict=True):
        for packed, got in ((entry.keys, k), (entry.values, v)):
            want = mx.dequantize(*packed, group_size=32, bits=8)[:, :, :267]
            assert mx.array_equal(got, want)


def test_later_writes_to_a_quantised_source_do_not_show() -> None:
    plain = KVCache()
    plain.update_and_fetch(mx.ones((1, H, 3, D)), mx.ones((1, H, 3, D)))
    quantized = plain.to_quantized(group_size=32, bits=8)
    snapshot = read_cache([quantized])
    for part in quantized.keys:
        part[..., :3, :] = 0
    assert mx.allclose(snapshot.keys[0], mx.ones((1, H, 3, D)))


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_built_quantised_as_mlx_lm_does_it(bits: int) -> None:
    model = zoo.make("qwen3", mx.bfloat16)
    at = read_geometry(model)
    native = fill(model, make_prompt_cache(model), [9])
    built = build_cache(at, read_cache(native, at).layers, kv_bits=bits, kv_group_size=32)
    want = [entry.to_quantized(group_size=32, bits=bits) for entry in native]
    for mine, theirs in zip(built, want, strict=True):
        assert type(mine) is type(theirs) and mine.offset == theirs.offset == 9
        for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
            assert a.shape[2] == 9 and mx.array_equal(a, b[:, :, :9])
    for step, n in enumerate((1, 3, 1)):
        ids = tokens(n, seed=step)
        assert mx.array_equal(model(ids, cache=built), model(ids, cache=want))


@pytest.mark.parametrize(
    ("dim", "group", "bits", "message"),
    [
        (96, 64, 8, "head_dim of 96.*use 32"),
        (80, 64, 4, "leave out kv_bits"),
        (64, 48, 4, "use 32 or 64"),
        (64, 64, 7, "kv_bits is one of .*, not 7"),
    ],
)
def test_quantisation_that_does_not_fit_is_refused(
    dim: int, group: int, bits: int, message: str
) -> None:
    x = mx.ones((1, H, 3, dim))
    with pytest.raises(GeometryError, match=message):
        build_cache(geometry(dim=dim), [(x, x)], kv_bits=bits, kv_group_size=group)


def test_sliding_caches_are_not_quantised() -> None:
    x = mx.ones((1, H, 3, D))
    for at, size_limit in ((geometry(window=8), None), (geometry(), SizeLimit(8, 4))):
        with pytest.raises(GeometryError, match="sliding layers or with max_kv_size"):
            build_cache(at, [(x, x)], kv_bits=8, kv_group_size=32, size_limit=size_limit)


def test_packed_numbers_that_are_not_what_they_say_are_refused() -> None:
    plain = KVCache()
    plain.update_and_fetch(mx.ones((1, H, 3, 64)), mx.ones((1, H, 3, 64)))

    def quantized() -> Any:
        return plain.to_quantized(group_size=32, bits=8)

    wrong = quantized()
    wrong.bits = 4
    with pytest.raises(CacheError, match="are not 4-bit numbers in groups of 32"):
        read_cache([wrong])
    two = quantized()
    two.values = two.values[:2]
    with pytest.raises(UnsupportedCacheError, match="three arrays"):
        read_cache([two])
    mixed = quantized()
    mixed.values = plain.values
    with pytest.raises(CacheError, match="only one of keys and values"):
        read_cache([mixed])
    trimmed = quantized()
    trimmed.trim(-600)
    with pytest.raises(CacheError, match="have room for 256"):
        read_cache([trimmed])
    # Tuples inside a plain cache, as some forks do.
    plain.keys, plain.values = quantized().keys, quantized().values
    with pytest.raises(UnsupportedCacheError, match="doesn't say how they are packed"):
        read_cache([plain])


# ----------------------------------------------------------------------- rings


def lengths(n: int, how: str) -> list[int]:
    if how == "at once":
        return [n]
    if how == "one by one":
        return [1] * n
    rng = random.Random(n)
    parts = []
    while sum(parts) < n:
        parts.append(min(rng.choice([1, 1, 1, 2, 3, 5, 11]), n - sum(parts)))
    return parts


@pytest.mark.parametrize("how", ["at once", "one by one", "mixed"])
@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 12, 15, 16, 17, 24, 40, 300])
@pytest.mark.parametrize(("size", "keep"), [(8, 0), (8, 4), (12, 1), (280, 4)])
def test_a_ring_is_read_in_the_order_of_the_text(n: int, how: str, size: int, keep: int) -> None:
    ring, done = RotatingKVCache(max_size=size, keep=keep), 0
    for step in lengths(n, how):
        rows = numbered(done, done + step)
        ring.update_and_fetch(rows, -rows)
        done += step
    snapshot = read_cache([ring])
    held = snapshot.token_ranges[0]
    assert numbers(snapshot.keys[0]) == held.positions.tolist()
    assert numbers(-snapshot.values[0]) == held.positions.tolist()
    assert snapshot.offset == n and held.covers(TokenRanges.last(n, size, keep))
    if how == "at once":
        assert held == TokenRanges.all(n)


def test_a_ring_trimmed_before_it_was_full_is_read() -> None:
    ring = RotatingKVCache(max_size=16)
    ring.update_and_fetch(numbered(0, 10), numbered(0, 10))
    ring.trim(4)
    assert numbers(read_cache([ring]).keys[0]) == [0, 1, 2, 3, 4, 5]
    ring.update_and_fetch(numbered(6, 7), numbered(6, 7))
    assert numbers(read_cache([ring]).keys[0]) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "change",
    [
        {"_idx": -1},
        {"_idx": 0},
        {"_idx": 2},
        {"_idx": 99},
        {"offset": 3},
        {"_idx": 6, "offset": 18, "max_size": 16},
        {"keep": 8},
        {"keep": -1},
        {"_idx": 2.5},
    ],
    ids=str,
)
def test_rings_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    ring = RotatingKVCache(max_size=8, keep=2)
    for i in range(20):
        ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))
    assert numbers(read_cache([ring]).keys[0]) == [0, 1, 14, 15, 16, 17, 18, 19]
    for name, value in change.items():
        setattr(ring, name, value)
    with pytest.raises(CacheError):
        read_cache([ring])


# ------------------------------------------------------------ sliding layers

# Norms, sinks, layers without RoPE, fewer caches than layers, values narrower than keys …
SLIDING = [
    "llama sliding",
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "gpt_oss",
    "cohere2",
    "olmo3",
    "mimo_v2_flash",
]


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_models_continue_from_a_rebuilt_and_a_mapped_cache(name: str) -> None:
    model = zoo.make(name)
    at = read_geometry(model)
    mapper = identity_mapper(model)
    for read in ([3], [20], [9, 1, 1, 1, 5, 1]):
        native = fill(model, make_prompt_cache(model), read)
        snapshot = read_cache(native, at)
        assert snapshot.size_limit is None
        rebuilt = build_cache(at, snapshot.layers, token_ranges=snapshot.token_ranges)
        mapped = map_cache(native, mapper, model, target_geometry=at)
        assert is_mapped(mapped)
        for entry, layer in zip(mapped, at.layers, strict=True):
            room = sum(read) if layer.window is None else min(sum(read), layer.window)
            assert entry.offset == sum(read) and entry.keys.shape[2] == room
            assert type(entry) is (KVCache if layer.window is None else RotatingKVCache)
        for step, n in enumerate((1, 4, 1)):
            ids = tokens(n, seed=50 + step)
            want = model(ids, cache=native)
            assert close(model(ids, cache=rebuilt), want)
            assert close(model(ids, cache=mapped), want), (read, step)


def swap_mapper(at: ModelGeometry, feeds: dict[int, int]) -> Mapper:
    """Each target layer from one source layer of the same shape."""
    layers = []
    for t, s in feeds.items():
        g = at.layers[t]
        plan = [[h] for h in range(g.n_kv_heads)]
        eye = mx.broadcast_to(mx.eye(g.key_dim), (len(plan), g.key_dim, g.key_dim))
        part = LinearMap.of([s], eye, mx.zeros((len(plan), g.key_dim)), plan)
        layers.append(LayerMap(t, part, part))
    return Mapper(at, at, layers)


def test_a_full_layer_is_not_made_from_what_a_window_has_left() -> None:
    model = zoo.make("gemma3_text")
    at = read_geometry(model)
    full = next(i for i, layer in enumerate(at.layers) if layer.window is None)
    sliding = next(i for i, layer in enumerate(at.layers) if layer.window)
    feeds = {i: sliding if i == full else i for i in range(len(at.layers))}
    mapper = swap_mapper(at, feeds)
    # Fine as long as nothing has left the window …
    map_cache(fill(model, make_prompt_cache(model), [3, 4]), mapper, model, target_geometry=at)
    # … and named when it has.
    native = fill(model, make_prompt_cache(model), [9, 9])
    with pytest.raises(
        CacheError, match=f"Target layer {full} .* 0…17 .* source layer {sliding} holds only"
    ):
        map_cache(native, mapper, model, target_geometry=at)
    # The other way round a window is cut out of the whole text.
    other = swap_mapper(at, {i: full if i == sliding else i for i in range(len(at.layers))})
    mapped = map_cache(native, other, model, target_geometry=at)
    assert mapped[sliding].keys.shape[2] == WINDOW


def test_rings_must_be_those_of_the_model() -> None:
    model = zoo.make("gemma3_text")
    at = read_geometry(model)
    native = fill(model, make_prompt_cache(model), [5])
    sliding = next(i for i, layer in enumerate(at.layers) if layer.window)
    native[sliding].max_size += 1
    with pytest.raises(GeometryError, match=f"window of {WINDOW} tokens there: another model"):
        read_cache(native, at)


# ---------------------------------------------------------------- max_kv_size


@pytest.mark.parametrize("read", [[12], [16], [40], [10, 1, 1, 9], [5] + [1] * 30, [30, 1, 1]])
def test_limited_caches_keep_their_limit(read: list[int]) -> None:
    model = zoo.make("qwen3")
    at = read_geometry(model)
    native = fill(model, make_prompt_cache(model, max_kv_size=16), read)
    snapshot = read_cache(native, at)
    assert snapshot.size_limit == SizeLimit(16, 4)
    mapped = map_cache(native, identity_mapper(model), model, target_geometry=at)
    for entry in mapped:
        assert type(entry) is RotatingKVCache and (entry.max_size, entry.keep) == (16, 4)
        assert entry.offset == sum(read) and entry.keys.shape[2] == min(16, sum(read))
    for step, n in enumerate((1, 1, 6, 1, 1)):
        ids = tokens(n, seed=50 + step)
        assert close(model(ids, cache=mapped), model(ids, cache=native)), step


def test_a_limit_is_not_carried_to_sliding_models() -> None:
    ring = RotatingKVCache(max_size=8, keep=4)
    ring.update_and_fetch(numbered(0, 6), numbered(0, 6))
    whole = read_cache([ring], geometry())
    assert required_ranges(whole, geometry(window=4)).size_limit is None
    for i in range(6, 20):
        ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))
    with pytest.raises(GeometryError, match="limited to 8 tokens and has dropped some"):
        required_ranges(read_cache([ring], geometry()), geometry(window=4))


def test_limits_of_some_layers_only_are_refused() -> None:
    ring, plain = RotatingKVCache(max_size=8, keep=4), KVCache()
    for entry in (ring, plain):
        entry.update_and_fetch(numbered(0, 6), numbered(0, 6))
    with pytest.raises(CacheError, match="Some layers of this cache have a size limit"):
        read_cache([ring, plain], geometry(2))


# -------------------------------------------------------------------- batches


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_rows_of_a_batch_are_mapped_like_single_conversations(name: str) -> None:
    model = zoo.make(name)
    at = read_geometry(model)
    mapper = identity_mapper(model)
    singles = [fill(model, make_prompt_cache(model), [n], seed=n) for n in (5, 12, 30)]
    batch = [type(a).merge([a, b, c]) for a, b, c in zip(*singles, strict=True)]
    for extra in range(3):  # and the batch goes on together
        if extra:
            ids = mx.concatenate([tokens(1, seed=100 * extra + i) for i in range(3)])
            mx.eval(model(ids, cache=batch))
            for i, single in enumerate(singles):
                mx.eval(model(ids[i : i + 1], cache=single))
        for i, single in enumerate(singles):
            snapshot = read_cache(batch, at, row=i)
            assert snapshot.offset == (5, 12, 30)[i] + extra and snapshot.batch_size == 1
            mapped = map_cache(batch, mapper, model, target_geometry=at, row=i)
            want = map_cache(single, mapper, model, target_geometry=at)
            for got, expected in zip(mapped, want, strict=True):
                assert got.offset == expected.offset
                assert close(got.keys, expected.keys) and close(got.values, expected.values)


def test_left_padding_never_reaches_the_map() -> None:
    model = zoo.make("qwen3")
    at = read_geometry(model)
    a, b = tokens(3, seed=1), tokens(7, seed=2)
    padded = mx.concatenate([mx.concatenate([mx.full((1, 4), 9, dtype=a.dtype), a], 1), b])
    batch = [BatchKVCache([4, 0]) for _ in at.layers]
    mx.eval(model(padded, cache=batch))
    for i, ids in enumerate((a, b)):
        single = make_prompt_cache(model)
        mx.eval(model(ids, cache=single))
        got, want = read_cache(batch, at, row=i), read_cache(single, at)
        assert got.offset == want.offset == ids.shape[1]
        for x, y in zip(got.keys + got.values, want.keys + want.values, strict=True):
            assert close(x, y)


def test_rows_that_are_not_there_are_refused() -> None:
    rows = [KVCache(), KVCache()]
    for n, entry in zip((3, 7), rows, strict=True):
        entry.update_and_fetch(numbered(0, n), numbered(0, n))
    batch = KVCache.merge(rows)
    for row in (-1, 2):
        with pytest.raises(CacheError, match=f"Row {row} was asked for; layer 0 holds 2 rows"):
            read_cache([batch], row=row)
    with pytest.raises(CacheError, match="which is no batch"):
        read_cache(rows[:1], row=0)
    with pytest.raises(CacheError, match="empty"):
        read_cache([BatchKVCache([0, 0])], row=0)
    batch.trim(5)  # more than the shorter conversation has
    assert numbers(read_cache([batch], row=1).keys[0]) == [0, 1]
    with pytest.raises(CacheError, match="trimmed below its length"):
        read_cache([batch], row=0)


def test_a_batch_in_the_middle_of_a_prompt_is_refused() -> None:
    batch = BatchKVCache([0, 0])
    batch.prepare(lengths=[3, 2], right_padding=[0, 1])
    x = mx.ones((2, H, 3, D))
    batch.update_and_fetch(x, x)
    with pytest.raises(CacheError, match="finalize"):
        read_cache([batch], row=1)
    batch.finalize()
    assert read_cache([batch], row=1).offset == 2


def test_the_kept_tokens_of_a_limited_batch_are_not_guessed() -> None:
    rings = [RotatingKVCache(max_size=8, keep=4) for _ in range(2)]
    for ring in rings:
        for i in range(20):
            ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))
    batch = RotatingKVCache.merge(rings)
    with pytest.raises(UnsupportedCacheError, match="does not remember which first tokens"):
        read_cache([batch], geometry(), row=0)


# ------------------------------------------------------------------ CacheList


def test_lists_of_plain_caches_are_consecutive_layers() -> None:
    entries = [KVCache() for _ in range(4)]
    for i, entry in enumerate(entries):
        entry.update_and_fetch(numbered(i, i + 3), numbered(i, i + 3))
    nested = [CacheList(entries[0], entries[1]), CacheList(entries[2], entries[3])]
    snapshot = read_cache(nested, geometry(4))
    assert [numbers(k)[0] for k in snapshot.keys] == [0, 1, 2, 3]
    with pytest.raises(GeometryError, match="4 layers, toy has 2"):
        read_cache(nested, geometry(2))
    entries[3].trim(1)
    with pytest.raises(CacheError, match=r"layer 0.0 holds 3 tokens, layer 1.1 holds 2"):
        read_cache(nested)


def test_a_list_with_something_else_in_it_is_refused() -> None:
    plain = KVCache()
    plain.update_and_fetch(numbered(0, 3), numbered(0, 3))
    with pytest.raises(UnsupportedCacheError, match=r"Layer 1.1 uses ArraysCache.*recurrent"):
        read_cache([plain, CacheList(plain, ArraysCache(2))])


def test_classes_come_from_mlx_lm() -> None:
    class RotatingKVCache(mlx_lm_cache.RotatingKVCache):
        """A subclass may order its rows as it likes."""

    with pytest.raises(UnsupportedCacheError, match="Layer 0 uses RotatingKVCache"):
        read_cache([RotatingKVCache(max_size=8)])
