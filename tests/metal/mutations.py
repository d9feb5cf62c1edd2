"""Makes faulty kernels and shows that the harness catches every one.

    PYTHONPATH=python python tests/metal/mutations.py

Prints a table and exits with 1 if one gets through. A mutation that changes
nothing that can be seen is no mutation and has no place in the list.
"""

# ruff: noqa: E402 - the helpers lie beside this script
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parent)]

import mlx.core as mx
import oracle
from emulator import EmulatorError, Library
from map_layer import DIRECTORY, SOURCE, run

from kvgraft.models.rope import RopeSpec
from kvgraft.ops.cases import F32, HALF, NMSE_LIMIT, Case, build

TILE = "map_layer_tile_32x32"
ROWS = "map_layer_rows_4"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Mutation:
    """One fault: ``old`` becomes ``new`` at its n-th place (all places: -1)."""

    name: str
    old: str
    new: str
    at: int = 0
    kernel: str = TILE


ROPE = {"strip": (HALF,), "rotate": RopeSpec(64, base=1e6)}
PROBES = (
    Case("mutant-keys", **ROPE),
    Case("mutant-bits8", tokens=35, weight=8, group=32, plan="grouped", **ROPE),
    Case("mutant-bits4", tokens=3, weight=4, sources=((2, 64), (2, 64)), **ROPE),
    Case("mutant-odd", sources=((2, 7), (1, 9)), target=(3, 5), layout="dims_first"),
    Case(
        "mutant-interleaved",
        tokens=40,
        batch=2,
        batched_tables=True,
        plan="local",
        target=(2, 40),
        strip=(RopeSpec(24, True, base=1e4),),
        rotate=RopeSpec(40, True, base=1e6),
    ),
    Case("mutant-layers", sources=((2, 32), (2, 32), (2, 24)), target=(3, 80)),
    Case("mutant-saturate", cache=(F32,), out=mx.float16, scale=40_000.0, weight=F32),
)

MUTATIONS = (
    Mutation("barrier before the loads removed", BARRIER, ";"),
    Mutation("barrier after the loads removed", BARRIER, ";", 1),
    Mutation("barrier before the sums are stored removed", BARRIER, ";", 2),
    Mutation("barrier after the sums are stored removed", BARRIER, ";", 3),
    Mutation(
        "barrier of device memory only", "mem_flags::mem_threadgroup", "mem_flags::mem_device", 1
    ),
    Mutation(
        "barrier only for threads with a token",
        BARRIER,
        f"if (token0 + id / 4 < p.tokens) {BARRIER}",
        1,
    ),
    Mutation("rows: barrier before the loads removed", BARRIER, ";", 4, ROWS),
    Mutation("rows: barrier after the loads removed", BARRIER, ";", 5, ROWS),
    Mutation("rows: barrier before the sums are added removed", BARRIER, ";", 6, ROWS),
    Mutation(
        "tokens read one too far", "if (token0 + r < p.tokens) {", "if (token0 + r <= p.tokens) {"
    ),
    Mutation(
        "tokens written one too far",
        "token0 + r < p.tokens && octet0",
        "token0 + r <= p.tokens && octet0",
    ),
    Mutation(
        "last token not written",
        "token0 + r < p.tokens && octet0",
        "token0 + r < p.tokens - 1 && octet0",
    ),
    Mutation(
        "columns one octet too far",
        "const int octet_end = (span + 1) * p.span;",
        "const int octet_end = (span + 1) * p.span + 1;",
    ),
    Mutation(
        "dims past the head's end read", "if (dim < p.source_dim) {", "if (dim <= p.source_dim) {"
    ),
    Mutation("members of a pair swapped", "pair + member * pairs", "pair + (1 - member) * pairs"),
    Mutation("sign of the rotation flipped", "a * cosine - b * sine", "a * cosine + b * sine"),
    Mutation("interleaved pairs taken for split ones", "kind == kInterleaved", "false", -1),
    Mutation("strip skipped", "if (kStrip == kNone || 4", "if (true || 4"),
    Mutation("target's rotation skipped", "if (kRotate != kNone &&", "if (false &&"),
    Mutation(
        "table of the next token",
        "token * table.sin_strides[1]",
        "(token + 1) * table.sin_strides[1]",
    ),
    Mutation("table of batch entry 0", "batch * table.cos_strides[0]", "0"),
    Mutation(
        "turns of the first octet",
        "const int octet = first + (id + i * THREADS) % OCTETS;",
        "const int octet = first;",
    ),
    Mutation("bias skipped", "if (kBiasType != kAbsent) {", "if (false) {"),
    Mutation("bias of head 0", "head * p.offset_strides[0]", "0"),
    Mutation(
        "accumulator not cleared",
        "sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);",
        ";",
    ),
    Mutation("accumulator cleared to 1", "8, 8>(0.0f)", "8, 8>(1.0f)"),
    Mutation("head stride wrong", "source_head * s.head_stride", "source_head * s.token_stride"),
    Mutation("batch stride lost", "batch * s.batch_stride +", ""),
    Mutation("dim stride lost", "at + dim * stride", "at + dim"),
    Mutation("scale of a group lost", "steps * scale + bias", "steps + bias"),
    Mutation("bias of a group lost", "steps * scale + bias", "steps * scale"),
    Mutation(
        "first group for all", "const int group = in >> p.group_shift;", "const int group = 0;"
    ),
    Mutation("bits not shifted", "uint(in * kBits % 32)", "0u"),
    Mutation("saturation lost", "value = value > limit ? limit : value;", ""),
    Mutation("head plan ignored", "kPlan ? b.plan[head0 * p.width + g] : g", "g"),
    Mutation("head plan of the next head", "b.plan[head0", "b.plan[(head0 + 1)"),
    Mutation("weights of the first layer for all", "p.layers[layer].weight_row + g", "g"),
    Mutation("weights of head 0", "own_head * p.weight_strides[0]", "0"),
    Mutation("layers before lost", "if (kResume) {", "if (false) {"),
    Mutation("one simdgroup's columns twice", "int(simdgroup_id) % 2 * (BN / 2)", "0"),
    Mutation("threadgroup memory too small", "LOADS > SUMS ? LOADS : SUMS", "LOADS - 40"),
    Mutation(
        "a fragment's row stride wrong",
        "8 * i) * LDA + 8 * o, LDA)",
        "8 * i) * LDA + 8 * o, LDB - 4)",
    ),
    Mutation(
        "last octet of a step skipped",
        "for (int o = 0; o < octets; ++o) {",
        "for (int o = 0; o < octets - 1; ++o) {",
    ),
    Mutation("rows: a lane's sum lost", "i < LANES; ++i", "i < LANES - 1; ++i", 0, ROWS),
    Mutation(
        "rows: a lane's octets skipped", "for (int o = lane;", "for (int o = lane + 1;", 0, ROWS
    ),
    Mutation(
        "result's rows transposed",
        "batch) * p.heads + head) * p.tokens + token)",
        "batch) * p.tokens + token) * p.heads + head)",
    ),
)


