"""Batches, strided views, far positions and overflow through transfer_cache.

Numbers in comments are reports of such bugs in other programs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.models.cache import (
    KVCache,
)

from kvgraft.cache import build_cache, read_cache
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, GeometryError
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import transfer_cache
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
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


# mlx 3494, 3795, 3949: fast.rope of (B > 1, H, 1, D) wrote its first row only.
@pytest.mark.parametrize("batch", [2, 3])
def test_a_single_token_of_a_batch_equals_its_rows(batch: int) -> None:
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


# mlx-vlm PR 1883, mlx-lm PR 748: an array of offsets taken for one of positions.
@pytest.mark.parametrize(("batch", "n"), [(2, 1), (2, 2), (3, 2), (2, 5)])
def test_positions_belong_to_their_rows(batch: int, n: int) -> None:
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


# kvpress 250, 268: float16 overflows to infinity, then NaN, then "!!!!".
def test_float16_neither_overflows_nor_spreads_what_did() -> None:
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


# mlx PR 3720, 1340: kernels that take strided inputs for contiguous ones.
def test_every_view_maps_like_its_copy() -> None:
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
