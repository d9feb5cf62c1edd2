"""The kernels against the reference, on the devices that are here.

    python -m kvgraft.ops.selftest        (or: kvgraft env --selftest)

Runs every problem that the project's tests run, on every path that this machine has:
the CPU kernel with each instruction set, and on a GPU the Metal kernels or MLX's own
operations, whichever kvgraft takes there. Takes about a minute. The output is meant to
be pasted into an issue; it says what ran and what did not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft import _ext
from kvgraft.models.rope import RopeSpec
from kvgraft.ops import env, reference
from kvgraft.ops import fused as ops
from kvgraft.ops.cases import CASES, F32, NMSE_LIMIT, Case, Problem, build

__all__ = ["Outcome", "main", "run", "speed"]

COMPOSED_ON_GPU = 1e-6
"""NMSE of float32 results that MLX's own operations made on a GPU, whose matrix units
may round the inputs of a product to TF32."""


@dataclass(frozen=True)
class Outcome:
    """One problem on one path.

    Attributes:
        case: Name of the problem.
        path: ``cpu`` and the instruction set, ``metal``, or ``composed on gpu``.
        error: Squared error against the reference, over its squared norm.
        limit: What it may be.
        detail: What else was wrong; empty if nothing was.
    """

    case: str
    path: str
    error: float
    limit: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the kernel did what it should."""
        return not self.detail and self.error <= self.limit


def run(cases: Sequence[Case] = CASES) -> Iterator[Outcome]:
    """Run problems on every path of this machine.

    Args:
        cases: The problems.

    Yields:
        An outcome per problem and path; a failure is an outcome, too.
    """
    gpu = mx.is_available(mx.Device(mx.gpu))
    for case in cases:
        with mx.stream(mx.cpu):
            problem = build(case)
            want = _float32(reference.map_layer(**problem.arguments))  # type: ignore[arg-type]
        before = _ext.cpu_isa()
        for isa in _ext.cpu_isas():
            _ext.use_cpu_isa(isa)
            try:
                yield _compare(problem, want, f"cpu {isa}", mx.Device(mx.cpu))
            finally:
                _ext.use_cpu_isa(before)
        if gpu:
            device = mx.Device(mx.gpu)
            path = ops.explain(**problem.arguments, stream=device)  # type: ignore[arg-type]
            name = "metal" if path == "metal" else "composed on gpu"
            yield _compare(problem, want, name, device)


def _compare(problem: Problem, want: np.ndarray, path: str, device: mx.Device) -> Outcome:
    dtype = problem.result_dtype
    # Both round a float32 sum, so they may land on neighbouring values.
    limit = 2 * NMSE_LIMIT[dtype]
    if path.startswith("composed"):
        limit = max(limit, COMPOSED_ON_GPU)
    try:
        array = ops.map_layer(**problem.arguments, stream=device)  # type: ignore[arg-type]
        got = _float32(array)
    except Exception as what:  # reported, and the other problems still run
        return Outcome(problem.case.name, path, float("nan"), limit, f"{what}")
    detail = ""
    if array.dtype != dtype or got.shape != want.shape:
        detail = f"{array.dtype} {got.shape} instead of {dtype} {want.shape}"
        return Outcome(problem.case.name, path, float("nan"), limit, detail)
    if not np.isfinite(got).all():
        detail = f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    norm = float((want**2).sum())
    error = float(((got - want) ** 2).sum()) / (norm or 1.0)
    return Outcome(problem.case.name, path, error, limit, detail)


def _float32(x: mx.array) -> np.ndarray:
    return np.array(x.astype(F32, stream=mx.cpu)).astype(np.float64)


