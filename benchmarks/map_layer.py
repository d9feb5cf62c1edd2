"""Seconds and memory of map_layer: against the machine's limit, BLAS, and VeloxQuant-MLX.

    python -m benchmarks.map_layer [--quick] [--json FILE] [--plot FILE]

Everything that is compared runs in turns in one process. Each figure is given twice:
from the fastest run of each contender, since other programs can only add time, and as
the median over the rounds in which they added least, a ratio being formed within a
round. The peak is measured by running multiply-adds in registers on as many threads
(csrc/bench, built on demand). MLX's Linux wheel multiplies with a slow BLAS, so the
comparisons with MLX's own operations are made twice, the second time with OpenBLAS in
front of it, in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from benchmarks import peak

from kvgraft import _ext
from kvgraft.errors import QualityWarning
from kvgraft.mapper import transfer
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper, load_mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec
from kvgraft.ops import env, reference
from kvgraft.ops import fused as ops
from kvgraft.ops.fused import set_num_threads
from kvgraft.ops.quantized import AffineWeight, quantize

SPIN_STEPS = 100_000  # short, so that some run is left alone
CALM = 0.08  # of the cores: other programs' part of a round that still counts as calm


@dataclass(frozen=True)
class Shape:
    """A pair of models as the map sees it."""

    title: str
    source_layers: int
    target_layers: int
    heads: int
    dim: int
    k: int


SHAPES = {
    "A": Shape("Qwen2.5 3B to 1.5B", 36, 28, 2, 128, 16),
    "B": Shape("Qwen3 0.6B to 1.7B", 28, 28, 8, 128, 8),
}
# Target layers that are measured: of our own runs, beside a fast BLAS, beside a slow one.
# RoPE tables are made once a transfer, so few layers make them weigh too much.
LAYERS = {"A": (28, 8, 4), "B": (4, 2, 1)}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


# ------------------------------------------------------------------- problems


@dataclass
class Work:
    """A mapper with some of a pair's target layers, and a cache for it."""

    shape: Shape
    plan: str
    weights: str
    tokens: int
    mapper: Mapper
    cache: dict[int, tuple[mx.array, mx.array]]

    @property
    def layers(self) -> int:
        return len(self.mapper.layers)

    @property
    def flop(self) -> float:
        """Of the products alone."""
        return (
            2.0
            * self.tokens
            * sum(math.prod(part.shape) for m in self.mapper.layers for part in (m.keys, m.values))
        )

    @property
    def weight_bytes(self) -> int:
        """Of one target layer."""
        m = self.mapper.layers[0]
        return sum(part.storage.nbytes(part.shape) for part in (m.keys, m.values))


def make(shape: Shape, *, plan: str = "full", weights: str = "float16", tokens: int = 1024,
         layers: int = 1, cache: str = "float16") -> Work:  # fmt: skip
    rng = np.random.default_rng(0)
    rope = RopeSpec(shape.dim, base=1e6)
    layer = LayerGeometry(shape.heads, shape.dim, shape.dim, rope)
    source = ModelGeometry((layer,) * shape.source_layers, cache, "source")
    target = ModelGeometry((layer,) * shape.target_layers, cache, "target")
    heads = None if plan == "full" else [[h] for h in range(shape.heads)]
    width = shape.k * shape.dim * (shape.heads if heads is None else 1)

    def values(*size: int) -> mx.array:
        # Repeated noise: what the numbers are doesn't matter, making them takes time.
        noise = rng.standard_normal(99_991).astype(np.float32)
        return mx.array(np.resize(noise, math.prod(size)).reshape(size))

    def linear(sources: Sequence[int]) -> LinearMap:
        w = (values(shape.heads, width, shape.dim) / math.sqrt(width)).astype(mx.float16)
        kept: mx.array | AffineWeight
        kept = quantize(w, bits=int(weights[0])) if weights.endswith("bit") else w.astype(
            DTYPES[weights]
        )  # fmt: skip
        bias = values(shape.heads, shape.dim)
        part = LinearMap.of(sources, kept, bias, heads)
        mx.eval(kept.packed if isinstance(kept, AffineWeight) else kept, bias)
        return part

    maps = []
    for t in range(layers):
        sources = sorted((t + i) % shape.source_layers for i in range(shape.k))
        maps.append(LayerMap(t, linear(sources), linear(sources)))
    mapper = Mapper(source, target, maps)
    kv = {}
    for s in mapper.source_layers:
        pair = [values(shape.heads, tokens, shape.dim).astype(DTYPES[cache]) for _ in range(2)]
        mx.eval(pair)
        kv[s] = (pair[0], pair[1])
    return Work(shape, plan, weights, tokens, mapper, kv)


