"""What the Mac's host code decides, asked of that code itself."""

from __future__ import annotations

import itertools
import struct

import map_layer
import oracle
import pytest
from emulator import EmulatorError
from host import (
    DISPATCH,
    MAX_SOURCES,
    Call,
    Source,
    Table,
    choose_tile,
    core_count,
    has_matrix_units,
    library,
    plan,
    refuses,
)
from map_layer import FINISH, RESUME, WIDE_SOURCE, WIDE_WEIGHT, Library, run

from kvgraft.ops.cases import CASES, NMSE_LIMIT, build

F32, F16, BF16 = 0, 1, 2
LAYER = MAX_SOURCES * struct.calcsize("<4q2i")


@pytest.fixture(scope="module")
def kernels():
    return Library(map_layer.SOURCE.read_text(), map_layer.DIRECTORY)


def source(heads=2, dim=64, tokens=33, **changes):
    strides = (heads * tokens * dim, tokens * dim, dim, 1)
    return Source(**{"type": F16, "heads": heads, "dim": dim, "strides": strides} | changes)


def call(tokens=33, **changes):
    given = {"sources": [source(), source()], "weight_strides": (256 * 64, 64, 1)} | changes
    return Call(**{"tokens": tokens, "heads": 2, "out_dim": 64} | given)


def layers_of(dispatch):
    """``(batch, head, token, dim stride, weight row)`` of each source layer bound."""
    data = dispatch.params[-LAYER:]
    return [struct.unpack_from("<4qi", data, 40 * i) for i in range(len(dispatch.members))]


