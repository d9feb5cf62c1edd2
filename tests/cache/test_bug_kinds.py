"""Kinds of bugs that others reported in code around MLX caches, one test each.

Each names the reports that it stands for. They are about other programs; the
tests say that kvgraft does not do the same.
"""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    BatchKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from kvgraft.cache import build_cache, read_cache
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, GeometryError, KvgraftError, UnsupportedCacheError
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import transfer_cache
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.fused import map_layer

H, D = 2, 16
ROPE = RopeSpec(D, base=1e4)
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3]


def plain(layers: int = 2, *, dim: int = D, dtype: str = "float32") -> ModelGeometry:
    layer = LayerGeometry(H, dim, dim, RopeSpec(dim, base=1e4))
    return ModelGeometry((layer,) * layers, dtype, "toy")


def filled(n: int, *, layers: int = 2, dim: int = D, cls: Any = KVCache) -> list[Any]:
    caches = []
    for layer in range(layers):
        entry = cls()
        k = mx.random.normal((1, H, n, dim), key=mx.random.key(layer))
        entry.update_and_fetch(k, -k)
        caches.append(entry)
    return caches


def numbered(start: int, stop: int) -> mx.array:
    rows = mx.arange(start, stop, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(rows, (1, H, stop - start, D))


def random_mapper(seed: int = 0, *, scale: float = 1.0) -> Mapper:
    """Two layers of two heads, mixed into two others."""
    rng = np.random.default_rng(seed)

    def part() -> LinearMap:
        weight = scale * rng.normal(size=(H, 2 * H * D, D)) / (2 * H * D) ** 0.5
        return LinearMap.of(
            [0, 1],
            mx.array(weight.astype(np.float32)),
            mx.array(rng.normal(size=(H, D)).astype(np.float32)),
        )

    return Mapper(plain(), plain(), [LayerMap(i, part(), part()) for i in range(2)])


# 1. mlx 3494, 3795, 3949: fast.rope of (B > 1, H, 1, D) wrote its first row only.
@pytest.mark.parametrize("batch", [2, 3])
def test_01_a_single_token_of_a_batch_equals_its_rows(batch: int) -> None:
    mapper = random_mapper()
    source = {
        i: tuple(mx.random.normal((batch, H, 1, D), key=mx.random.key(10 * i + j)) for j in (0, 1))
        for i in range(2)
    }
    at = mx.array([[7 + 100 * b] for b in range(batch)])
    whole = transfer_cache(source, mapper, at)
    for b in range(batch):
        row = {i: (k[b], v[b]) for i, (k, v) in source.items()}
        for t, (k, v) in transfer_cache(row, mapper, at[b]).items():
            assert mx.allclose(whole[t][0][b], k, atol=1e-5)
            assert mx.allclose(whole[t][1][b], v, atol=1e-5)
        # and the keys do carry the row's own position
        k, _ = source[0]
        want = mx.fast.rope(
            ROPE.rotate(k[b : b + 1], at[b], inverse=True), D, traditional=False, base=1e4,
            scale=1.0, offset=int(at[b, 0].item()),
        )  # fmt: skip
        assert mx.allclose(ROPE.rotate(ROPE.rotate(k[b : b + 1], at[b], inverse=True), at[b]), want)


# 2. mlx 2791: RoPE of bfloat16 differs between CPU and GPU, by a rounding of the cosines.
def test_02_a_bfloat16_cache_is_stripped_in_float32() -> None:
    for n in (1, 9):
        keys = mx.random.normal((H, n, D)).astype(mx.bfloat16)
        at = mx.arange(1000, 1000 + n)
        eye = mx.broadcast_to(mx.eye(D), (H, D, D))
        got = map_layer(
            [keys], eye, heads=[[0], [1]], strip=[ROPE.table(at, inverse=True)], dtype=mx.float32
        )
        want = oracle.strip(oracle.to_numpy(keys), np.array(at), ROPE)
        # 1e-4 is float32's angle at position 1000; bfloat16 cosines would be 4e-3 off.
        assert np.abs(np.array(got) - want).max() < 5e-4
        back = map_layer([got], eye, heads=[[0], [1]], rotate=ROPE.table(at), dtype=mx.bfloat16)
        assert mx.array_equal(back, keys)


# 3. mlx-lm 1097, 1699: an offset that is an array, changed in place behind one's back.
def test_03_offsets_are_numbers_before_they_are_used() -> None:
    caches = filled(5)
    shared = mx.array(5)
    for entry in caches:
        entry.offset = shared
    snapshot = read_cache(caches, plain())
    shared += 3
    assert snapshot.offset == 5 and type(snapshot.offset) is int
    assert snapshot.positions.tolist() == [0, 1, 2, 3, 4]
    rows = [KVCache(), KVCache()]
    for n, entry in zip((2, 6), rows, strict=True):
        entry.update_and_fetch(numbered(0, n), numbered(0, n))
    batch = KVCache.merge(rows)
    snapshot = read_cache([batch], row=0)
    batch.offset += 9
    assert snapshot.offset == 2


# 4. mlx-lm PR 1512, 1776, mlx-swift-lm PR 584: trimming a ring that has wrapped.
def test_04_wrapped_rings_are_read_right_and_never_trimmed(monkeypatch: Any) -> None:
    ring = RotatingKVCache(max_size=8, keep=2)
    for i in range(21):
        ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))

    def forbidden(*args: Any) -> None:
        raise AssertionError("a ring was trimmed")

    monkeypatch.setattr(RotatingKVCache, "trim", forbidden)
    snapshot = read_cache([ring], plain(1))
    got = [int(x) for x in snapshot.keys[0][0, 0, :, 0].tolist()]
    assert got == snapshot.positions.tolist() == [0, 1, 15, 16, 17, 18, 19, 20]
    model = zoo.make("gemma3_text")
    map_cache(prefill(model, TOKENS * 2), identity_mapper(model), model)
    monkeypatch.undo()
    ring.trim(6)  # mlx-lm doesn't check
    assert ring._idx < 0 or ring._idx <= ring.keep
    with pytest.raises(CacheError, match="trimmed after it had dropped tokens"):
        read_cache([ring])