def mutate(source: str, mutation: Mutation) -> str:
    """The source with the fault in it."""
    parts = source.split(mutation.old)
    if len(parts) < 2 + max(mutation.at, 0):
        raise ValueError(f"{mutation.name}: {mutation.old!r} is not in the kernel")
    if mutation.at < 0:
        return mutation.new.join(parts)
    keep = mutation.at + 1
    return mutation.old.join(parts[:keep]) + mutation.new + mutation.old.join(parts[keep:])


def catch(library: Library, kernel: str) -> str | None:
    """What the first probe that notices says."""
    for case in PROBES:
        if kernel == ROWS and case.tokens > 4:
            case = Case(**{**case.__dict__, "tokens": 3})
        problem = build(case)
        sources = {"max_sources": 1} if case.name == "mutant-layers" else {}
        try:
            got, _ = run(library, problem, None if kernel == ROWS else (32, 32), **sources)
        except EmulatorError as error:
            return str(error).split(" [")[0].strip().splitlines()[0]
        want = oracle.map_layer(**problem.plain())
        if problem.result_dtype != F32:
            limit = float(mx.finfo(problem.result_dtype).max)
            want = want.clip(-limit, limit)
        error_size = oracle.nmse(got, want)
        if not error_size <= NMSE_LIMIT[problem.result_dtype]:
            return f"WRONG: error {error_size:.0e} in {case.name[7:]}"
    return None


def main() -> int:
    source = SOURCE.read_text()
    for kernel in (TILE, ROWS):
        if (said := catch(Library(source, DIRECTORY, only=[kernel]), kernel)) is not None:
            print(f"{kernel} itself is caught: {said}")
            return 1
    missed = 0
    print("| fault | caught as |\n|---|---|")
    for mutation in MUTATIONS:
        library = Library(mutate(source, mutation), DIRECTORY, only=[mutation.kernel])
        said = catch(library, mutation.kernel)
        missed += said is None
        print(f"| {mutation.name} | {said or '**NOT CAUGHT**'} |", flush=True)
    print(f"\n{len(MUTATIONS) - missed} of {len(MUTATIONS)} caught.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