@pytest.mark.parametrize(
    ("tokens", "kernel", "rows"),
    [(1, "rows_1", 1), (2, "rows_4", 4), (4, "rows_4", 4), (5, "rows_16", 16),
     (16, "rows_16", 16), (17, "tile_32x32", 32), (2048, "tile_64x64", 64)],
)  # fmt: skip
def test_few_tokens_take_the_rows_kernel(tokens, kernel, rows):
    (d,) = plan(call(tokens, batch=3))
    assert d.kernel == f"map_layer_{kernel}"
    assert d.threads == (256 if tokens <= 16 else 128)
    assert d.grid[1:] == [-(-tokens // rows), 3]
    columns = 64 if kernel.endswith("x64") else 32
    assert d.grid[0] == 2 * 64 // columns


@pytest.mark.parametrize(
    ("pair", "cores", "tokens", "want"),
    [
        # Qwen2.5 3B to 1.5B: 256 columns.
        ((1, 32), 8, 512, (64, 64)),
        ((1, 32), 8, 256, (64, 32)),
        ((1, 32), 8, 128, (32, 32)),
        ((1, 32), 30, 1024, (64, 32)),
        ((1, 32), 30, 2048, (64, 64)),
        ((1, 32), 60, 2048, (64, 32)),
        # Qwen3 0.6B to 1.7B: 1,024 columns.
        ((1, 128), 8, 128, (64, 64)),
        ((1, 128), 30, 512, (64, 64)),
        ((1, 128), 60, 512, (64, 32)),
        # Its local plan: eight spans of 128 columns.
        ((8, 16), 30, 512, (64, 64)),
        # Heads of 80: 64 columns would leave half of every second tile empty.
        ((8, 10), 8, 4096, (64, 32)),
        ((8, 12), 8, 4096, (64, 32)),
        ((8, 8), 8, 4096, (64, 64)),
        # 240 columns, but only two too many for four tiles of 64.
        ((1, 30), 8, 4096, (64, 64)),
        # One short row of tiles is all that there is.
        ((1, 1), 60, 17, (32, 32)),
    ],
)
def test_tile(pair, cores, tokens, want):
    spans, span = pair
    assert choose_tile(tokens, spans, span, cores) == want


def test_tiles_cover_the_result_and_fill_the_gpu():
    for cores, tokens, spans, span in itertools.product(
        (5, 8, 30, 60), (17, 100, 1000, 70_000), (1, 3, 8), (1, 8, 10, 32, 128)
    ):
        rows, columns = choose_tile(tokens, spans, span, cores)
        tiles = spans * -(-span * 8 // columns) * -(-tokens // rows)
        assert tiles >= 4 * cores or (rows, columns) == (32, 32)


def test_alike_layers_share_a_dispatch():
    layers = [source() for _ in range(2 * MAX_SOURCES + 3)]
    found = plan(call(sources=layers))
    assert [len(d.members) for d in found] == [16, 16, 3]
    assert [i for d in found for i in d.members] == list(range(35))
    assert [d.constants[RESUME] for d in found] == [0, 1, 1]
    assert [d.constants[FINISH] for d in found] == [0, 0, 1]
    assert [row for d in found for *_, row in layers_of(d)] == [128 * i for i in range(35)]
    assert [len(d.members) for d in plan(call(sources=layers), max_sources=20)] == [16, 16, 3]


@pytest.mark.parametrize(
    "other", [{"type": F32}, {"dim": 32}, {"heads": 4}, {"strip": 0}], ids=lambda o: [*o][0]
)
def test_unlike_layers_do_not(other):
    table = Table(16, False, (0, 16, 1), (0, 16, 1))
    one, two = source(), source(**other)
    found = plan(call(sources=[one, two, one], tables=[table]))
    assert [d.members for d in found] == [[0, 2], [1]]
    # Rows of the weights go by the order of the layers, not of the dispatches.
    size = 2 * 64
    assert [row for *_, row in layers_of(found[0])] == [0, size + two.heads * two.dim]
    assert [row for *_, row in layers_of(found[1])] == [size]
    # In a head plan every layer gives as many heads.
    planned = plan(call(sources=[one, two, one], tables=[table], plan_width=1))
    assert len(planned) == (1 if "heads" in other else 2)


@pytest.mark.parametrize(
    ("change", "wide"),
    [
        ({}, 1),
        ({"address": 8}, 1),
        ({"address": 4}, 0),
        ({"address": 8, "type": F32}, 0),
        ({"address": 16, "type": F32}, 1),
        ({"strides": (0, 64, 128, 1)}, 1),
        ({"strides": (0, 64, 130, 1)}, 0),
        ({"strides": (0, 66, 128, 1)}, 0),
        ({"strides": (2, 64, 128, 1)}, 0),
        ({"strides": (0, 64, 128, 2)}, 0),
        ({"strides": (0, -64, -128, 1)}, 1),
        ({"dim": 60}, 0),
        ({"dim": 72}, 1),
        ({"strip": 0}, 1),
        ({"strip": 1}, 0),
        ({"strip": 2}, 1),
    ],
    ids=str,
)
def test_vectors_are_read_where_they_are_aligned(change, wide):
    tables = [
        Table(pairs, kind, (0, pairs, 1), (0, pairs, 1))
        for pairs, kind in ((16, False), (15, False), (15, True))
    ]
    one = source(**change)
    (d,) = plan(call(sources=[one, one], tables=tables))
    assert d.constants[WIDE_SOURCE] == wide
    # One layer that can't is enough.
    ways = plan(call(sources=[source(**{**change, "strides": source().strides}), one]
                     if "strip" not in change and "dim" not in change else [one, one],
                     tables=tables))  # fmt: skip
    assert all(d.constants[WIDE_SOURCE] <= wide or "strides" in change for d in ways)


@pytest.mark.parametrize(
    ("change", "wide"),
    [
        ({}, 1),
        ({"weight_address": 4}, 0),
        ({"weight_address": 8, "weight_type": F32}, 0),
        ({"weight_strides": (4, 66, 1)}, 0),
        ({"weight_strides": (2, 64, 1)}, 0),
        ({"weight_strides": (0, 4, 256)}, 0),
        ({"out_dim": 60}, 0),
        ({"rotate": 0}, 1),
        ({"rotate": 1}, 0),
        ({"bits": 4, "group_size": 64}, 1),
        ({"bits": 4, "group_size": 64, "weight_address": 4, "weight_strides": (1, 1, 7)}, 1),
        ({"bits": 8, "group_size": 32, "sources": [source(dim=60), source(dim=4)]}, 0),
        ({"bits": 8, "group_size": 32, "sources": [source(heads=1, dim=68), source(dim=64)]}, 0),
    ],
    ids=str,
)
def test_weights_are_read_as_vectors_where_they_are_aligned(change, wide):
    tables = [Table(pairs, False, (0, pairs, 1), (0, pairs, 1)) for pairs in (16, 6)]
    assert {d.constants[WIDE_WEIGHT] for d in plan(call(tables=tables, **change))} == {wide}


def test_what_a_kernel_is_told():
    tables = [Table(32, True, (99, 32, 1), (98, 31, 2)), Table(16, False, (0, 16, 1), (5, 6, 7))]
    (d,) = plan(
        call(
            batch=2, sources=[source(strip=0)] * 3, tables=tables, rotate=1, bits=4, group_size=64,
            weight_type=BF16, scale_strides=(1, 2, 3), bias_strides=(4, 5, 6), out_type=F32,
            offset_type=F16, offset_strides=(7, 8),
        )
    )  # fmt: skip
    numbers = struct.unpack_from("<12i", d.params)
    assert numbers == (33, 2, 64, 64, 3, 2, 32, 16, 16, d.grid[0], 6, 0)
    strides = struct.unpack_from("<23q", d.params, 48)
    assert strides[:11] == (256 * 64, 64, 1, 1, 2, 3, 4, 5, 6, 7, 8)
    assert strides[11:] == (99, 32, 1, 98, 31, 2, 0, 16, 1, 5, 6, 7)
    assert d.constants == [F16, BF16, 4, F16, F32, 2, 1, 0, 1, 1, 0, 1]


def test_variants_have_names_of_their_own():
    names = {}
    for type_, bits, rotate, plan_width, dim, stride in itertools.product(
        (F32, F16, BF16), (0, 4, 8), (-1, 0, 1), (0, 1), (64, 60), (1, 2)
    ):
        tables = [Table(16, kind, (0, 16, 1), (0, 16, 1)) for kind in (False, True)]
        layer = source(dim=dim, type=type_, strides=(0, 64, 64, stride))
        (d,) = plan(call(sources=[layer], bits=bits, group_size=32 if bits else 0, rotate=rotate,
                         plan_width=plan_width, tables=tables, weight_type=type_))  # fmt: skip
        names.setdefault(d.variant, set()).add((d.kernel, *d.constants))
    assert len(names) > 100
    assert all(len(kinds) == 1 for kinds in names.values())


def test_devices():
    assert core_count("applegpu_g13g") == core_count("applegpu_g16g") == core_count("") == 8
    assert [core_count(f"applegpu_g14{c}") for c in "psd"] == [5, 30, 60]
    for name, generation, units in (
        ("applegpu_g13g", 13, False), ("applegpu_g16s", 16, False), ("applegpu_g17g", 17, True),
        ("applegpu_g17s", 17, True), ("applegpu_g17p", 17, False), ("applegpu_g18p", 18, True),
        ("", 0, False),
    ):  # fmt: skip
        assert has_matrix_units(name, generation) is units


def test_what_the_kernels_refuse():
    assert not any(refuses(size, 0) for size in (0, 1, 32, 64, 128))
    assert refuses(48, 0) and refuses(96, 5)
    assert not refuses(64, 1024) and refuses(64, 1025)


@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        (".weight_row = rows[members[i]]", ".weight_row = 0", "geometry-many_sources"),
        ("wide_source = wide_source && x.dim_stride == 1 &&", "(void)", "layout-dims_first"),
        (".resume = step > 0,", ".resume = false,", "geometry-unequal_sources"),
        ("ceil_div(job.tokens, tile.tokens)", "job.tokens / tile.tokens", "batch"),
        ("job.mapping_width ? octets : job.heads * octets", "octets", "dtype-float16-float16"),
        ("for (int size = job.weight.group_size; size > 1;", "for (int size = 32; size > 1;",
         "bits8-group128"),
        ("p.offset_strides[0] = job.bias.head_stride;", "", "dtype-float16-float16"),
        ("p.rotate_pairs = pairs_of(job, job.rotate);", "", "rope-half"),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_faults_in_the_host_code_are_caught(kernels, monkeypatch, right, wrong, case):
    """The emulator runs what the host says, so a wrong host shows in the results."""
    text = DISPATCH.read_text()
    assert text.count(right) == 1
    faulty = library(text.replace(right, wrong))
    monkeypatch.setattr(map_layer, "plan", lambda *a, **k: plan(*a, **k, code=faulty))
    problem = build(next(c for c in CASES if c.name == case))
    try:
        got, _ = run(kernels, problem, (32, 32))
    except EmulatorError:
        return
    want = oracle.map_layer(**problem.plain())
    assert not oracle.nmse(got, want) <= NMSE_LIMIT[problem.result_dtype]