# 5. mlx-lm PR 1868: a negative trim raises the offset beyond what there is.
def test_05_an_offset_beyond_the_buffer_is_refused() -> None:
    caches = build_cache(plain(), read_cache(filled(5)).layers)
    trim_prompt_cache(caches, -5)
    assert caches[0].offset == 10
    with pytest.raises(CacheError, match="holds 10 tokens, but its keys have room for 5"):
        read_cache(caches)


# 6. claude-code-local PR 47: the growth step taken for the length.
@pytest.mark.parametrize("n", [1, 255, 256, 257])
def test_06_the_length_is_the_offset(n: int) -> None:
    caches = filled(n)
    assert caches[0].keys.shape[2] % KVCache.step == 0
    model = zoo.make("qwen3")
    native = prefill(model, (TOKENS * 20)[:n])
    mapped = map_cache(native, identity_mapper(model), model)
    for entry in mapped:
        assert entry.offset == n and entry.keys.shape[2] == n
    want = model(mx.array([[4, 5]]), cache=native)
    assert mx.allclose(model(mx.array([[4, 5]]), cache=mapped), want, atol=1e-4)


# 7. mlx-lm 1494, PR 1502: layers disagree after a trim; Concatenate resurrects tokens.
def test_07_layers_that_disagree_are_named() -> None:
    caches = filled(6)
    caches[1].trim(2)
    with pytest.raises(CacheError, match="layer 0 holds 6 tokens, layer 1 holds 4"):
        read_cache(caches, plain())
    with pytest.raises(UnsupportedCacheError, match="ConcatenateKVCache"):
        read_cache(filled(6, cls=ConcatenateKVCache))


# 8. mlx-lm PR 1673: valid tokens dropped because the buffer's shape was believed.
def test_08_valid_rows_come_from_the_counters() -> None:
    caches = filled(300)
    trim_prompt_cache(caches, 50)
    caches[0].update_and_fetch(numbered(0, 1), numbered(0, 1))
    caches[1].update_and_fetch(numbered(0, 1), numbered(0, 1))
    assert caches[0].keys.shape[2] == 512
    snapshot = read_cache(caches, plain())
    assert snapshot.offset == 251
    assert mx.array_equal(snapshot.keys[0][..., 250:, :], numbered(0, 1))
    chunked = ChunkedKVCache(8)
    chunked.update_and_fetch(numbered(0, 12), numbered(0, 12))
    chunked.maybe_trim_front()
    with pytest.raises(UnsupportedCacheError, match="ChunkedKVCache.*drops the front"):
        read_cache([chunked])


