"""Our kernel through our shim against MLX's matmul through Apple's compiler."""

from __future__ import annotations

import struct
from importlib.metadata import version

import numpy as np
import pytest
from emulator import Library, air
from emulator.toolchain import INSTALL_LLVM, LLVM
from map_layer import DIRECTORY, SOURCE, run

from kvgraft.ops.cases import F32, Case, build

pytestmark = pytest.mark.tools(*LLVM, install=INSTALL_LLVM)

GEMM = "steel_gemm_fused_nn_float32_float32_bm64_bn64_bk16_wm2_wn2"


# The one family in the library that calls simdgroup_load and simdgroup_store.
DELTA = "gated_delta_fused_chunk_float_128_128_16_16_8"


@pytest.fixture(scope="module")
def kernels():
    found = air.functions(air.download(version("mlx")))
    assert len(found) > 10_000
    return found


@pytest.fixture(scope="module")
def apple(kernels):
    return air.AirLibrary(kernels[GEMM], GEMM)


def matmul(apple: air.AirLibrary, x: np.ndarray, w: np.ndarray, seed: int) -> np.ndarray:
    (m, k), n = x.shape, w.shape[1]
    tiles_n, tiles_m = -(-n // 64), -(-m // 64)
    parameters = struct.pack(
        "<8i3q4i", m, n, k, k, n, n, tiles_n, tiles_m, 0, 0, 0, 0, k // 16, 0, 0
    )
    aligned = [m % 64 == 0, n % 64 == 0, k % 16 == 0]
    # has_batch, use_out_source, do_axpby, then whether each size fits the tile.
    constants = dict(zip((10, 100, 110, 200, 201, 202), [0, 0, 0, *aligned], strict=True))
    result = apple.launch(
        GEMM,
        {0: x.tobytes(), 1: w.tobytes(), 2: bytes(4), 3: bytes(4 * m * n), 4: parameters,
         5: bytes(24), 6: bytes(4), 7: bytes(8)},
        (tiles_n, tiles_m, 1),
        128,
        constants={i: int(v) for i, v in constants.items()},
        outputs={3: "update"},
        seed=seed,
        checks=False,
    )  # fmt: skip
    assert result.report == ""
    assert result.barriers and result.multiplications
    return np.frombuffer(result.outputs[3], np.float32).reshape(m, n)


@pytest.mark.parametrize("tokens", [64, 50, 128, 17])
def test_bit_for_bit(apple, tokens):
    case = Case("air", tokens=tokens, sources=((1, 64), (1, 64)), target=(1, 64), cache=(F32,),
                weight=F32, bias=False)  # fmt: skip
    problem = build(case)
    ours, _ = run(Library(SOURCE.read_text(), DIRECTORY), problem, (64, 64))
    x = np.concatenate([np.array(s[0]) for s in problem.sources], axis=-1)
    w = np.array(problem.weight[0])
    for seed in (0, 1):
        theirs = matmul(apple, x, w, seed)
        np.testing.assert_allclose(theirs, x.astype(np.float64) @ w, rtol=1e-4, atol=1e-5)
    # Half of the input at a time, since octets are our outermost loop: the order
    # of the sum is then the same in both.
    order = np.arange(128).reshape(2, 2, 32).swapaxes(0, 1).ravel()
    theirs = matmul(apple, np.ascontiguousarray(x[:, order]), np.ascontiguousarray(w[order]), 1)
    assert (ours[0].astype(np.float32) == theirs).all()
    # So the comparison can fail: another order gives other bits.
    assert not (ours[0].astype(np.float32) == matmul(apple, x, w, 1)).all()


def gated_delta(q, k, v, state, g, beta):
    """The gated delta rule token by token, in float64: what that kernel computes in chunks.

    ``q``, ``k`` and ``v`` are ``[B, T, H, D]``, ``g`` and ``beta`` ``[B, T, H]``, the
    state ``[B, H, D of v, D of k]``.
    """
    s = state.astype(np.float64)
    out = np.zeros(v.shape)
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None]
        kept = np.einsum("bhvk,bhk->bhv", s, k[:, t])
        s = s + np.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - kept), k[:, t])
        out[:, t] = np.einsum("bhvk,bhk->bhv", s, q[:, t])
    return out, s


@pytest.mark.parametrize("tokens", [16, 8, 19])
def test_loads_and_stores(kernels, tokens):
    """Where simdgroup_load and simdgroup_store put the elements of a matrix.

    The kernel keeps its state in matrices that it loads and stores, transposed, and
    multiplies them with matrices that it fills element by element, lane by lane. So its
    result is the delta rule's only if both have the elements in the same places.
    """
    apple = air.AirLibrary(kernels[DELTA], DELTA)
    rng = np.random.default_rng(3)
    heads, dim = 16, 128
    q, k, v = (rng.standard_normal((1, tokens, heads, dim)).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    state = rng.standard_normal((1, heads, dim, dim)).astype(np.float32)
    g = rng.uniform(0.5, 1, (1, tokens, heads)).astype(np.float32)
    beta = rng.uniform(0, 1, (1, tokens, heads)).astype(np.float32)
    buffers = [x.tobytes() for x in (q, k, v, state, g, beta)]
    buffers += [bytes(v.nbytes), bytes(state.nbytes), struct.pack("<i", tokens)]
    result = apple.launch(
        DELTA, dict(enumerate(buffers)), (1, dim // 8, heads), 32, constants={},
        outputs={6: "update", 7: "update"}, checks=False,
    )  # fmt: skip
    assert result.report == "" and result.multiplications
    y, after = (np.frombuffer(result.outputs[i], np.float32) for i in (6, 7))
    want_y, want_after = gated_delta(q, k, v, state, g, beta)
    np.testing.assert_allclose(y.reshape(want_y.shape), want_y, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(after.reshape(want_after.shape), want_after, rtol=2e-3, atol=2e-3)
    # So the comparison can fail: a state the other way round gives something else.
    turned, _ = gated_delta(q, k, v, state.swapaxes(2, 3), g, beta)
    assert np.abs(turned - want_y).max() > 1
