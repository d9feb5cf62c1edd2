"""The Metal kernels on a GPU, against the float64 oracle.

These are the tests that need a Mac. There they never skip: no GPU is a failure.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import oracle
import pytest

from kvgraft import _ext
from kvgraft.models.rope import RopeSpec
from kvgraft.ops import fused as ops
from kvgraft.ops import reference, selftest
from kvgraft.ops.cases import BF16, CASES, F16, F32, HALF, NMSE_LIMIT, Case, build

if sys.platform != "darwin":
    pytest.skip("Metal is macOS's: these run on a Mac", allow_module_level=True)
pytestmark = pytest.mark.metal
KEYS = Case("metal-keys", strip=(HALF,), rotate=RopeSpec(64, base=1e6))
WIDE = RopeSpec(128, base=1e6)
MORE = (
    # Enough tiles for the largest on any Mac, and the layers of a real pair.
    Case("metal-64x64", tokens=3000, sources=((4, 128),) * 2, target=(8, 128), strip=(WIDE,),
         rotate=WIDE),
    Case("metal-64x32", tokens=3000, sources=((2, 80),) * 2, target=(8, 80), plan="local"),
    Case("metal-qwen3-local", tokens=700, sources=((8, 128),) * 8, target=(8, 128), plan="local",
         strip=(WIDE,), rotate=WIDE),
    Case("metal-35-layers", tokens=70, sources=((2, 32),) * 35, strip=(RopeSpec(32, base=1e4),)),
    Case("metal-few", tokens=9, plan="grouped", strip=(HALF,), rotate=HALF, cache=(BF16,)),
    Case("metal-few-bits4", tokens=3, weight=4, strip=(HALF,), rotate=HALF),
    Case("metal-few-bits8", tokens=16, weight=8, group=32, plan="local"),
    Case("metal-odd-bits", sources=((1, 68), (1, 60)), target=(2, 12), weight=4, group=32),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def gpu():
    assert mx.metal.is_available(), "this Mac shows no Metal device, so nothing was tested"
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.gpu))
    yield
    mx.set_default_device(before)


def path() -> str:
    """What the op should take on this GPU."""
    return "composed" if _ext.metal_status() else "metal"


def on_cpu(case: Case):
    with mx.stream(mx.cpu):
        return build(case)


def check(got, problem):
    assert got.dtype == problem.result_dtype
    with mx.stream(mx.cpu):
        want = oracle.map_layer(**problem.plain())
        got = oracle.to_numpy(got)
    assert got.shape == want.shape
    if problem.result_dtype != F32:
        limit = float(mx.finfo(problem.result_dtype).max)
        want = want.clip(-limit, limit)
    assert np.isfinite(got).all()
    limit = NMSE_LIMIT[problem.result_dtype]
    if path() == "composed":
        limit = max(limit, selftest.COMPOSED_ON_GPU)
    assert oracle.nmse(got, want) <= limit


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda c: c.name)
def test_against_float64(case):
    problem = on_cpu(case)
    assert ops.explain(**problem.arguments) == path()
    check(ops.map_layer(**problem.arguments), problem)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 17, 31, 32, 33, 63, 64, 65, 129])
@pytest.mark.parametrize("weight", [F16, 4, 8])
def test_lengths_around_the_edges_of_tiles(tokens, weight):
    problem = on_cpu(replace(KEYS, name=f"metal-{tokens}", tokens=tokens, weight=weight))
    check(ops.map_layer(**problem.arguments), problem)


@pytest.mark.parametrize("case", CASES[::7], ids=lambda c: c.name)
def test_the_same_bits_every_time(case):
    """A race on the GPU shows as a result that changes."""
    problem = on_cpu(case)
    first = np.array(ops.map_layer(**problem.arguments).astype(F32))
    for _ in range(10):
        again = np.array(ops.map_layer(**problem.arguments).astype(F32))
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda c: c.name)
def test_gpu_and_cpu_agree(case):
    problem = on_cpu(case)
    gpu = oracle.to_numpy(ops.map_layer(**problem.arguments))
    cpu = oracle.to_numpy(ops.map_layer(**problem.arguments, stream=mx.cpu))
    limit = 2 * NMSE_LIMIT[problem.result_dtype]
    assert oracle.nmse(gpu, cpu) <= (limit if path() == "metal" else 2e-6)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_saturates_and_keeps_nan(dtype):
    big = mx.full((1, 20, 4), 6e4, dtype=F16)
    assert (ops.map_layer([big], mx.ones((1, 4, 4), dtype=F16)) == 65504).all()
    x = np.zeros((1, 20, 4), dtype=np.float32)
    x[0, 7, 2] = np.nan
    got = ops.map_layer([mx.array(x)], mx.ones((1, 4, 4)), dtype=dtype)
    got = np.isnan(np.array(got.astype(F32)))
    assert got[:, 7].all() and not np.delete(got, 7, axis=1).any()


def test_chained_with_other_operations():
    """Nothing is read before it is written, nor written before it was read."""
    problem = on_cpu(KEYS)
    rest = problem.arguments
    sources = rest.pop("sources")

    def run(map_layer, xs):
        for _ in range(4):
            y = map_layer([x * 0.5 for x in xs], **rest)
            xs = [x + y * 0.1 for x in xs]
        return xs[0]

    want = oracle.to_numpy(run(reference.map_layer, sources))
    for function in (lambda xs: run(ops.map_layer, xs),
                     mx.compile(lambda xs: run(ops.map_layer, xs))):  # fmt: skip
        assert oracle.nmse(oracle.to_numpy(function(sources)), want) < 1e-5


def test_streams_threads_and_async_eval():
    problem = on_cpu(KEYS)
    want = np.array(ops.map_layer(**problem.arguments).astype(F32))
    wrong = []

    def run():
        with mx.stream(mx.new_stream(mx.gpu)):
            for _ in range(10):
                x = ops.map_layer(**problem.arguments)
                mx.async_eval(x)
                if not np.array_equal(np.array(x.astype(F32)), want):
                    wrong.append(x)

    run()
    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_vmap():
    problems = [on_cpu(replace(KEYS, name=f"metal-vmap{i}", cache=(F32,))) for i in range(3)]
    rest = problems[0].arguments
    rest.pop("sources")
    stacked = [mx.stack([p.sources[j] for p in problems]) for j in range(2)]
    got = mx.vmap(lambda x, y: ops.map_layer([x, y], **rest))(*stacked)
    for i, problem in enumerate(problems):
        assert mx.allclose(got[i], ops.map_layer(problem.sources, **rest), atol=1e-5)


def test_what_the_kernel_refuses_is_composed():
    problem = on_cpu(Case("metal-refused", sources=((2, 48), (2, 48)), target=(2, 64)))
    plan = [[h % 2] * 600 for h in range(2)]
    weight = mx.ones((2, 2 * 600 * 48, 8), dtype=F16) * 1e-3
    assert ops.explain(problem.sources, weight, heads=plan) == "composed"
    got = ops.map_layer(problem.sources, weight, heads=plan)
    want = ops.map_layer(problem.sources, weight, heads=plan, stream=mx.cpu)
    assert mx.allclose(got, want, atol=2e-2)


def test_selftest_runs_the_kernels():
    outcomes = list(selftest.run(CASES[::9]))
    assert [o for o in outcomes if not o.ok] == []
    assert ("metal" if path() == "metal" else "composed on gpu") in {o.path for o in outcomes}
