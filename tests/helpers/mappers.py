"""Small mappers and caches for the tests of artifacts and transfers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.models.rope import NO_ROPE, RopeSpec
from kvgraft.ops.quantized import quantize

# One RoPE of each kind that a geometry has to say.
LLAMA3 = RopeSpec(16, freqs=(1.0, 3.1622777, 10.0, 31.622776, 100.0, 900.5, 8e3, float("inf")))
YARN = RopeSpec(16, base=1e4, scale=0.25, magnitude=1.3466)
PARTIAL = RopeSpec(8, traditional=True, base=1e4)


def geometry(
    layers: int = 3,
    heads: int = 2,
    dim: int = 16,
    rope: RopeSpec | None = None,
    *,
    name: str = "toy",
    dtype: str = "float32",
) -> ModelGeometry:
    rope = RopeSpec(dim, base=1e4) if rope is None else rope
    return ModelGeometry((LayerGeometry(heads, dim, dim, rope),) * layers, dtype, name)


def mixed_source() -> ModelGeometry:
    """Every layer another RoPE; values narrower than keys in one."""
    layers = [
        LayerGeometry(4, 16, 16, LLAMA3),
        LayerGeometry(4, 16, 16, YARN),
        LayerGeometry(4, 16, 8, PARTIAL, window=64),
        LayerGeometry(4, 16, 16, NO_ROPE),
    ]
    return ModelGeometry(tuple(layers), "bfloat16", "mixed")


def mixed_target() -> ModelGeometry:
    layers = [LayerGeometry(2, 32, 24, RopeSpec(32, base=1e6)), LayerGeometry(2, 32, 24, NO_ROPE)]
    return ModelGeometry(tuple(layers), "float16", "mixed-target")


def array(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def linear(
    rng: np.random.Generator,
    source: ModelGeometry,
    kind: str,
    sources: Sequence[int],
    n_heads: int,
    out_dim: int,
    *,
    heads: Sequence[Sequence[int]] | None = None,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    group_size: int = 32,
) -> LinearMap:
    dims = [getattr(source.layers[s], f"{kind}_dim") for s in sources]
    if heads is None:
        width = sum(source.layers[s].n_kv_heads * d for s, d in zip(sources, dims))
    else:
        width = len(heads[0]) * sum(dims)
    weight = array(rng, n_heads, width, out_dim, dtype=dtype) / width**0.5
    bias = array(rng, n_heads, out_dim, dtype=mx.float32 if bits else dtype)
    kept = weight if bits is None else quantize(weight, bits=bits, group_size=group_size)
    return LinearMap.of(sources, kept, bias, heads)


def mapper(
    source: ModelGeometry | None = None,
    target: ModelGeometry | None = None,
    *,
    k: int = 2,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    bits: int | None = None,
    heads: Sequence[Sequence[int]] | None = None,
    separate: bool = False,
    content_space: bool = True,
) -> Mapper:
    """A random mapper of every target layer from ``k`` source layers.

    With ``separate``, values come from other layers than keys.
    """
    source = geometry(4) if source is None else source
    target = geometry(3, name="toy-target") if target is None else target
    rng = np.random.default_rng(seed)
    n = len(source.layers)
    layers = []
    for t, there in enumerate(target.layers):
        keys = sorted({(t + i) % n for i in range(k)})
        values = sorted({(t + i + 1) % n for i in range(k)}) if separate else keys
        layers.append(
            LayerMap(
                t,
                linear(rng, source, "key", keys, there.n_kv_heads, there.key_dim,
                       heads=heads, dtype=dtype, bits=bits),
                linear(rng, source, "value", values, there.n_kv_heads, there.value_dim,
                       heads=heads, dtype=dtype, bits=bits),
                {"r2_keys": 0.75 + t / 100, "r2_values": float("nan") if t else 0.5},
            )
        )  # fmt: skip
    return Mapper(
        source,
        target,
        layers,
        content_space=content_space,
        source_model=ModelIdentity("org/large", "a" * 64, "c" * 64, {"bits": 4, "group_size": 64}),
        target_model=ModelIdentity("org/small", "b" * 64, "c" * 64),
        fit={"lambda": 0.01, "lambda_convention": "gram", "rows": 4096, "k": k},
    )


def cache(
    source: ModelGeometry,
    n_tokens: int,
    *,
    seed: int = 1,
    dtype: mx.Dtype = mx.float32,
    batch: int | None = None,
) -> dict[int, tuple[mx.array, mx.array]]:
    """Random keys and values; rotated or not makes no difference to a test."""
    rng = np.random.default_rng(seed)
    lead = () if batch is None else (batch,)
    return {
        i: tuple(
            array(rng, *lead, layer.n_kv_heads, n_tokens, dim, dtype=dtype)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for i, layer in enumerate(source.layers)
    }


def same(a: mx.array, b: mx.array) -> bool:
    """Bit for bit the same array."""
    return a.dtype == b.dtype and bool(mx.array_equal(a, b).item())