# ------------------------------------------------------------------ contenders


def run_kernel(work: Work) -> None:
    mx.eval(list(transfer.transfer_cache(work.cache, work.mapper).values()))


def run_reference(work: Work) -> None:
    """kvgraft.ops.reference: each source layer's strip, one matmul a head, the tail."""
    positions = mx.arange(work.tokens)
    specs = work.mapper.source.layers, work.mapper.target.layers
    strip = specs[0][0].rope.table(positions, inverse=True)
    rotate = specs[1][0].rope.table(positions)
    for m in work.mapper.layers:
        out = []
        for part, index in ((m.keys, 0), (m.values, 1)):
            sources = [work.cache[s][index] for s in part.sources]
            tables = {"strip": [strip] * len(sources), "rotate": rotate} if index == 0 else {}
            out.append(
                reference.map_layer(sources, part.weight, part.bias, heads=part.heads, **tables)
            )
        mx.eval(out)


def numpy_product(work: Work) -> Callable[[], None]:
    """The products of the same shapes, in float32, by NumPy's BLAS; nothing else."""
    m = work.mapper.layers[0].keys
    heads, n_in, n_out = m.shape
    x = np.ones((work.tokens, n_in), dtype=np.float32)
    w = np.ones((n_in, heads * n_out), dtype=np.float32)
    out = np.empty((work.tokens, heads * n_out), dtype=np.float32)

    def run() -> None:
        for _ in range(2 * work.layers):
            np.matmul(x, w, out=out)

    return run


def velox(work: Work) -> Callable[[], None] | None:
    """VeloxQuant-MLX's transfer_cache over the same arrays; None if it isn't installed."""
    try:
        import veloxquant_mlx.transfer as other
    except ImportError:
        return None
    s = work.shape
    spec = [other.ModelKVSpec(n, s.heads, s.dim, 1e6) for n in (s.source_layers, s.target_layers)]
    layers = [
        other.LayerMap(m.target_layer, list(m.keys.sources), m.keys.weight, m.keys.bias,
                       m.values.weight, m.values.bias)
        for m in work.mapper.layers
    ]  # fmt: skip
    mapper = other.CrossModelMapper(*spec, other.MapperConfig(k=s.k), layers)

    def run() -> None:
        for keys, values in other.transfer_cache(work.cache, mapper, None, False).values():
            mx.eval(keys, values)

    return run


# ------------------------------------------------------------------- measuring


def busy_seconds() -> float | None:
    """CPU seconds of the whole machine, steal included; None where it is not known."""
    try:
        with open("/proc/stat") as file:
            fields = [int(x) for x in file.readline().split()[1:9]]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Sample:
    """One run: seconds on the clock, CPU seconds, other programs' part of the cores."""

    clock: float
    cpu: float
    foreign: float


def sample(run: Callable[[], None]) -> Sample:
    busy, clock, cpu = busy_seconds(), time.perf_counter(), time.process_time()
    run()
    cpu = time.process_time() - cpu
    clock = time.perf_counter() - clock
    after = busy_seconds()
    foreign = 0.0
    if busy is not None and after is not None:
        foreign = max(0.0, after - busy - cpu) / (clock * (os.cpu_count() or 1))
    return Sample(clock, cpu, foreign)


def spin() -> float:
    return peak.spin(_ext.cpu_isa(), 8 * ops.num_threads(), SPIN_STEPS, ops.num_threads())


Round = dict[str, Sample]


