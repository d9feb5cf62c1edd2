"""The fused operation against the reference and the float64 oracle."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import oracle
import pytest

from kvgraft import _ext
from kvgraft.errors import ArgumentError, GeometryError
from kvgraft.models.rope import RopeSpec
from kvgraft.ops import fused as ops
from kvgraft.ops import reference
from kvgraft.ops.cases import BF16, CASES, F16, F32, NMSE_LIMIT, Case, build
from kvgraft.ops.quantized import AffineWeight


@pytest.fixture(autouse=True, scope="module")
def cpu():
    """On a Mac, too: tests/ops/test_metal.py has the GPU's."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)


def composed(**arguments):
    """The op's other path, which MLX's own operations make up."""
    return ops.map_layer(**arguments, composed=True)


def check(got, problem):
    assert got.dtype == problem.result_dtype
    want = oracle.map_layer(**problem.plain())
    assert got.shape == want.shape
    if got.dtype != F32:
        limit = float(mx.finfo(got.dtype).max)
        want = want.clip(-limit, limit)
    got = oracle.to_numpy(got)
    assert np.isfinite(got).all()
    assert oracle.nmse(got, want) <= NMSE_LIMIT[problem.result_dtype]


@pytest.fixture(params=_ext.cpu_isas())
def isa(request):
    """Each instruction set that can run here, the plain one always."""
    before = _ext.cpu_isa()
    _ext.use_cpu_isa(request.param)
    yield request.param
    _ext.use_cpu_isa(before)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_float64(case, isa):
    problem = build(case)
    out = ops.map_layer(**problem.arguments)
    mx.eval(out)
    check(out, problem)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_composed_against_float64(case):
    problem = build(case)
    check(composed(**problem.arguments), problem)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_reference(case):
    problem = build(case)
    got = ops.map_layer(**problem.arguments)
    want = reference.map_layer(**problem.arguments)
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = oracle.to_numpy(got), oracle.to_numpy(want)
    # Both round a float32 sum, so they may land on neighbouring values.
    assert oracle.nmse(got, want) <= 2 * NMSE_LIMIT[problem.result_dtype]


KEYS = Case(
    "keys",
    strip=(RopeSpec(64, base=1e4),),
    rotate=RopeSpec(64, base=1e6),
    sources=((2, 64), (4, 64)),
    target=(3, 80),
)


def test_saturates_and_keeps_nan(isa):
    big = mx.full((1, 2, 4), 6e4, dtype=F16)
    ones = mx.ones((1, 4, 4), dtype=F16)
    assert (ops.map_layer([big], ones) == 65504).all()
    assert (ops.map_layer([-big], ones) == -65504).all()
    wide = ops.map_layer([big.astype(F32) * 1e34], ones * 10, dtype=BF16)
    assert (wide == float(mx.finfo(BF16).max)).all()
    # An infinite input is clamped in a narrow result, kept in float32.
    infinite = mx.array([[[np.inf], [-np.inf]]])
    one = mx.ones((1, 1, 1))
    assert ops.map_layer([infinite], one, dtype=F16).tolist() == [[[65504], [-65504]]]
    assert ops.map_layer([infinite], one).tolist() == [[[np.inf], [-np.inf]]]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_nan_stays_where_it_was(dtype, isa):
    problem = build(KEYS)
    x = mx.array(problem.sources[1])
    x[1, 5, 7] = float("nan")
    problem.sources[1] = x
    got = np.isnan(oracle.to_numpy(ops.map_layer(**problem.arguments | {"dtype": dtype})))
    assert got[:, 5].all()
    assert not np.delete(got, 5, axis=1).any()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_narrow_value_passes_through(dtype, isa):
    """One feature times one: conversions are exact for all 65,536 bit patterns."""
    bits = mx.array(np.arange(65536, dtype=np.uint16))
    x = bits.view(dtype).reshape(1, 65536, 1)
    got = ops.map_layer([x], mx.ones((1, 1, 1), dtype=dtype))
    wide = ops.map_layer([x], mx.ones((1, 1, 1), dtype=dtype), dtype=F32)
    as_weight = ops.map_layer([mx.ones((1, 1, 1))], x.reshape(1, 1, 65536)).reshape(1, -1, 1)
    want = np.array(x.astype(F32))
    limit = float(mx.finfo(dtype).max)
    np.testing.assert_array_equal(np.array(wide), want)
    np.testing.assert_array_equal(np.array(as_weight), want)
    np.testing.assert_array_equal(np.array(got.astype(F32)), want.clip(-limit, limit))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rounds_to_nearest_even(dtype, isa):
    """Midpoints between narrow values, and their float32 neighbours."""
    bits = np.arange(0, 0x7C00 if dtype == F16 else 0x7F80, dtype=np.uint16)
    low = np.array(mx.array(bits).view(dtype).astype(F32))
    middle = ((low[:-1].astype(np.float64) + low[1:]) / 2).astype(np.float32)
    x = np.concatenate([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)])
    x = mx.array(np.concatenate([x, -x]).reshape(1, -1, 1))
    got = ops.map_layer([x], mx.ones((1, 1, 1)), dtype=dtype)
    assert (got == x.astype(dtype)).all()