# 9. mlx-vlm 2061, Rapid-MLX 1294: heads of 96 and groups of 64.
def test_09_groups_that_do_not_divide_the_head_are_named() -> None:
    pairs = read_cache(filled(3, dim=96)).layers
    with pytest.raises(GeometryError, match="kv_group_size 64 does not divide.*96.*use 32"):
        build_cache(plain(dim=96), pairs, kv_bits=8, kv_group_size=64)
    built = build_cache(plain(dim=96), pairs, kv_bits=8, kv_group_size=32)
    assert all(isinstance(entry, QuantizedKVCache) for entry in built)
    again = read_cache(built, plain(dim=96))
    assert mx.allclose(again.keys[0], pairs[0][0], atol=0.05)


# 10. mlx-lm 80, mlx-engine 372, VeloxQuant PR 92: empty caches, unknown classes, either file.
# The files themselves: tests/test_prompt_files.py.
def test_10_what_cannot_be_read_is_refused_before_any_work(monkeypatch: Any) -> None:
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


# 11. nexusquant PR 12, omlx PR 2295: the whole head turned where RoPE is partial.
@pytest.mark.parametrize("dim", [24, 80, 96, 112])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, "proportional"])
def test_11_partial_rotary_leaves_the_rest_of_the_head_alone(dim: int, part: Any) -> None:
    if part == "proportional":
        quarter = dim // 8
        freqs = tuple(10.0**i for i in range(quarter)) + (float("inf"),) * (dim // 2 - quarter)
        spec = RopeSpec(dim, freqs=freqs)
    else:
        spec = RopeSpec(int(dim * part) // 2 * 2, base=1e4)
    at = mx.arange(300, 305)
    x = mx.random.normal((1, H, 5, dim))
    keys = mx.fast.rope(
        x, spec.dims, traditional=False, base=spec.base, scale=1.0, offset=300,
        freqs=None if spec.freqs is None else mx.array(spec.freqs),
    )  # fmt: skip
    eye = mx.broadcast_to(mx.eye(dim), (H, dim, dim))
    table = spec.table(at, inverse=True)
    got = map_layer([keys], eye, heads=[[0], [1]], strip=[table])
    assert mx.allclose(got, x, atol=1e-4)
    back = map_layer([got], eye, heads=[[0], [1]], rotate=spec.table(at))
    assert mx.allclose(back, keys, atol=1e-4)


# 12. mlx-lm PR 1698, 953, 1507, mlxcel 1358: configuration and live model disagree.
def test_12_the_geometry_is_what_the_live_model_does() -> None:
    model = zoo.make("qwen2 yarn")
    geometry = read_geometry(model)
    # Whatever the configuration may say, e.g. an attention_factor that is ignored.
    model.args.rope_scaling = {**model.args.rope_scaling, "attention_factor": 3.0}
    model.args.rope_theta = 5e5
    assert read_geometry(model) == geometry
    rope = geometry.layers[0].rope
    assert rope.freqs is not None and rope.magnitude > 1
    # The other way round: another module, the same configuration.
    for layer in model.layers:
        layer.self_attn.rope._freqs = layer.self_attn.rope._freqs * 2
    assert read_geometry(model) != geometry
    native = prefill(model, TOKENS)
    with pytest.raises(KvgraftError, match="RoPE frequencies differ"):
        mapper = identity_mapper(zoo.make("qwen2 yarn"))
        map_cache(native, mapper, model)


# 13. mlx-vlm PR 1883, mlx-lm PR 748: an array of offsets taken for one of positions.
@pytest.mark.parametrize(("batch", "n"), [(2, 1), (2, 2), (3, 2), (2, 5)])
def test_13_positions_belong_to_their_rows(batch: int, n: int) -> None:
    mapper = random_mapper()
    source = {
        i: tuple(mx.random.normal((batch, H, n, D), key=mx.random.key(10 * i + j)) for j in (0, 1))
        for i in range(2)
    }
    at = mx.array([[50 * b + i for i in range(n)] for b in range(batch)])
    whole = transfer_cache(source, mapper, at)
    for b in range(batch):
        row = {i: (k[b], v[b]) for i, (k, v) in source.items()}
        for t, pair in transfer_cache(row, mapper, at[b]).items():
            assert all(mx.allclose(x[b], y, atol=1e-5) for x, y in zip(whole[t], pair, strict=True))
    # One offset per row is no list of positions, unless there are as many tokens.
    if batch != n:
        with pytest.raises(GeometryError, match="positions has shape"):
            transfer_cache(source, mapper, mx.array([0] * batch))


# 14. mlx-lm 439, 1906: padding of shorter rows read as tokens.
def test_14_rows_of_different_lengths_map_like_single_conversations() -> None:
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


# 15. kvpress 250, 268: float16 overflows to infinity, then NaN, then "!!!!".
def test_15_float16_neither_overflows_nor_spreads_what_did() -> None:
    geometry = plain(dtype="float16")
    mapper = random_mapper(scale=3.0)
    mapper.target = geometry
    big = mx.full((1, H, 4, D), 6e4)
    source = {i: (big.astype(mx.float16), -big.astype(mx.float16)) for i in range(2)}
    wide = {i: (1e6 * big.astype(mx.bfloat16), big.astype(mx.bfloat16)) for i in range(2)}
    for kv in (source, wide):
        mapped = transfer_cache(kv, mapper, dtype=mx.float16)
        exact = transfer_cache(kv, mapper, dtype=mx.float32)
        for t, pair in mapped.items():
            for x, y in zip(pair, exact[t], strict=True):
                assert x.dtype == mx.float16 and mx.isfinite(x).all()
                assert mx.abs(y).max() > 65504  # it would have overflowed
                want = mx.clip(y, -65504, 65504)
                assert mx.allclose(x.astype(mx.float32), want, rtol=1e-3)
        build_cache(geometry, [mapped[0], mapped[1]])
    # What the source has spoilt already is refused, not clamped into something plausible.
    model = zoo.make("qwen3", mx.float16)
    native = prefill(model, TOKENS)
    native[1].values[..., 3, 1] = float("inf")
    with pytest.raises(CacheError, match="Source layer 1 of the cache: NaN or infinite"):
        map_cache(native, identity_mapper(model), model)


# 16. mlx PR 3720, 1340: kernels that take strided inputs for contiguous ones.
def test_16_every_view_maps_like_its_copy() -> None:
    mapper = random_mapper()
    pairs = {
        i: tuple(mx.random.normal((1, H, 7, D), key=mx.random.key(10 * i + j)) for j in (0, 1))
        for i in range(2)
    }
    want = transfer_cache(pairs, mapper)
    junk = mx.full((1, H, 249, D), 9e9)

    views = {
        "padded": lambda x: mx.concatenate([x, junk], axis=2)[..., :7, :],
        "tokens first": lambda x: mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "dims first": lambda x: mx.contiguous(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
        "reversed": lambda x: mx.contiguous(x[..., ::-1, :])[..., ::-1, :],
        "every second": lambda x: mx.repeat(x, 2, axis=2)[:, :, ::2],
        "of more heads": lambda x: mx.concatenate([junk[:, :1, :7], x], axis=1)[:, 1:],
        "of wider heads": lambda x: mx.concatenate([x, x], axis=3)[..., :D],
        "broadcast": lambda x: mx.broadcast_to(x[:, :, :1], x.shape),
    }
    for name, view in views.items():
        seen = {i: tuple(view(x) for x in pair) for i, pair in pairs.items()}
        got = transfer_cache(seen, mapper)
        copied = {i: tuple(mx.array(np.array(x)) for x in pair) for i, pair in seen.items()}
        expected = want if name != "broadcast" else transfer_cache(copied, mapper)
        for t, pair in got.items():
            for x, y in zip(pair, expected[t], strict=True):
                assert mx.allclose(x, y, atol=1e-5), name


# 17. mlx-lm PR 1100, mlx-engine 310: tuples where arrays are expected.
def test_17_quantised_rows_are_told_by_their_form_and_dequantised() -> None:
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


# 18. Found on the way: traps of mlx-lm itself.
class Test18:
    def test_bits_that_a_fresh_quantised_cache_gets_wrong(self) -> None:
        for bits in (5, 6):
            pairs = read_cache(filled(3, dim=64)).layers
            built = build_cache(plain(dim=64), pairs, kv_bits=bits, kv_group_size=32)
            x = mx.random.normal((1, H, 300, 64))
            for entry in built:  # grows, unlike one that starts out so
                entry.update_and_fetch(x, x)
            again = read_cache(built, plain(dim=64))
            assert again.offset == 303
            assert mx.allclose(again.keys[0][..., 3:, :], x, atol=0.25)

    def test_a_batch_trimmed_below_a_row(self) -> None:
        rows = [KVCache(), KVCache()]
        for n, entry in zip((2, 6), rows, strict=True):
            entry.update_and_fetch(numbered(0, n), numbered(0, n))
        batch = KVCache.merge(rows)
        batch.trim(4)
        assert min(batch.offset.tolist()) < 0
        with pytest.raises(CacheError, match="trimmed below its length"):
            read_cache([batch], row=0)

    def test_a_merge_that_forgets_what_a_ring_keeps(self) -> None:
        ring = RotatingKVCache(max_size=8, keep=4)
        for i in range(20):
            ring.update_and_fetch(numbered(i, i + 1), numbered(i, i + 1))
        merged = RotatingKVCache.merge([ring])
        with pytest.raises(UnsupportedCacheError, match="does not remember"):
            read_cache([merged], plain(1), row=0)

    def test_a_mapped_cache_works_in_another_thread(self) -> None:
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

    def test_a_token_is_left_to_read(self) -> None:
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

    def test_a_mapped_draft_cache_changes_no_token(self) -> None:
        # From the target down to the draft: whatever the map is worth, each
        # token is verified.
        model, draft = zoo.make("qwen3"), zoo.make("qwen3", seed=1)
        want = [t for t, _ in generate_step(mx.array(TOKENS), model, max_tokens=8)]
        native = prefill(model, TOKENS[:-1])
        joint = native + map_cache(native, identity_mapper(model), draft)
        got = [
            token
            for token, *_ in speculative_generate_step(
                mx.array(TOKENS[-1:]), model, draft, prompt_cache=joint, max_tokens=8
            )
        ]
        assert got == want
        with pytest.raises(GeometryError, match="a draft model's cache is appended"):
            map_cache(joint, identity_mapper(model), model)


# The plain ones.
@pytest.mark.parametrize("layers", [1, 61])
def test_any_number_of_layers_in_their_order(layers: int) -> None:
    geometry = plain(layers)
    pairs = [(numbered(i, i + 1), numbered(i, i + 1)) for i in range(layers)]
    built = build_cache(geometry, pairs)
    assert [e.keys[0, 0, 0, 0].item() for e in built] == list(range(layers))


def test_far_positions() -> None:
    mapper = random_mapper()
    source = {i: tuple(mx.random.normal((1, H, 3, D)) for _ in "kv") for i in range(2)}
    at = mx.arange(100_000, 100_003)
    got = transfer_cache(source, mapper, at)[0][0]
    near = transfer_cache(source, mapper, mx.arange(3))[0][0]
    assert mx.isfinite(got).all() and not mx.allclose(got, near, atol=1e-2)
    # A turn changes no length; the angles are those that MLX itself uses there.
    eye = mx.broadcast_to(mx.eye(D), (H, D, D))
    x = source[0][0]
    turned = map_layer([x], eye, heads=[[0], [1]], rotate=ROPE.table(at))
    want = mx.fast.rope(x, D, traditional=False, base=1e4, scale=1.0, offset=100_000)
    assert mx.allclose(turned, want, atol=2e-2)


def test_nan_in_a_source_is_passed_on_by_arrays_and_refused_in_a_cache() -> None:
    mapper = random_mapper()
    pairs = [[mx.array(k), mx.array(v)] for k, v in read_cache(filled(4)).layers]
    pairs[0][0][0, 0, 2, 3] = float("nan")
    kv = {i: (k, v) for i, (k, v) in enumerate(pairs)}
    mapped = transfer_cache(kv, mapper)  # lazy, like MLX's own operations
    assert mx.isnan(mapped[0][0][..., 2, :]).any() and mx.isfinite(mapped[0][0][..., :2, :]).all()
    with pytest.raises(CacheError, match="NaN"):
        build_cache(plain(), [mapped[0], mapped[1]])
