"""The reference against the float64 oracle."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle
import pytest

from kvgraft.errors import GeometryError
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.dtypes import saturate
from kvgraft.ops.quantized import dequantize, quantize
from kvgraft.ops.reference import map_layer

SPECS = {
    "none": RopeSpec(0),
    "half": RopeSpec(64, base=1e6),
    "partial": RopeSpec(32, base=1e4, scale=0.25),
    "traditional": RopeSpec(64, True, base=5e5),
    "magnitude": RopeSpec(64, freqs=tuple(float(1.5**i) for i in range(32)), magnitude=1.25),
}
# NMSE against float64 for a result written in that dtype: about eps^2 / 12.
LIMIT = {mx.float32: 1e-12, mx.float16: 1e-7, mx.bfloat16: 6e-6}


def problem(n=7, k=3, h_s=4, d_s=64, h_t=2, d_t=96, plan=None, dtype=mx.float32, batch=()):
    mx.random.seed(n + k)
    sources = [mx.random.normal((*batch, h_s, n, d_s)).astype(dtype) for _ in range(k)]
    heads = {
        None: None,
        "local": [[h] for h in range(h_t)],
        "grouped": [[(2 * h + 1) % h_s, (2 * h) % h_s] for h in range(h_t)],
    }[plan]
    in_dim = k * d_s * (h_s if heads is None else len(heads[0]))
    weight = mx.random.normal((h_t, in_dim, d_t)) / in_dim**0.5
    return sources, weight.astype(dtype), mx.random.normal((h_t, d_t)).astype(dtype), heads


@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("plan", [None, "local", "grouped"])
@pytest.mark.parametrize("rope", list(SPECS))
@pytest.mark.parametrize("batch", [(), (3,)], ids=["flat", "batched"])
def test_equals_float64(dtype, plan, rope, batch):
    sources, weight, bias, heads = problem(plan=plan, dtype=dtype, batch=batch)
    positions = mx.array([0, 1, 5, 99, 1000, 1001, 4000])
    strip = [SPECS[rope].table(positions, inverse=True)] * len(sources)
    rotate = SPECS["half"].table(positions)
    got = map_layer(sources, weight, bias, heads=heads, strip=strip, rotate=rotate)
    want = oracle.map_layer(
        [oracle.to_numpy(s) for s in sources],
        oracle.to_numpy(weight),
        oracle.to_numpy(bias),
        heads=heads,
        strip=strip,
        rotate=rotate,
    )
    assert got.dtype == dtype
    assert oracle.nmse(oracle.to_numpy(got), want) < LIMIT[dtype]


def test_keys_follow_the_paper_with_independent_angles():
    """Against float64 angles, not the table's: positions where float32 angles are exact enough."""
    sources, weight, bias, _ = problem(n=50)
    positions = mx.arange(50) + 10
    source, target = SPECS["magnitude"], SPECS["traditional"]
    got = map_layer(
        sources,
        weight,
        bias,
        strip=[source.table(positions, inverse=True)] * 3,
        rotate=target.table(positions),
    )
    p = np.array(positions)
    content = [oracle.strip(oracle.to_numpy(s), p, source) for s in sources]
    mapped = oracle.map_layer(content, oracle.to_numpy(weight), oracle.to_numpy(bias))
    want = oracle.rotate(mapped, p, target)
    assert oracle.nmse(oracle.to_numpy(got), want) < 1e-10


def test_layers_of_unequal_geometry():
    sources = [mx.random.normal((2, 5, 64)), mx.random.normal((4, 5, 24))]
    weight = mx.random.normal((3, 2 * 64 + 4 * 24, 80))
    got = map_layer(sources, weight)
    want = oracle.map_layer([oracle.to_numpy(s) for s in sources], oracle.to_numpy(weight))
    assert oracle.nmse(oracle.to_numpy(got), want) < 1e-12


def test_each_row_of_a_batch_has_its_own_positions():
    sources, weight, bias, _ = problem(n=6, batch=(2,))
    positions = mx.array([[0, 1, 2, 3, 4, 5], [70, 71, 72, 73, 74, 75]])
    spec = SPECS["half"]

    def run(rows, pos):
        return map_layer(
            rows,
            weight,
            bias,
            strip=[spec.table(pos, inverse=True)] * 3,
            rotate=SPECS["traditional"].table(pos),
        )

    both = run(sources, positions)
    for i in range(2):
        alone = run([s[i] for s in sources], positions[i])
        assert mx.allclose(both[i], alone, atol=1e-5)


@pytest.mark.parametrize("bits,limit", [(8, 5e-5), (4, 2e-2)])
def test_quantised_weights_are_those_dequantised(bits, limit):
    sources, weight, bias, _ = problem(n=9)
    packed = quantize(weight, bits=bits, group_size=32)
    got = map_layer(sources, packed, bias)
    assert mx.allclose(got, map_layer(sources, dequantize(packed), bias))
    full = oracle.to_numpy(map_layer(sources, weight, bias))
    error = oracle.nmse(oracle.to_numpy(got), full)
    assert 0 < error < limit


def test_no_tokens_give_no_tokens():
    sources, weight, bias, _ = problem(n=0)
    assert map_layer(sources, weight, bias).shape == (2, 0, 96)


def test_float16_saturates_instead_of_overflowing():
    sources = [mx.full((1, 3, 64), 6e4, dtype=mx.float16)]
    weight = mx.ones((1, 64, 64), dtype=mx.float16)
    got = map_layer(sources, weight, dtype=mx.float16)
    assert mx.all(got == 65504).item()
    assert mx.isnan(saturate(mx.array([float("nan")]), mx.float16)).item()


def test_bfloat16_source_into_float16_target():
    sources = [mx.full((1, 2, 32), -3e38, dtype=mx.bfloat16)]
    got = map_layer(sources, mx.eye(32)[None], dtype=mx.float16)
    assert mx.all(got == -65504).item()


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(sources=[]), "no source layers"),
        (dict(sources=[mx.zeros((2, 3))]), "2 axes"),
        (dict(sources=[mx.zeros((2, 3, 4), dtype=mx.int32)]), "int32"),
        (dict(sources=[mx.zeros((2, 3, 4)), mx.zeros((2, 5, 4))]), "does not match"),
        (dict(weight=mx.zeros((2, 7, 4))), r"\[8\] features"),
        (dict(bias=mx.zeros((2, 5))), "bias"),
        (dict(heads=[[0]]), "lists 1 heads"),
        (dict(heads=[[0], [2]]), "wants source head 2"),
        (dict(strip=[]), "0 strip tables"),
        (dict(rotate=RopeSpec(8, base=1e4).table(mx.arange(3))), "rotates 8 dims"),
        (dict(rotate=RopeSpec(4, base=1e4).table(mx.arange(9))), "covers 9 positions"),
        (dict(rotate=RopeSpec(4, base=1e4).table(mx.zeros((2, 3)))), "batch"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = dict(sources=[mx.zeros((2, 3, 4))], weight=mx.zeros((2, 8, 4)), bias=None) | change
    sources, weight, bias = args.pop("sources"), args.pop("weight"), args.pop("bias")
    with pytest.raises(GeometryError, match=message):
        map_layer(sources, weight, bias, **args)