def test_equal_tables_are_passed_once(tmp_path):
    problem = build(KEYS)
    assert problem.strip[0] is problem.strip[1]
    out = ops.map_layer(**problem.arguments)
    # Inputs of the node: two sources, weight, bias, cos and sin of two tables.
    mx.export_to_dot(str(tmp_path / "graph.dot"), out)
    node = re.findall(r'label ?="MapLayer"', (tmp_path / "graph.dot").read_text())
    assert len(node) == 1
    edges = re.findall(r"-> (\d+)", (tmp_path / "graph.dot").read_text())
    assert max(edges.count(e) for e in edges) == 8


def test_is_lazy_and_compiles():
    problem = build(KEYS)
    rest = problem.arguments
    sources = rest.pop("sources")

    def run(*xs):
        doubled = [x * 2 for x in xs]
        first = ops.map_layer(doubled, **rest)
        second = ops.map_layer(doubled, **rest)  # merged with the first
        return first + second * 0

    want = run(*sources)
    for shapeless in (False, True):
        got = mx.compile(run, shapeless=shapeless)(*sources)
        assert mx.array_equal(got, want)


def test_shapeless_compile_takes_other_lengths():
    problem = build(Case("values", cache=(F32,), weight=F32))
    function = mx.compile(
        lambda x, y: ops.map_layer([x, y], problem.weight, problem.bias), shapeless=True
    )
    for n in (5, 33, 64):
        other = build(Case("values", cache=(F32,), weight=F32, tokens=n))
        got = function(*other.sources)
        want = reference.map_layer(other.sources, problem.weight, problem.bias)
        assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 2)])
def test_vmap_over_sources(batch, axes):
    case = Case("vmap", strip=KEYS.strip, rotate=KEYS.rotate, batch=batch, cache=(F32,))
    problems = [build(Case(**{**vars(case), "name": f"vmap{i}"})) for i in range(3)]
    rest = problems[0].arguments
    shared = rest.pop("sources")
    stacked = [
        shared[j] if axis is None else mx.stack([p.sources[j] for p in problems], axis=axis)
        for j, axis in enumerate(axes)
    ]
    got = mx.vmap(lambda x, y: ops.map_layer([x, y], **rest), in_axes=axes)(*stacked)
    for i, problem in enumerate(problems):
        own = [shared[j] if axes[j] is None else problem.sources[j] for j in range(2)]
        assert mx.allclose(got[i], ops.map_layer(own, **rest), atol=1e-6)


