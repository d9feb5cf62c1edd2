"""The Metal kernels, run on the CPU, against the float64 oracle."""

from __future__ import annotations

import re
import struct
import zlib

import mlx.core as mx
import numpy as np
import oracle
import pytest
from emulator import EmulatorError
from map_layer import DIRECTORY, FULL, MAX_SOURCES, SOURCE, TILES, Library, run

from kvgraft.models.rope import RopeSpec
from kvgraft.ops.cases import BF16, CASES, F16, F32, GEOMETRIES, HALF, NMSE_LIMIT, Case, build

KEYS = Case("metal-keys", strip=(HALF,), rotate=RopeSpec(64, base=1e6))
MORE = (
    Case("metal-many-layers", sources=((2, 32),) * 19, strip=(RopeSpec(32, base=1e4),)),
    Case("metal-few", tokens=9, plan="grouped", strip=(HALF,), rotate=HALF, cache=(BF16,)),
    Case("metal-few-bits4", tokens=3, weight=4, strip=(HALF,), rotate=HALF),
    Case("metal-few-bits8", tokens=16, weight=8, group=32, plan="local"),
    Case("metal-few-odd", tokens=5, sources=((2, 7), (1, 9)), target=(3, 5)),
    Case("metal-few-batch", tokens=4, batch=2, batched_tables=True, strip=(HALF,), rotate=HALF),
    Case("metal-few-d256", tokens=2, sources=((1, 256),), target=(1, 256)),
    Case("metal-odd-bits", sources=((1, 68), (1, 60)), target=(2, 12), weight=4, group=32),
)
ALL = tuple(c for c in (*CASES, *MORE) if c.tokens)


@pytest.fixture(scope="module")
def library():
    return Library(SOURCE.read_text(), DIRECTORY)


def tiles_of(case: Case) -> list[tuple[int, int] | None]:
    """The kernels that a case runs through: all, or one that the name picks."""
    tiles: list[tuple[int, int] | None] = [*TILES]
    if case.tokens <= 16:
        tiles.append(None)
    if FULL:
        return tiles
    if case.tokens <= 16:
        return [None, tiles[zlib.crc32(case.name.encode()) % 4]]
    return [tiles[zlib.crc32(case.name.encode()) % 4]]


def check(problem, got):
    want = oracle.map_layer(**problem.plain())
    assert got.shape == want.shape
    if problem.result_dtype != F32:
        limit = float(mx.finfo(problem.result_dtype).max)
        want = want.clip(-limit, limit)
    assert np.isfinite(got).all()
    assert oracle.nmse(got, want) <= NMSE_LIMIT[problem.result_dtype]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_against_float64(library, case):
    problem = build(case)
    for tile in tiles_of(case):
        got, _ = run(library, problem, tile, seed=1)
        check(problem, got)


@pytest.mark.parametrize("tile", [*TILES, None], ids=str)
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_any_order_of_threads_gives_the_same_bits(library, tile, bits):
    case = Case("metal-order", tokens=13, strip=(HALF,), rotate=HALF, weight=bits or F16)
    problem = build(case)
    first, _ = run(library, problem, tile, seed=0)
    check(problem, first)
    for seed, preempt in ((1, 0), (2, 0), (3, 200), (4, 50)):
        again, _ = run(library, problem, tile, seed=seed, preempt=preempt)
        assert (again == first).all()


@pytest.mark.parametrize("tile", [(64, 64), None], ids=str)
def test_vectors_and_single_elements_give_the_same_bits(library, tile):
    for weight in (F16, 4, 8):
        case = Case("metal-wide", tokens=9, strip=(HALF,), rotate=HALF, weight=weight)
        problem = build(case)
        wide, a = run(library, problem, tile)
        narrow, b = run(library, problem, tile, narrow=True)
        assert (wide == narrow).all()
        assert a[0].read_bytes[2] <= b[0].read_bytes[2]


def test_layers_beyond_one_dispatch(library):
    problem = build(MORE[0])
    whole, once = run(library, problem, (32, 32), max_sources=19 if MAX_SOURCES >= 19 else 16)
    check(problem, whole)
    assert len(once) == 2
    split, dispatches = run(library, problem, (32, 32), max_sources=4)
    assert len(dispatches) == 5
    check(problem, split)
    # Unlike layers never share a dispatch.
    problem = build(Case("metal-unlike", sources=GEOMETRIES["unequal_sources"][0], target=(3, 80)))
    got, dispatches = run(library, problem, (64, 32))
    assert len(dispatches) == 3
    check(problem, got)


