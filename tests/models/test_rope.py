"""RopeSpec, its tables, strip and apply, against the live modules and a float64 oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import hunyuan_v1_dense, internlm3, rope_utils

from kvgraft.errors import GeometryError
from kvgraft.models.rope import NO_ROPE, RopeSpec, apply_rope, rotate_pairs, strip_rope
from kvgraft.models.rope_candidates import rope_candidates
from kvgraft.ops.fused import map_layer

# float32 arithmetic on angles that are the module's own; measured: up to 1.5e-7.
ROUNDING = 2e-6
FAR = (0, 1, 37, 1000, 8191, 100_000)


@dataclass
class Case:
    """One class of module, as mlx-lm makes it."""

    make: Callable[[], nn.Module]
    head_dim: int
    far: tuple[int, ...] = FAR


YARN = {
    "type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + i / 4 for i in range(48)],
}
PROPORTIONAL = {"type": "proportional", "partial_rotary_factor": 0.25}

CASES = {
    "default": Case(lambda: nn.RoPE(128, base=1e6), 128),
    "traditional": Case(lambda: nn.RoPE(64, traditional=True), 64),
    "linear": Case(lambda: nn.RoPE(64, scale=1 / 8.0), 64),
    "partial 0.25": Case(lambda: nn.RoPE(20), 80),
    "partial 0.5 traditional": Case(lambda: nn.RoPE(64, traditional=True), 128),
    "partial 0.75": Case(lambda: nn.RoPE(72), 96),
    "llama3": Case(lambda: rope_utils.initialize_rope(128, 5e5, False, LLAMA3, 131072), 128),
    "yarn": Case(lambda: rope_utils.initialize_rope(64, 1.5e5, False, YARN, 131072), 64),
    "yarn traditional": Case(lambda: rope_utils.initialize_rope(64, 1e4, True, YARN, 131072), 64),
    "longrope partial": Case(
        lambda: rope_utils.initialize_rope(96, 1e4, False, LONGROPE, 131072), 128
    ),
    "proportional": Case(lambda: rope_utils.initialize_rope(256, 1e6, False, PROPORTIONAL), 256),
    "dynamic NTK alpha": Case(lambda: hunyuan_v1_dense.DynamicNTKAlphaRoPE(64, 1e4, 1000.0), 64),
    "internlm3 dynamic": Case(
        lambda: internlm3.DynamicNTKScalingRoPE(64, 2048, False, 1e4, 2.0), 64, (0, 1, 37, 1000)
    ),
}
if hasattr(rope_utils, "DynamicNTKScalingRoPE"):  # mlx-lm >= 0.32
    CASES["dynamic NTK"] = Case(
        lambda: rope_utils.DynamicNTKScalingRoPE(64, 2048, False, 1e4, 4.0), 64, (0, 1, 37, 2047)
    )


class Holder(nn.Module):
    """A model of nothing but one RoPE module."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope


def spec_of(module: nn.Module) -> RopeSpec:
    (spec,) = (c.spec for c in rope_candidates(Holder(module)) if c.spec.dims > 0)
    return spec


