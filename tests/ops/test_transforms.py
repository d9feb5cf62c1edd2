"""Gradients, jvp, vmap and export of the operation, against those of the reference."""

from __future__ import annotations

import mlx.core as mx
import oracle
import pytest

from kvgraft.models.rope import RopeSpec, RopeTable
from kvgraft.ops import reference
from kvgraft.ops.cases import BF16, F16, F32, Case, build
from kvgraft.ops.fused import explain, map_layer
from kvgraft.ops.quantized import AffineWeight

HALF = RopeSpec(64, base=1e4)
WIDE = RopeSpec(64, base=1e6)
PART = RopeSpec(16, True, base=1e4)
PLAIN = (
    Case("grad-values", cache=(F32,), weight=F32),
    Case("grad-keys", cache=(F32,), weight=F32, strip=(HALF,), rotate=WIDE),
    Case("grad-odd", tokens=5, sources=((2, 64), (4, 24)), target=(3, 80), cache=(F32,),
         weight=F32, strip=(PART,), rotate=PART, bias=False),
    Case("grad-local", sources=((4, 32),) * 3, target=(4, 64), plan="local", cache=(F32,),
         weight=F32, strip=(RopeSpec(32, base=1e4),), rotate=WIDE),
    Case("grad-grouped", sources=((4, 32),) * 2, target=(2, 32), plan="grouped", cache=(F32,),
         weight=F32),
    Case("grad-batch", batch=2, batched_tables=True, cache=(F32,), weight=F32, strip=(HALF,),
         rotate=WIDE),
    Case("grad-float16", cache=(F16,), weight=F16, strip=(HALF,), rotate=WIDE),
    Case("grad-mixed", cache=(BF16, F32), weight=BF16, out=F32),
    Case("grad-clamped", cache=(F32,), out=F16, scale=40_000.0, weight=F32),
)  # fmt: skip
PACKED = (
    Case("grad-bits8", cache=(F32,), weight=8, strip=(HALF,), rotate=WIDE),
    Case("grad-bits4", cache=(F16,), weight=4, group=32, plan="grouped", sources=((4, 32),) * 2),
)
# NMSE of a gradient written in that dtype.
LIMIT = {F32: 1e-11, F16: 1e-6, BF16: 2e-5}


@pytest.fixture(autouse=True, scope="module")
def cpu():
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield
    mx.set_default_device(before)


def close(got: mx.array, want: mx.array) -> bool:
    assert got.dtype == want.dtype and got.shape == want.shape
    return oracle.nmse(oracle.to_numpy(got), oracle.to_numpy(want)) <= LIMIT[got.dtype]


def parts(problem) -> tuple[list[mx.array], int]:
    """All arrays that have gradients, and how many of them are the weight's."""
    w = problem.weight
    weight = [w.scales, w.biases] if isinstance(w, AffineWeight) else [w]
    bias = [] if problem.bias is None else [problem.bias]
    return [*problem.sources, *weight, *bias], len(weight)


def function(operation, problem):
    """The operation as a function of :func:`parts`."""
    n = len(problem.sources)
    rest = {k: v for k, v in problem.arguments.items() if k not in ("sources", "weight", "bias")}
    w = problem.weight

    def call(*arrays: mx.array) -> mx.array:
        if isinstance(w, AffineWeight):
            weight = AffineWeight(w.packed, *arrays[n : n + 2], w.group_size, w.bits)
            bias = arrays[n + 2 :]
        else:
            weight, bias = arrays[n], arrays[n + 1 :]
        return operation(list(arrays[:n]), weight, *bias, **rest)

    return call


def directions(arrays):
    mx.random.seed(7)
    return [mx.random.normal(x.shape).astype(x.dtype) for x in arrays]


@pytest.mark.parametrize("case", [*PLAIN, *PACKED], ids=lambda c: c.name)
def test_vjp(case):
    problem = build(case)
    arrays, _ = parts(problem)
    want = function(reference.map_layer, problem)
    got = function(map_layer, problem)
    cotangent = directions([want(*arrays)])
    _, expected = mx.vjp(want, arrays, cotangent)
    _, found = mx.vjp(got, arrays, cotangent)
    assert len(found) == len(arrays)
    for a, b in zip(found, expected, strict=True):
        assert mx.abs(b).max() > 0
        assert close(a, b)


@pytest.mark.parametrize("case", [*PLAIN, *PACKED], ids=lambda c: c.name)
def test_jvp(case):
    problem = build(case)
    arrays, _ = parts(problem)
    tangents = [1e-4 * x for x in directions(arrays)]  # or "clamped" overflows float16
    _, (want,) = mx.jvp(function(reference.map_layer, problem), arrays, tangents)
    _, (got,) = mx.jvp(function(map_layer, problem), arrays, tangents)
    assert close(got, want)


def test_gradient_of_one_argument_only():
    """The usual case in training: weights and bias move, sources are data."""
    problem = build(PLAIN[1])
    n = len(problem.sources)
    arrays, _ = parts(problem)

    def loss(operation, weight, bias):
        y = function(operation, problem)(*arrays[:n], weight, bias)
        return mx.square(y).sum()

    for argnums in (0, 1, (0, 1)):
        got = mx.grad(lambda w, b: loss(map_layer, w, b), argnums=argnums)(*arrays[n:])
        want = mx.grad(lambda w, b: loss(reference.map_layer, w, b), argnums=argnums)(*arrays[n:])
        pairs = zip(got, want, strict=True) if isinstance(argnums, tuple) else [(got, want)]
        assert all(close(a, b) for a, b in pairs)