@pytest.mark.parametrize("batch", [0, 2])
def test_vmap_over_tables_and_weights(batch):
    problem = build(Case("vmap", rotate=KEYS.rotate, batch=batch, cache=(F32,), weight=F32))
    positions = mx.array([[0], [50], [7]]) + mx.arange(33)
    tables = [KEYS.rotate.table(p) for p in positions]
    cos, sin = (mx.stack([getattr(t, k) for t in tables]) for k in ("cos", "sin"))

    def turned(c, s):
        table = type(tables[0])(c, s)
        return ops.map_layer(problem.sources, problem.weight, rotate=table)

    got = mx.vmap(turned)(cos, sin)
    for i, table in enumerate(tables):
        want = ops.map_layer(problem.sources, problem.weight, rotate=table)
        assert mx.allclose(got[i], want, atol=1e-6)

    weights = mx.stack([problem.weight, problem.weight * 2])
    got = mx.vmap(lambda w: ops.map_layer(problem.sources, w))(weights)
    for i in range(2):
        assert mx.allclose(got[i], ops.map_layer(problem.sources, weights[i]), atol=1e-6)


def test_streams_and_async_eval():
    problem = build(KEYS)
    want = ops.map_layer(**problem.arguments)
    mx.eval(want)
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    results = []
    for i in range(60):
        x = ops.map_layer(**problem.arguments, stream=streams[i % 3])
        mx.async_eval(x)
        results.append(x)
    with mx.stream(streams[0]):
        results.append(ops.map_layer(**problem.arguments))
    # A result that crosses streams is waited for.
    chained = ops.map_layer([results[0].astype(F32)], mx.ones((1, 240, 4)), stream=streams[1])
    assert mx.isfinite(chained).all()
    for x in results:
        assert mx.array_equal(x, want)