class Rounds(list[Round]):
    """The calmest rounds, and each contender's fastest run in any."""

    def __init__(self, calmest: list[Round], all_of_them: list[Round]) -> None:
        super().__init__(calmest)
        self.fastest = {name: min(r[name].clock for r in all_of_them) for name in all_of_them[0]}
        self.tried = len(all_of_them)


def rounds(contenders: dict[str, Callable[[], None]], want: int, budget: float) -> Rounds:
    """Run all in turns until ``want`` rounds were calm or the time is up.

    A round also measures the peak, as ``spin``.
    """
    for run in contenders.values():
        run()  # warm

    def rested(run: Callable[[], None]) -> Sample:
        # OpenBLAS's threads keep looking for work for a while, on the cores of who is next.
        time.sleep(0.05)
        return sample(run)

    done: list[Round] = []
    end = time.perf_counter() + budget
    while True:
        time.sleep(0.05)
        spin()  # wakes the threads, which takes as long as a tenth of it
        spins = [sample(lambda: void(spin())) for _ in range(5)]
        one = {"spin": min(spins, key=lambda s: s.clock)}
        one |= {name: rested(run) for name, run in contenders.items()}
        done.append(one)
        done.sort(key=worst)
        calm = len(done) >= want and worst(done[want - 1]) <= CALM
        if calm or (time.perf_counter() > end and len(done) >= min(want, 3)):
            return Rounds(done[:want], done)


def void(_: object) -> None:
    pass


def worst(one: Round) -> float:
    # The clock of the processor is too coarse for a spin.
    return max(s.foreign for name, s in one.items() if name != "spin")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spin_flop() -> float:
    """Operations of one spin, without doing one twice."""
    global _SPIN_FLOP
    threads = ops.num_threads()
    if threads not in _SPIN_FLOP:
        _SPIN_FLOP[threads] = spin()
    return _SPIN_FLOP[threads]


_SPIN_FLOP: dict[int, float] = {}


def summary(found: Rounds, name: str, flop: float) -> dict[str, float]:
    """Seconds, rates and the part of the peak of one contender."""
    flop_of_a_spin = spin_flop()
    return {
        "seconds": median([r[name].clock for r in found]),
        "cpu_seconds": median([r[name].cpu for r in found]),
        "gflops": flop / median([r[name].clock for r in found]) / 1e9,
        "peak_gflops": flop_of_a_spin / median([r["spin"].clock for r in found]) / 1e9,
        "best_seconds": found.fastest[name],
        "best_gflops": flop / found.fastest[name] / 1e9,
        "best_peak_gflops": flop_of_a_spin / found.fastest["spin"] / 1e9,
        "best_share": flop / found.fastest[name] / (flop_of_a_spin / found.fastest["spin"]),
        "share": median([flop / r[name].clock / (flop_of_a_spin / r["spin"].clock) for r in found]),
        "share_cpu": median([flop / r[name].cpu / (flop_of_a_spin / r["spin"].cpu) for r in found]),
        "foreign": max(worst(r) for r in found),
        "rounds": len(found),
        "tried": found.tried,
    }


def ratio(found: Rounds, slow: str, fast: str) -> list[float]:
    """How many times as long ``slow`` takes: fastest runs, and median of the rounds."""
    return [
        found.fastest[slow] / found.fastest[fast],
        median([r[slow].clock / r[fast].clock for r in found]),
    ]


# -------------------------------------------------------------------- sections


def section_rows(quick: bool) -> dict[str, Any]:
    """Our kernel alone: shapes, dtypes, plans, lengths."""
    rows = []
    cases: list[tuple[str, dict[str, Any]]] = []
    for name in SHAPES:
        cases += [(name, {"weights": w}) for w in ("float16", "bfloat16", "8bit", "4bit")]
        cases += [(name, {"weights": "float16", "plan": "local"})]
    cases += [("A", {"cache": c, "weights": c}) for c in ("float32", "bfloat16")]
    cases += [(s, {"tokens": n}) for s in SHAPES for n in (1, 16, 256, 4096)]
    for name, options in cases[: 3 if quick else None]:
        work = make(SHAPES[name], layers=LAYERS[name][0], **options)
        found = rounds({"kernel": lambda w=work: run_kernel(w)}, 3 if quick else 7, 8)
        scale = SHAPES[name].target_layers / work.layers
        row = summary(found, "kernel", work.flop)
        rows.append(
            {
                "shape": name,
                "cache": options.get("cache", "float16"),
                "weights": work.weights,
                "plan": work.plan,
                "tokens": work.tokens,
                "layers_measured": work.layers,
                "transfer_seconds": row["best_seconds"] * scale,
                "weight_bytes": work.weight_bytes * SHAPES[name].target_layers,
                **row,
            }
        )
        note("rows", rows[-1])
    return {"rows": rows}