def test_gradient_of_rope_tables():
    problem = build(PLAIN[1])
    table = problem.rotate

    def loss(operation, cos, sin):
        rotate = RopeTable(cos, sin, table.traditional)
        return operation(**problem.arguments | {"rotate": rotate}).sum()

    got = mx.grad(lambda c, s: loss(map_layer, c, s), argnums=(0, 1))(table.cos, table.sin)
    want = mx.grad(lambda c, s: loss(reference.map_layer, c, s), argnums=(0, 1))(
        table.cos, table.sin
    )
    assert all(close(a, b) for a, b in zip(got, want, strict=True))


def test_packed_weights_have_no_gradient():
    problem = build(PACKED[0])
    w = problem.weight

    def loss(packed):
        weight = AffineWeight(packed, w.scales, w.biases, w.group_size, w.bits)
        return map_layer(problem.sources, weight).sum()

    with pytest.raises(ValueError, match="packed integers of quantised weights have no gradient"):
        mx.grad(loss)(w.packed)
    with pytest.raises(ValueError, match="dequantised weights"):
        mx.jvp(loss, [w.packed], [w.packed])


def test_transforms_compose():
    """Second derivatives, compiled gradients, gradients under vmap."""
    problem = build(Case("compose", tokens=4, cache=(F32,), weight=F32, rotate=WIDE))
    x, w = problem.sources[0], problem.weight

    def loss(operation, w, x):
        y = operation([x, problem.sources[1]], w, problem.bias, rotate=problem.rotate)
        return (y * y * y).sum()

    def ours(w, x):
        return loss(map_layer, w, x)

    def theirs(w, x):
        return loss(reference.map_layer, w, x)

    want = mx.grad(theirs)(w, x)
    assert close(mx.compile(mx.grad(ours))(w, x), want)
    second = [mx.grad(lambda w, f=f: mx.square(mx.grad(f)(w, x)).sum())(w) for f in (ours, theirs)]
    assert close(*second)
    xs = mx.stack([x, 2 * x, -x])
    got = mx.vmap(mx.grad(ours), in_axes=(None, 0))(w, xs)
    assert close(got, mx.stack([mx.grad(theirs)(w, one) for one in xs]))
    assert close(mx.grad(lambda w: mx.checkpoint(ours)(w, x))(w), want)


@pytest.mark.parametrize("case", [*PLAIN, *PACKED], ids=lambda c: c.name)
def test_vmap_over_everything(case):
    """All arrays mapped over at once, along different axes."""
    problem = build(case)
    arrays, _ = parts(problem)
    axes = tuple(i % x.ndim for i, x in enumerate(arrays))
    twice = [mx.stack([x, -0.5 * x], axis=a) for x, a in zip(arrays, axes, strict=True)]
    call = function(map_layer, problem)
    got = mx.vmap(call, in_axes=axes)(*twice)
    for i, factor in enumerate((1, -0.5)):
        want = call(*(factor * x for x in arrays))
        assert got[i].dtype == want.dtype and got[i].shape == want.shape
        error = oracle.nmse(oracle.to_numpy(got[i]), oracle.to_numpy(want))
        assert error <= LIMIT[want.dtype]


def test_vmap_over_packed_weights():
    problem = build(PACKED[0])
    w = problem.weight
    other = AffineWeight(w.packed[:, ::-1], w.scales, w.biases, w.group_size, w.bits)

    def call(packed):
        weight = AffineWeight(packed, w.scales, w.biases, w.group_size, w.bits)
        return map_layer(problem.sources, weight)

    got = mx.vmap(call)(mx.stack([w.packed, other.packed]))
    for i, weight in enumerate((w, other)):
        assert close(got[i], map_layer(problem.sources, weight))


def test_export(tmp_path):
    """MLX serialises its own primitives only: the composed operation goes, the kernel not."""
    problem = build(Case("export", cache=(F32,), weight=F32, strip=(HALF,), rotate=WIDE))
    path = str(tmp_path / "map.mlxfn")
    # What is not evaluated is exported as the operations that make it.
    mx.eval([(t.cos, t.sin) for t in (*problem.strip, problem.rotate)])

    def call(x, y, *, composed):
        arguments = problem.arguments | {"sources": [x, y]}
        return map_layer(**arguments, composed=composed)

    mx.export_function(path, lambda x, y: call(x, y, composed=True), *problem.sources)
    (got,) = mx.import_function(path)(*problem.sources)
    assert close(got, call(*problem.sources, composed=False))
    with pytest.raises(ValueError, match="serialize primitive MapLayer"):
        mx.export_function(path, lambda x, y: call(x, y, composed=False), *problem.sources)


def test_no_features_are_composed():
    """A head mapping that lists no heads leaves the bias alone, on every device."""
    x, bias = mx.ones((2, 3, 4)), mx.array([[1.0, 2.0]])
    arguments = ([x], mx.zeros((1, 0, 2)), bias)
    assert explain(*arguments, heads=[[]]) == "composed"
    got = map_layer(*arguments, heads=[[]])
    assert got.tolist() == [[[1.0, 2.0]] * 3]