def speed(repeats: int = 5) -> list[dict[str, Any]]:
    """Milliseconds of one layer of a real pair; on a GPU by MLX's operations, too.

    Keys of one target layer of Qwen3 0.6B to 1.7B (8 source layers) and of Qwen2.5 3B
    to 1.5B (16), 1,024 tokens, float16; on the default device, medians.

    Args:
        repeats: Runs of each.
    """
    rope = RopeSpec(128, base=1e6)
    rows = []
    for name, heads, layers in (("Qwen2.5 3B to 1.5B", 2, 16), ("Qwen3 0.6B to 1.7B", 8, 8)):
        case = Case(name, 1024, ((heads, 128),) * layers, (heads, 128), strip=(rope,), rotate=rope)
        with mx.stream(mx.cpu):
            problem = build(case)
        arguments: dict[str, Any] = problem.arguments
        on_gpu = mx.default_device() == mx.Device(mx.gpu)

        def once(composed: bool, arguments: dict[str, Any] = arguments) -> float:
            start = time.perf_counter()
            mx.eval(ops.map_layer(**arguments, composed=composed))
            return 1e3 * (time.perf_counter() - start)

        once(False)
        kernel = float(np.median([once(False) for _ in range(repeats)]))
        others = None
        if on_gpu:
            once(True)
            others = float(np.median([once(True) for _ in range(repeats)]))
        flop = 2.0 * 1024 * (layers * heads * 128) * heads * 128
        rows.append(
            {
                "pair": name,
                "path": ops.explain(**arguments),
                "kernel_ms": kernel,
                "composed_ms": others,
                "gflops": flop / kernel / 1e6,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0 if every kernel did what it should, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kvgraft.ops.selftest", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="every fifth problem, no times")
    args = parser.parse_args(arguments)
    report = env.report()
    if not args.json:
        print("kvgraft self-test: kernels against the reference\n")
        print(env.format_report(report) + "\n", flush=True)
    start = time.perf_counter()
    outcomes = []
    for outcome in run(CASES[::5] if args.quick else CASES):
        outcomes.append(outcome)
        if not outcome.ok and not args.json:
            print(f"WRONG  {_line(outcome)}", flush=True)
    times = [] if args.quick else speed()
    seconds = time.perf_counter() - start
    wrong = [o for o in outcomes if not o.ok]
    if args.json:
        data = {
            "env": report,
            "outcomes": [asdict(o) | {"ok": o.ok} for o in outcomes],
            "speed": times,
            "seconds": seconds,
            "ran": _ran(outcomes),
            "ok": not wrong,
        }
        print(json.dumps(data, indent=1))
        return 1 if wrong else 0
    for path, count in Counter(o.path for o in outcomes).items():
        mine = [o for o in outcomes if o.path == path]
        worst = max(mine, key=lambda o: o.error / o.limit if o.ok else float("inf"))
        print(f"{path:16} {sum(o.ok for o in mine)} of {count} right; worst: {_line(worst)}")
    for row in times:
        print(
            f"{row['pair']}, one layer's keys, 1,024 tokens: {row['path']} {row['kernel_ms']:.2f} "
            f"ms ({row['gflops']:.0f} GFLOP/s)"
            + (f", MLX's operations {row['composed_ms']:.2f} ms" if row["composed_ms"] else "")
        )
    for line in _ran(outcomes):
        print(line)
    print(f"{'FAILED' if wrong else 'PASSED'} in {seconds:.0f} s")
    return 1 if wrong else 0


def _line(o: Outcome) -> str:
    return f"{o.case} on {o.path}: error {o.error:.1e}, limit {o.limit:.1e} {o.detail}".rstrip()


def _ran(outcomes: Sequence[Outcome]) -> list[str]:
    """Plain sentences about what was run, so that nobody reads more into it."""
    paths = {o.path for o in outcomes}
    isas = [p.removeprefix("cpu ") for p in sorted(paths) if p.startswith("cpu ")]
    lines = [f"The CPU kernel was run ({', '.join(isas)})."]
    if "metal" in paths:
        count = sum(o.path == "metal" for o in outcomes)
        lines.append(f"The Metal kernels were run, on {count} problems.")
    else:
        lines.append(f"The Metal kernels were NOT run: {_ext.metal_status()}.")
    if "composed on gpu" in paths:
        lines.append("MLX's own operations were run on the GPU where the kernels were not.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