def section_pairs(quick: bool) -> dict[str, Any]:
    """Ratios between runs of our own: plan, weights, threads."""
    out: dict[str, Any] = {}
    want, budget = (3, 5.0) if quick else (9, 25.0)
    for name, (layers, _, _) in LAYERS.items():
        full = make(SHAPES[name], layers=layers)
        local = make(SHAPES[name], layers=layers, plan="local")
        four = make(SHAPES[name], layers=layers, weights="4bit")
        runs = {
            "full": lambda w=full: run_kernel(w),
            "local": lambda w=local: run_kernel(w),
            "4bit": lambda w=four: run_kernel(w),
        }
        found = rounds(runs, want, budget)
        out[f"{name} full/local"] = ratio(found, "full", "local")
        out[f"{name} float16/4bit"] = ratio(found, "full", "4bit")
        out[f"{name} 4bit bytes"] = four.weight_bytes / full.weight_bytes
        out[f"{name} foreign"] = max(worst(r) for r in found)
        note("pairs", out)
        most = ops.num_threads()
        if most == 1:
            continue

        def limited(count: int, work: Work = full) -> Callable[[], None]:
            def run() -> None:
                set_num_threads(count)
                try:
                    run_kernel(work)
                finally:
                    set_num_threads(0)

            return run

        # Both, and as a yardstick how the peak itself grows.
        def spun(count: int, tasks: int = 8 * most) -> Callable[[], None]:
            def run() -> None:
                peak.spin(_ext.cpu_isa(), tasks, SPIN_STEPS, count)

            return run

        found = rounds(
            {"one": limited(1), "all": limited(most), "spin one": spun(1), "spin all": spun(most)},
            want,
            budget,
        )
        out[f"{name} threads"] = most
        out[f"{name} one/all threads"] = ratio(found, "one", "all")
        out[f"{name} one/all threads, peak"] = ratio(found, "spin one", "spin all")
        out[f"{name} one/all foreign"] = max(worst(r) for r in found)
        note("pairs", out)
    return {"pairs": out}


def section_against(quick: bool, openblas: bool) -> dict[str, Any]:
    """Against MLX's operations, NumPy and VeloxQuant, in this process's BLAS."""
    out: dict[str, Any] = {"blas": env.blas()["library"]}
    for name, counts in LAYERS.items():
        layers = counts[1 if openblas else 2]
        work = make(SHAPES[name], layers=layers)
        runs: dict[str, Callable[[], None]] = {
            "kernel": lambda w=work: run_kernel(w),
            "reference": lambda w=work: run_reference(w),
            "numpy": numpy_product(work),
        }
        other = velox(work)
        if other is not None:
            runs["veloxquant"] = other
        want, budget = ((3, 1.0) if quick else (7, 40.0)) if openblas else (3, 20.0)
        found = rounds(runs, want, budget)
        out[name] = {
            "layers": layers,
            "kernel": summary(found, "kernel", work.flop),
            **{
                other: {
                    "seconds": median([r[other].clock for r in found]),
                    "cpu_seconds": median([r[other].cpu for r in found]),
                    "ratio": ratio(found, other, "kernel"),
                    "best_seconds": found.fastest[other],
                }
                for other in runs
                if other != "kernel"
            },
        }
        note("against", {name: out[name]})
    return {"openblas" if openblas else "as shipped": out}