def test_threads():
    want = np.array(ops.map_layer(**build(KEYS).arguments).astype(F32))
    wrong = []

    def run():
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(10):
                got = np.array(ops.map_layer(**build(KEYS).arguments).astype(F32))
                if not np.array_equal(got, want):
                    wrong.append(got)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_thread_limit():
    problem = build(Case("limit", tokens=300))
    default = ops.num_threads()
    want = ops.map_layer(**problem.arguments)
    mx.eval(want)
    try:
        for count in (1, 2, 5):
            ops.set_num_threads(count)
            assert ops.num_threads() == count
            assert mx.array_equal(ops.map_layer(**problem.arguments), want)
    finally:
        ops.set_num_threads(0)
    assert ops.num_threads() == default >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_a_constant():
    """Beyond inputs, tables and the result, 16 MB however long the context.

    The kernel's own buffers are not MLX's, so the process is asked.
    """
    code = """
import mlx.core as mx
from kvgraft.ops import fused as ops
from kvgraft.models.rope import RopeSpec

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(l for l in lines if l.startswith("VmHWM")).split()[1])

def run(n):
    sources = [mx.ones((4, n, 64), dtype=mx.float16) * i for i in range(4)]
    weight = mx.ones((4, 4 * 4 * 64, 64), dtype=mx.float16)
    bias = mx.ones((4, 64))
    rope = RopeSpec(64, base=1e4)
    strip, rotate = rope.table(mx.arange(n), inverse=True), rope.table(mx.arange(n))
    mx.eval(sources, weight, bias, strip.cos, strip.sin, rotate.cos, rotate.sin)
    mx.clear_cache()
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = peak()
    out = ops.map_layer(sources, weight, bias, strip=[strip] * 4, rotate=rotate)
    mx.eval(out)
    return peak() - before - out.nbytes

run(10)
print(run(20000))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A float32 copy of what the sources give would take 82 MB.
    assert int(done.stdout) < 16e6


def test_inputs_may_be_dropped_and_are_not_aliased():
    x = mx.ones((1, 8, 4))
    eye = mx.eye(4)[None]
    out = ops.map_layer([x], eye)
    mx.eval(out)
    x += 1
    assert (out == 1).all()
    out = ops.map_layer([mx.ones((1, 8, 4)) * 3], eye)
    assert (out == 3).all()


def test_unusual_weights(isa):
    problem = build(Case("values", cache=(F32,), weight=F32))
    want = ops.map_layer(problem.sources, problem.weight, problem.bias)
    swapped = mx.contiguous(problem.weight.swapaxes(0, 2)).swapaxes(0, 2)
    stepped = mx.repeat(problem.weight, 2, axis=2)[..., ::2]
    for w in (swapped, stepped):
        assert mx.allclose(ops.map_layer(problem.sources, w, problem.bias), want, atol=1e-6)
    one_row = mx.broadcast_to(problem.bias[:, :1], problem.bias.shape)
    got = ops.map_layer(problem.sources, problem.weight, one_row)
    assert mx.allclose(
        got, reference.map_layer(problem.sources, problem.weight, one_row), atol=1e-5
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_with_strides(bits, isa):
    problem = build(Case("packed", weight=bits, cache=(F32,)))
    w = problem.weight
    parts = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (w.packed, w.scales, w.biases)]
    other = AffineWeight(*parts, w.group_size, w.bits)
    want = ops.map_layer(problem.sources, w)
    assert mx.allclose(ops.map_layer(problem.sources, other), want, atol=1e-6)


def test_instruction_set_is_chosen_by_name():
    assert "plain" in _ext.cpu_isas()
    with pytest.raises(ValueError, match="It has: .*plain"):
        _ext.use_cpu_isa("vax")
    code = "from kvgraft import _ext; print(_ext.cpu_isa())"
    for name, want in (*((n, n) for n in _ext.cpu_isas()), ("", _ext.cpu_isas()[0])):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"KVGRAFT_CPU_ISA": name},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [want], done.stderr
    code = (
        "import mlx.core as mx; from kvgraft.ops.fused import map_layer; "
        "map_layer([x:=mx.ones((1,1,1))], x)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KVGRAFT_CPU_ISA": "vax"},
        capture_output=True,
        text=True,
    )
    assert "KVGRAFT_CPU_ISA asks for the instruction set 'vax'" in done.stderr


@pytest.mark.parametrize("tokens", [1, 3, 6, 7, 30])
@pytest.mark.parametrize("weight", [F16, BF16, F32, 4, 8])
def test_few_tokens(tokens, weight, isa):
    """Weights are read in place for a few tokens; odd ends take other ways."""
    case = Case("few", tokens=tokens, weight=weight, target=(3, 80), plan="local")
    problem = build(case)
    check(ops.map_layer(**problem.arguments), problem)


def test_explain():
    problem = build(KEYS)
    assert ops.explain(**problem.arguments) == "cpu"
    assert ops.explain(**problem.arguments, stream=mx.cpu) == "cpu"


def test_refuses_what_does_not_fit():
    problem = build(KEYS)
    rest = problem.arguments
    with pytest.raises(GeometryError, match="features"):
        ops.map_layer(**rest | {"sources": rest["sources"][:1], "strip": rest["strip"][:1]})
    with pytest.raises(GeometryError, match="no source"):
        ops.map_layer([], problem.weight)
    with pytest.raises(GeometryError, match="bias"):
        ops.map_layer(**rest | {"bias": problem.bias[:1]})
    with pytest.raises(GeometryError, match="dtype"):
        ops.map_layer(**rest | {"sources": [s.astype(mx.int32) for s in problem.sources]})


def ext(**changes):
    arguments = {
        "sources": [mx.ones((2, 5, 4))],
        "weight": mx.ones((2, 8, 6)),
        "scales": None,
        "biases": None,
        "group_size": 0,
        "bits": 0,
        "bias": None,
        "heads": None,
        "strip": [],
        "rotate": None,
        "dtype": None,
    }
    return _ext.map_layer(**arguments | changes)


def table(n=5, pairs=2, batch=()):
    return mx.ones((*batch, n, pairs)), mx.ones((*batch, n, pairs)), False


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": []},
        {"sources": [mx.ones((5, 4))]},
        {"sources": [mx.ones((2, 5, 4)), mx.ones((2, 6, 4))]},
        {"sources": [mx.ones((2, 5, 4), dtype=mx.int32)]},
        {"weight": mx.ones((8, 6))},
        {"weight": mx.ones((2, 9, 6))},
        {"weight": mx.ones((2, 8, 6), dtype=mx.int32)},
        {"bias": mx.ones((2, 5))},
        {"bias": mx.ones((2, 6), dtype=mx.int32)},
        {"heads": [[0, 1]]},
        {"heads": [[0, 1], [0]]},
        {"heads": [[0, 1], [0, 2]]},
        {"heads": [[0, 1], [0, -1]]},
        {"strip": [table(), table()]},
        {"strip": [table(n=4)]},
        {"strip": [table(pairs=3)]},
        {"strip": [table(batch=(1,))]},
        {"rotate": table(pairs=4)},
        {"rotate": (mx.ones((5, 2)), mx.ones((5, 1)), False)},
        {"dtype": mx.int32},
        {"bits": 8, "group_size": 4},
        {"bits": 3, "group_size": 4, "weight": mx.zeros((2, 6, 2), dtype=mx.uint32)},
        {"bits": 8, "group_size": 0, "weight": mx.zeros((2, 6, 2), dtype=mx.uint32)},
        {
            "bits": 8,
            "group_size": 8,
            "weight": mx.zeros((2, 6, 2), dtype=mx.uint32),
            "scales": mx.ones((2, 6, 2)),
            "biases": mx.ones((2, 6, 1)),
        },
    ],
    ids=lambda c: "-".join(c) if isinstance(c, dict) else None,
)
def test_extension_guards_memory_by_itself(changes):
    with pytest.raises(ValueError, match="map_layer"):
        ext(**changes)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite_sees_every_element_of_any_layout(dtype: mx.Dtype, bad: float):
    base = np.zeros((3, 4, 70), dtype=np.float32)
    base[0, 0, :4] = [np.finfo(np.float16).max, -np.finfo(np.float16).max, -0.0, 1e-7]
    layouts = {
        "whole": lambda x: x,
        "transposed": lambda x: x.swapaxes(0, 2),
        "heads swapped": lambda x: x.transpose(1, 0, 2),
        "every other": lambda x: x[:, ::2, ::3],
        "backwards": lambda x: x[::-1, :, ::-1],
        "broadcast": lambda x: mx.broadcast_to(x[:, :, :1], (3, 4, 70)),
        "part": lambda x: x[1:, 2:, 5:41],
        "scalar": lambda x: x[2, 3, 69],
    }
    places = [(0, 0, 0), (0, 0, 69), (1, 2, 5), (1, 2, 6), (2, 3, 40), (2, 3, 69), (2, 2, 33)]
    for name, layout in layouts.items():
        assert _ext.all_finite(layout(mx.array(base).astype(dtype))), name
        for place in places:
            spoiled = base.copy()
            spoiled[place] = bad
            x = layout(mx.array(spoiled).astype(dtype))
            assert _ext.all_finite(x) == bool(mx.isfinite(x).all().item()), (name, place)


def test_all_finite_of_long_rows_nothing_and_other_dtypes():
    x = np.zeros(10_001, dtype=np.float32)
    assert _ext.all_finite(mx.array(x))
    for place in (0, 4095, 4096, 8192, 10_000):
        x[:] = 0
        x[place] = np.nan
        assert not _ext.all_finite(mx.array(x))
    assert _ext.all_finite(mx.zeros((0, 4)))
    assert _ext.all_finite(mx.zeros((4, 0, 2), dtype=mx.float16))
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        _ext.all_finite(mx.zeros(3, dtype=mx.int32))


@pytest.mark.parametrize("count", [-1, 1.5, "2", None])
def test_a_limit_of_threads_is_a_number(count):
    before = ops.num_threads()
    with pytest.raises(ArgumentError, match="number of threads"):
        ops.set_num_threads(count)
    assert ops.num_threads() == before