def keys_like(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def worst(a: mx.array, b: mx.array) -> float:
    """Largest difference relative to the largest entry."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


@pytest.mark.parametrize("name", CASES)
def test_apply_equals_the_live_module(name: str) -> None:
    case = CASES[name]
    module = case.make()
    spec = spec_of(module)
    x = keys_like((2, 3, 1, case.head_dim))
    for position in case.far:
        got = apply_rope(x, mx.array([position]), spec)
        assert worst(got, module(x, offset=position)) < ROUNDING, position


@pytest.mark.parametrize("name", CASES)
def test_strip_equals_the_transposed_live_module(name: str) -> None:
    # The vector-Jacobian product of a rotation is its inverse, without any
    # knowledge of how the class computes it; a magnitude m enters as m squared.
    case = CASES[name]
    module = case.make()
    spec = spec_of(module)
    x = keys_like((1, 2, 1, case.head_dim))
    magnitude = mx.where(mx.arange(case.head_dim) < spec.dims, spec.magnitude, 1.0)
    for position in case.far:
        rotated = module(x, offset=position)
        _, (transposed,) = mx.vjp(lambda t, p=position: module(t, offset=p), [x], [rotated])
        stripped = strip_rope(rotated, mx.array([position]), spec)
        assert worst(stripped, transposed / magnitude**2) < ROUNDING, position
        assert worst(stripped, x) < ROUNDING, position


@pytest.mark.parametrize("name", ["default", "yarn traditional", "proportional"])
def test_rotate_is_undone_by_its_inverse(name: str) -> None:
    case = CASES[name]
    spec = spec_of(case.make())
    positions = mx.array([3, 100_000, 77])
    x = keys_like((3, 2, case.head_dim))
    turned = spec.rotate(x, positions)
    assert worst(turned, x) > 0.1
    assert worst(spec.rotate(turned, positions, inverse=True), x) < ROUNDING


@pytest.mark.parametrize("name", CASES)
def test_a_chunk_of_tokens_equals_the_live_module(name: str) -> None:
    case = CASES[name]
    module = case.make()
    spec = spec_of(module)
    x = keys_like((1, 2, 9, case.head_dim))
    rotated = module(x, offset=100)
    positions = mx.arange(100, 109)
    assert worst(apply_rope(x, positions, spec), rotated) < ROUNDING
    assert worst(strip_rope(rotated, positions, spec), x) < ROUNDING


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    # float32 angles are off by their own rounding times the position: this
    # bounds the module (and kvgraft with it), not the strip.
    case = CASES[name]
    spec = spec_of(case.make())
    positions = np.array([0, 1, 2, 37, 255, 511])
    x = keys_like((2, len(positions), case.head_dim))
    want = oracle.rotate(oracle.to_numpy(x), positions, spec)
    got = oracle.to_numpy(apply_rope(x, mx.array(positions), spec))
    limit = 1e-6 + 3e-7 * positions * spec.scale
    assert (np.abs(got - want).max(axis=(0, 2)) / np.abs(want).max() < limit).all()
    back = oracle.to_numpy(strip_rope(mx.array(want.astype(np.float32)), mx.array(positions), spec))
    assert (np.abs(back - oracle.to_numpy(x)).max(axis=(0, 2)) < 4 * limit).all()


@pytest.mark.parametrize("name", CASES)
def test_a_bfloat16_cache_survives_strip_and_apply(name: str) -> None:
    # Both run in float32, so a bfloat16 entry comes back as the same bits.
    case = CASES[name]
    spec = spec_of(case.make())
    cached = keys_like((1, 2, 4, case.head_dim), dtype=mx.bfloat16)
    positions = mx.array([0, 5, 300, 1000])
    stripped = strip_rope(cached, positions, spec)
    assert stripped.dtype == mx.float32
    assert mx.array_equal(apply_rope(stripped, positions, spec).astype(mx.bfloat16), cached)


@pytest.mark.parametrize("head_dim", [24, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("traditional", [False, True])
def test_partial_rotary(head_dim: int, part: float, traditional: bool) -> None:
    dims = int(head_dim * part)
    module = nn.RoPE(dims, traditional=traditional)
    spec = RopeSpec(dims, traditional, base=10000.0)
    x = keys_like((1, 2, 3, head_dim))
    rotated = module(x, offset=999)
    positions = mx.arange(999, 1002)
    stripped = strip_rope(rotated, positions, spec)
    assert worst(stripped, x) < ROUNDING
    assert worst(apply_rope(x, positions, spec), rotated) < ROUNDING
    # What is not rotated passes through untouched.
    assert mx.array_equal(stripped[..., dims:], rotated[..., dims:])


def test_inverting_the_whole_head_of_a_partial_rotary_would_be_wrong() -> None:
    # Guards the test above: the error it looks for is large.
    x = keys_like((1, 2, 3, 96))
    rotated = nn.RoPE(48)(x, offset=10)
    whole = RopeSpec(96, base=10000.0)
    assert worst(strip_rope(rotated, mx.arange(10, 13), whole), x) > 0.1


def test_infinite_freqs_leave_pairs_alone() -> None:
    spec = spec_of(CASES["proportional"].make())
    assert spec.dims == 256 and spec.freqs is not None
    still = [i for i, f in enumerate(spec.freqs) if math.isinf(f)]
    assert len(still) == 96
    x = keys_like((1, 1, 256))
    turned = apply_rope(x, mx.array([777]), spec)
    idle = mx.array([*still, *(i + 128 for i in still)])
    assert mx.array_equal(turned[..., idle], x[..., idle])
    assert not mx.array_equal(turned, x)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", ["default", "traditional", "yarn", "partial 0.75"])
def test_single_token_batches_equal_their_rows(batch: int, name: str) -> None:
    # Metal's rope once wrote only row 0 of (B > 1, H, 1, D).
    case = CASES[name]
    spec = spec_of(case.make())
    x = keys_like((batch, 2, 1, case.head_dim))
    at = mx.array([41])
    for act in (apply_rope, strip_rope):
        together = act(x, at, spec)
        for row in range(batch):
            assert mx.array_equal(together[row], act(x[row], at, spec))


@pytest.mark.parametrize(("batch", "n"), [(2, 1), (3, 1), (2, 5), (3, 2), (2, 2)])
def test_positions_by_row(batch: int, n: int) -> None:
    # Rows at different positions, also where batch and tokens differ or agree.
    spec = spec_of(CASES["llama3"].make())
    x = keys_like((batch, 2, n, 128))
    positions = mx.array([[1000 * row + 7 * i for i in range(n)] for row in range(batch)])
    for act in (apply_rope, strip_rope):
        together = act(x, positions, spec)
        for row in range(batch):
            assert mx.array_equal(together[row], act(x[row], positions[row], spec))


def test_views_give_the_same_as_copies() -> None:
    spec = RopeSpec(16, base=10000.0)
    positions = mx.arange(6)
    plain = keys_like((2, 3, 6, 24))
    want = strip_rope(plain, positions, spec)
    padded = mx.concatenate([plain, mx.full((2, 3, 250, 24), 9.0)], axis=2)[..., :6, :]
    transposed = mx.contiguous(plain.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    reversed_twice = mx.contiguous(plain[..., ::-1, :])[..., ::-1, :]
    strided = mx.repeat(plain, 2, axis=-1)[..., ::2]
    for view in (padded, transposed, reversed_twice, strided):
        assert mx.array_equal(strip_rope(view, positions, spec), want)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_no_rope_passes_keys_through(dtype: mx.Dtype) -> None:
    x = keys_like((2, 3, 5, 8), dtype=dtype)
    positions = mx.arange(5)
    assert NO_ROPE.table(positions) is None
    for act in (apply_rope, strip_rope):
        out = act(x, positions, NO_ROPE)
        assert out.dtype == mx.float32
        assert mx.array_equal(out, x.astype(mx.float32))


def test_magnitude_is_divided_out_and_put_back() -> None:
    module = CASES["yarn"].make()
    spec = spec_of(module)
    assert spec.magnitude == pytest.approx(0.1 * math.log(32.0) + 1.0)
    x = keys_like((1, 1, 1, 64))
    at_zero = module(x, offset=0)
    assert worst(at_zero, x * spec.magnitude) < ROUNDING
    assert worst(strip_rope(at_zero, mx.array([0]), spec), x) < ROUNDING


def test_longrope_scales_only_what_it_rotates() -> None:
    case = CASES["longrope partial"]
    spec = spec_of(case.make())
    assert spec.magnitude > 1.1
    x = keys_like((1, 1, 1, 128))
    stripped = strip_rope(case.make()(x, offset=3), mx.array([3]), spec)
    assert worst(stripped, x) < ROUNDING
    assert mx.array_equal(stripped[..., 96:], x[..., 96:])


@pytest.mark.parametrize("name", CASES)
def test_json_round_trip_is_exact(name: str) -> None:
    spec = spec_of(CASES[name].make())
    text = json.dumps(spec.to_dict(), allow_nan=False)
    assert RopeSpec.from_dict(json.loads(text)) == spec


def test_json_round_trip_without_rotation() -> None:
    assert RopeSpec.from_dict(json.loads(json.dumps(NO_ROPE.to_dict()))) == NO_ROPE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": 7, "base": 1e4}, "even"),
        ({"dims": -2, "base": 1e4}, "even"),
        ({"dims": 8}, "exactly one"),
        ({"dims": 8, "base": 1e4, "freqs": (1.0,) * 4}, "exactly one"),
        ({"dims": 8, "freqs": (1.0,) * 3}, "4 freqs"),
        ({"dims": 8, "base": 1e4, "magnitude": 0.0}, "magnitude"),
        ({"dims": 8, "base": 1e4, "magnitude": math.nan}, "magnitude"),
    ],
)
def test_impossible_specs_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        RopeSpec(**arguments)


def test_positions_past_the_limit_are_refused() -> None:
    spec = RopeSpec(8, base=1e4, max_position=64)
    spec.check_positions(63)
    with pytest.raises(GeometryError, match="beyond 64"):
        spec.check_positions(64)
    RopeSpec(8, base=1e4).check_positions(10**6)


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(1, 16),
    rest=st.integers(0, 9),
    traditional=st.booleans(),
    base=st.floats(10.0, 1e7),
    scale=st.sampled_from([1.0, 0.25, -1.0]),
    magnitude=st.floats(0.5, 2.0),
    positions=st.lists(st.integers(0, 100_000), min_size=1, max_size=5),
    batch=st.sampled_from([(), (1,), (3,)]),
    seed=st.integers(0, 2**16),
)
def test_strip_undoes_apply(
    half: int,
    rest: int,
    traditional: bool,
    base: float,
    scale: float,
    magnitude: float,
    positions: list[int],
    batch: tuple[int, ...],
    seed: int,
) -> None:
    spec = RopeSpec(2 * half, traditional, base=base, scale=scale, magnitude=magnitude)
    x = keys_like((*batch, 2, len(positions), 2 * half + rest), seed)
    at = mx.array(positions)
    assert worst(strip_rope(apply_rope(x, at, spec), at, spec), x) < ROUNDING
    assert worst(apply_rope(strip_rope(x, at, spec), at, spec), x) < ROUNDING


def test_recomputed_inverse_frequencies_would_not_do() -> None:
    # Why tables come out of the primitive: at 100,000 tokens the last bit of a
    # frequency is worth 1e-2 of a key.
    x = keys_like((1, 1, 1, 64))
    cached = nn.RoPE(64)(x, offset=100_000)
    freqs = tuple(float(f) for f in 10000.0 ** (np.arange(32, dtype=np.float32) / 32))
    near = strip_rope(cached, mx.array([100_000]), RopeSpec(64, freqs=freqs))
    exact = strip_rope(cached, mx.array([100_000]), RopeSpec(64, base=10000.0))
    assert worst(exact, x) < ROUNDING
    assert worst(near, x) > 100 * ROUNDING


def test_a_table_can_be_shared() -> None:
    spec = RopeSpec(16, base=1e4)
    positions = mx.arange(5)
    table = spec.table(positions, inverse=True)
    assert table is not None and table.dims == 16
    x = keys_like((2, 5, 16))
    assert mx.array_equal(rotate_pairs(x, table), strip_rope(x, positions, spec))


# --------------------------------------------------------- tables through map_layer


# mlx 2791: RoPE of bfloat16 differs between CPU and GPU, by a rounding of the cosines.
def test_a_bfloat16_cache_is_stripped_in_float32() -> None:
    for n in (1, 9):
        keys = mx.random.normal((2, n, 16)).astype(mx.bfloat16)
        at = mx.arange(1000, 1000 + n)
        eye = mx.broadcast_to(mx.eye(16), (2, 16, 16))
        got = map_layer(
            [keys],
            eye,
            heads=[[0], [1]],
            strip=[RopeSpec(16, base=1e4).table(at, inverse=True)],
            dtype=mx.float32,
        )
        want = oracle.strip(oracle.to_numpy(keys), np.array(at), RopeSpec(16, base=1e4))
        # 1e-4 is float32's angle at position 1000; bfloat16 cosines would be 4e-3 off.
        assert np.abs(np.array(got) - want).max() < 5e-4
        back = map_layer(
            [got], eye, heads=[[0], [1]], rotate=RopeSpec(16, base=1e4).table(at), dtype=mx.bfloat16
        )
        assert mx.array_equal(back, keys)


# nexusquant PR 12, omlx PR 2295: the whole head turned where RoPE is partial.
@pytest.mark.parametrize("dim", [24, 80, 96, 112])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, "proportional"])
def test_partial_rotary_leaves_the_rest_of_the_head_alone(dim: int, part: Any) -> None:
    if part == "proportional":
        quarter = dim // 8
        freqs = tuple(10.0**i for i in range(quarter)) + (float("inf"),) * (dim // 2 - quarter)
        spec = RopeSpec(dim, freqs=freqs)
    else:
        spec = RopeSpec(int(dim * part) // 2 * 2, base=1e4)
    at = mx.arange(300, 305)
    x = mx.random.normal((1, 2, 5, dim))
    keys = mx.fast.rope(
        x, spec.dims, traditional=False, base=spec.base, scale=1.0, offset=300,
        freqs=None if spec.freqs is None else mx.array(spec.freqs),
    )  # fmt: skip
    eye = mx.broadcast_to(mx.eye(dim), (2, dim, dim))
    table = spec.table(at, inverse=True)
    got = map_layer([keys], eye, heads=[[0], [1]], strip=[table])
    assert mx.allclose(got, x, atol=1e-4)
    back = map_layer([got], eye, heads=[[0], [1]], rotate=spec.table(at))
    assert mx.allclose(back, keys, atol=1e-4)