def section_memory(quick: bool) -> dict[str, Any]:
    """The most that a transfer from a file takes beyond its result and one layer's weights."""
    out = {}
    for name in SHAPES:
        for tokens in (1024,) if quick else (1024, 8192):
            work = make(SHAPES[name], layers=3, tokens=tokens)
            one_layer = work.weight_bytes
            with tempfile.TemporaryDirectory() as folder:
                mapper = load_mapper(work.mapper.save(Path(folder) / "a"))
                work.mapper.unload_all()
                few = {s: (k[:, :8], v[:, :8]) for s, (k, v) in work.cache.items()}
                transfer.transfer_cache(few, mapper)
                # Freed memory must not hide what is taken anew.
                gc.collect()
                mx.clear_cache()
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
                before = memory_peak()
                result = transfer.transfer_cache(work.cache, mapper)
                used = memory_peak() - before
            size = sum(x.nbytes for pair in result.values() for x in pair)
            out[f"{name} {tokens}"] = {
                "beyond": used - size - one_layer,
                "result": size,
                "one_layer": one_layer,
                "tables": 2 * tokens * SHAPES[name].dim * 4,
            }
            note("memory", out)
    return {"memory": out}


def memory_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


# --------------------------------------------------------------------- report


def note(what: str, data: object) -> None:
    print(f"  {what}: {json.dumps(data, default=str)[:300]}", file=sys.stderr, flush=True)


Target = tuple[str, list[float], str, float]
"""What, ``[of the fastest runs, median]``, "at least" or "at most", and the target."""


def targets(data: dict[str, Any]) -> list[Target]:
    """The targets whose figures were measured."""
    out: list[Target] = []
    blas, shipped, pairs = data.get("openblas"), data.get("as shipped"), data.get("pairs", {})
    for name, stock, fair in (("A", 40, 5), ("B", 35, 2.5)):
        for row in data.get("rows", []):
            plain = row["cache"] == row["weights"] == "float16" and row["plan"] == "full"
            if row["shape"] == name and plain and row["tokens"] == 1024:
                shares = [row["best_share"], row["share"]]
                out.append((f"{name}: part of the peak", shares, "at least", 0.85))
        for where, label, least in ((shipped, "as shipped", stock), (blas, "OpenBLAS", fair)):
            if where and "veloxquant" in where.get(name, {}):
                values = where[name]["veloxquant"]["ratio"]
                out.append((f"{name}: VeloxQuant, {label}", values, "at least", least))
        if blas:
            values = blas[name]["reference"]["ratio"]
            out.append((f"{name}: our reference, OpenBLAS", values, "at least", 2))
            values = blas[name]["numpy"]["ratio"]
            out.append((f"{name}: NumPy's bare product", values, "at least", 1))
        if pairs:
            values = pairs[f"{name} float16/4bit"]
            out.append((f"{name}: 4 bits, speed of float16", values, "at least", 0.9))
            part = pairs[f"{name} 4bit bytes"]
            out.append((f"{name}: 4 bits, part of the bytes", [part, part], "at most", 0.3))
            if pairs.get(f"{name} threads") == 2:
                values = pairs[f"{name} one/all threads"]
                out.append((f"{name}: two cores over one", values, "at least", 1.85))
        for size, found in data.get("memory", {}).items():
            if size.startswith(name):
                beyond = found["beyond"] / 1e6
                out.append((f"{size} tokens: MB beyond", [beyond, beyond], "at most", 16))
    if pairs:
        out.append(("B: local over full", pairs["B full/local"], "at least", 6))
    return out