@pytest.mark.parametrize("tile", [(32, 32), None], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_nan_stays_where_it_was(library, tile, dtype):
    problem = build(Case("metal-nan", tokens=5, cache=(F32,), out=dtype, strip=(HALF,)))
    x = np.array(problem.sources[0])
    x[0, 2, 3] = np.nan
    problem.sources[0] = mx.array(x)
    got, _ = run(library, problem, tile)
    assert np.isnan(got[:, 2]).all() and not np.isnan(np.delete(got, 2, axis=1)).any()


def test_the_harness_can_fail(library):
    """An edge in the wrong place: the reports do reach the tests."""
    source = SOURCE.read_text().replace("if (token0 + r < p.tokens) {", "if (true) {")
    assert source != SOURCE.read_text()
    broken = Library(source, DIRECTORY, only=["map_layer_tile_32x32"])
    with pytest.raises(EmulatorError, match="OUT-OF-BOUNDS"):
        run(broken, build(KEYS), (32, 32))


def test_resources(library):
    """Threadgroup memory as docs/performance.md states it."""
    problem = build(KEYS)
    want = {(64, 64): 17920, (64, 32): 13824, (32, 64): 13312, (32, 32): 9216}
    for tile, size in want.items():
        _, (result,) = run(library, problem, tile)
        assert result.threadgroup_bytes == size
    few = build(Case("metal-resources", tokens=16))
    _, (result,) = run(library, few)
    assert result.threadgroup_bytes == 24576


def test_params_are_what_the_header_says():
    text = (DIRECTORY / "params.h").read_text()
    assert f"#define KVGRAFT_MAX_SOURCES {MAX_SOURCES}" in text
    body = re.search(r"struct MapParams \{(.*?)\};", text, re.S)
    assert body is not None
    names = re.findall(r"(?:int32_t|int64_t|MapTable|MapSource) (\w+)", body[1])
    assert names == [
        "tokens", "heads", "out_dim", "source_dim", "sources", "width", "strip_pairs",
        "rotate_pairs", "span", "tiles_per_span", "group_shift", "padding", "weight_strides",
        "scale_strides", "bias_strides", "offset_strides", "strip", "rotate", "layers",
    ]  # fmt: skip
    assert struct.calcsize("<12i23q") + MAX_SOURCES * struct.calcsize("<4q2i") <= 4096  # setBytes


def test_host_and_kernel_agree():
    """Numbers that stand in the kernel and in the host code."""
    kernel, host = SOURCE.read_text(), (DIRECTORY / "dispatch.h").read_text()
    constants = re.findall(r"\[\[function_constant\((\d+)\)\]\]", kernel)
    assert constants == [str(i) for i in range(12)]
    order = re.findall(r"constant (?:int|bool) k(\w+) \[\[function", kernel)
    members = re.search(r"struct Constants \{(.*?)\};", host, re.S)
    assert members is not None
    listed = re.findall(r"(\w+)[,;]", re.sub(r"\b(int|bool)\b", "", members[1]))
    assert [n.replace("_", "") for n in listed] == [n.lower() for n in order]
    assert re.findall(r"k(F32|F16|BF16|Absent) = (\d)", kernel) == [
        ("F32", "0"), ("F16", "1"), ("BF16", "2"), ("Absent", "3"),
    ]  # fmt: skip
    operands = (DIRECTORY.parent / "operands.h").read_text()
    assert "enum class Type : uint8_t { f32, f16, bf16 };" in operands
    assert "constexpr int kAbsent = 3;" in host
    assert re.findall(r"k(None|Split|Interleaved) = (\d)", kernel) == [
        ("None", "0"), ("Split", "1"), ("Interleaved", "2"),
    ]  # fmt: skip
    assert "enum RopeKind { kNone, kSplit, kInterleaved };" in host
    names = set(re.findall(r"KVGRAFT_TILE\((\d+), (\d+)\)", kernel))
    choices = (DIRECTORY / "dispatch.cpp").read_text()
    for tokens, columns in re.findall(r"Tile\{(\d+), (\d+)\}", choices):
        assert (tokens, columns) in names
