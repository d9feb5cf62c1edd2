"""Reading and building mlx-lm's cache objects, on every mlx-lm that is supported."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import zoo
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from kvgraft.cache import Provenance, build_cache, is_mapped, provenance_of, read_cache
from kvgraft.errors import CacheError, GeometryError, UnsupportedCacheError
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import RopeSpec

H, D = 2, 8
PLAIN = ModelGeometry((LayerGeometry(H, D, D, RopeSpec(D, base=1e4)),) * 3, "float32", "toy")


def filled(
    n: int, *, batch: int = 1, layers: int = 3, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> list[KVCache]:
    """A native cache of random tokens, padded as mlx-lm pads it."""
    caches = []
    for layer in range(layers):
        entry = KVCache()
        key = mx.random.key(seed + layer)
        k = mx.random.normal((batch, H, n, D), key=key).astype(dtype)
        entry.update_and_fetch(k, -k)
        caches.append(entry)
    return caches


def arrays(n: int, *, layers: int = 3, **kwargs: Any) -> list[tuple[mx.array, mx.array]]:
    return read_cache(filled(n, layers=layers, **kwargs)).layers


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
    # Buffers grow in steps of 256 rows of zeros.
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
    offset += 1  # mlx-lm changes such arrays in place
    assert snapshot.offset == 5 and isinstance(snapshot.offset, int)
    assert snapshot.keys[0].shape[2] == 5


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


def test_the_list_of_other_classes_is_not_empty() -> None:
    names = {cls.__name__ for cls in other_cache_classes()}
    assert names >= {
        "ChunkedKVCache",
        "ArraysCache",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "ConcatenateKVCache",
    }


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
    caches = filled(6)
    caches[2].trim(1)
    with pytest.raises(CacheError, match="layer 0 holds 6 tokens, layer 2 holds 5"):
        read_cache(caches)


def test_offsets_beyond_the_buffer_are_refused() -> None:
    built = build_cache(PLAIN, arrays(5))
    for entry in built:
        entry.trim(-5)  # mlx-lm lets a negative trim raise the offset
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


# -------------------------------------------------------------------- building


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


# ------------------------------------------------------------------ provenance


def test_mapped_caches_carry_their_mark(models: dict) -> None:
    mark = Provenance("big", "small", "mapper-dir", 4)
    model, geometry = models["qwen3"]
    native = prefill(model, tokens(4))
    assert provenance_of(native) is None and not is_mapped(native)
    mapped = build_cache(geometry, read_cache(native).layers, provenance=mark)
    assert provenance_of(mapped) == mark and is_mapped(mapped)
    mx.eval(model(tokens(1), cache=mapped))  # generation goes on
    assert is_mapped(copy.deepcopy(mapped))  # as mlx-lm's server stores it
    assert not is_mapped(build_cache(geometry, read_cache(native).layers))