def report(data: dict[str, Any]) -> str:
    lines = [f"{data['machine']}", ""]
    lines += [
        "| shape | cache | weights | plan | tokens | s, 28 layers | GFLOP/s of the peak's | "
        "of the peak | median | weights, MB | others |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in data.get("rows", []):
        lines.append(
            f"| {r['shape']} | {r['cache']} | {r['weights']} | {r['plan']} | {r['tokens']} | "
            f"{r['transfer_seconds']:.3g} | {r['best_gflops']:.0f} of "
            f"{r['best_peak_gflops']:.0f} | {r['best_share']:.0%} | {r['share']:.0%} | "
            f"{r['weight_bytes'] / 1e6:.0f} | "
            f"{r['foreign']:.0%} |"
        )
    lines += [
        "",
        "| 1,024 tokens, float16 | BLAS | layers | kernel, s | reference | NumPy, product alone | "
        "VeloxQuant | others |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for label in ("as shipped", "openblas"):
        for name in SHAPES if label in data else ():
            row = data[label][name]

            def cell(key: str, row: dict[str, Any] = row) -> str:
                if key not in row:
                    return "-"
                best, middle = row[key]["ratio"]
                return f"{row[key]['best_seconds']:.3g} s, {best:.2f}x ({middle:.2f}x)"

            lines.append(
                f"| {name} | {label} | {row['layers']} | {row['kernel']['best_seconds']:.3g} | "
                f"{cell('reference')} | {cell('numpy')} | {cell('veloxquant')} | "
                f"{row['kernel']['foreign']:.0%} |"
            )
    lines += ["", "| target | measured | median | wanted | |", "|---|--:|--:|--:|---|"]
    for what, (value, middle), kind, target in targets(data):
        met = value >= target if kind == "at least" else value <= target
        lines.append(
            f"| {what} | {value:.3g} | {middle:.3g} | {kind} {target:g} | "
            f"{'met' if met else 'MISSED'} |"
        )
    return "\n".join(lines)


def plot(data: dict[str, Any], path: str) -> None:
    """Rates against the peak, and ratios to the others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    rows = data.get("rows", [])
    names = [f"{r['shape']} {r['weights']} {r['plan']} N={r['tokens']}" for r in rows]
    left.barh(names, [100 * r["best_share"] for r in rows])
    left.axvline(85, color="black", linewidth=0.8)
    left.set_xlabel("% of the multiply-add peak")
    left.invert_yaxis()
    bars = [
        (f"{name}, {other}, {label}", data[label][name][other]["ratio"][0])
        for label in ("as shipped", "openblas")
        if label in data
        for name in SHAPES
        for other in ("reference", "numpy", "veloxquant")
        if other in data[label][name]
    ]
    right.barh([b[0] for b in bars], [b[1] for b in bars])
    right.set_xscale("log")
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xlabel("times as long as the kernel")
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


SECTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "rows": section_rows,
    "pairs": section_pairs,
    "memory": section_memory,
    "as shipped": lambda quick: section_against(quick, False),
    "openblas": lambda quick: section_against(quick, True),
}


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(x.split(":")[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {ops.num_threads()} threads, {_ext.cpu_isa()}, MLX {mx.__version__}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections to run")
    parser.add_argument("--openblas", metavar="FILE", help="libopenblas.so.0, if it isn't found")
    parser.add_argument("--json", metavar="FILE", help="add to this file what is measured")
    parser.add_argument("--plot", metavar="FILE", help="draw it; needs matplotlib")
    parser.add_argument("--worker", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    mx.set_default_device(mx.Device(mx.cpu))
    warnings.simplefilter("ignore", QualityWarning)  # these weights are noise
    if args.worker:
        print(json.dumps(SECTIONS[args.worker](args.quick)))
        return

    data: dict[str, Any] = {
        "machine": machine(),
        "shapes": {k: asdict(s) for k, s in SHAPES.items()},
    }
    if args.json and Path(args.json).exists():
        data = json.loads(Path(args.json).read_text()) | data
    openblas = args.openblas or env.find_openblas()
    for section in args.only if args.only is not None else SECTIONS:
        if section == "memory" and sys.platform != "linux":
            print("memory: measured on Linux only", file=sys.stderr)
            continue
        if section == "openblas" and (openblas is None or sys.platform != "linux"):
            print("openblas: no libopenblas.so.0 here", file=sys.stderr)
            continue
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        if section == "openblas":
            environment |= {"LD_PRELOAD": str(openblas)}
            environment.setdefault("OPENBLAS_NUM_THREADS", str(ops.num_threads()))
        print(f"{section} ...", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.map_layer", "--worker", section]
        done = subprocess.run(
            command + ["--quick"] * args.quick, env=environment, stdout=subprocess.PIPE, check=True
        )
        data |= json.loads(done.stdout)
        if args.json:
            Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    print(report(data))
    if args.plot:
        plot(data, args.plot)


if __name__ == "__main__":
    main()
