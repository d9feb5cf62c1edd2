"""The fit: seconds against VeloxQuant-MLX on the same arrays.

    python -m benchmarks.fit [--shape NAME ...] [--their-layers N] [--json FILE]

Run it with OPENBLAS_NUM_THREADS=1 on a machine that others use too. On Linux,
MLX's wheel has a slow BLAS, which VeloxQuant's fit runs on and ours
does not. Run it a second time with OpenBLAS in front of it (`kvgraft env` tells
how) for the fair ratio. VeloxQuant fits target layer after target layer, each
with the same work, and takes minutes for each at the larger shapes; with
``--their-layers`` it fits the first N of them and its time for all is
extrapolated, and marked so. Ours always fits all. `benchmarks.fit_accuracy` measures the accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.fit import FitConfig, fit_arrays
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec

SHAPES = {
    # layers of source and target, KV heads, head_dim, rows, k
    "tiny": ((8, 8), 2, 64, 2048, 4),
    # The layout of Qwen2.5-0.5B, and as many rows as VeloxQuant does in minutes.
    "qwen": ((24, 24), 2, 64, 4096, 8),
    "qwen-k16": ((24, 24), 2, 64, 2048, 16),
}


def geometry(layers: int, heads: int, dim: int) -> ModelGeometry:
    layer = LayerGeometry(heads, dim, dim, RopeSpec(dim, base=1e6))
    return ModelGeometry((layer,) * layers, "float16", "qwen3")


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, float, Any]:
    """Median seconds on the clock and of the CPU, and the last result.

    On a machine that others use too, CPU seconds tell more, as long as BLAS
    runs on one thread (``OPENBLAS_NUM_THREADS=1``): waiting threads spin.
    """
    clock, cpu, result = [], [], None
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        result = work()
        clock.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return statistics.median(clock), statistics.median(cpu), result


def related(geo: ModelGeometry, shared: np.ndarray, rng: np.random.Generator) -> list[Any]:
    """Keys and values that have something to do with each other, layer by layer."""
    out = []
    for layer in geo.layers:
        pair = []
        for _ in range(2):
            mix = rng.standard_normal((layer.n_kv_heads, shared.shape[1], layer.key_dim))
            x = shared @ (mix / np.sqrt(shared.shape[1]))
            pair.append(mx.array((x + 0.5 * rng.standard_normal(x.shape)).astype(np.float16)))
        out.append(tuple(pair))
    return out


def for_all(marks: Sequence[float], n_layers: int) -> float:
    """Seconds for all target layers, from the times at which the first ones were done.

    The first layer carries what is done once (taking RoPE off the source's keys);
    those that were not run are counted as the mean of the others.
    """
    steps = [b - a for a, b in zip(marks, marks[1:])]
    each = steps[1:] or steps
    return sum(steps) + (n_layers - len(steps)) * sum(each) / len(each)


def against_veloxquant(
    layers: tuple[int, int],
    heads: int,
    dim: int,
    rows: int,
    k: int,
    repeats: int,
    their_layers: int | None = None,
) -> dict[str, Any] | None:
    """Both fits on the same arrays; ``None`` where VeloxQuant is not installed."""
    try:
        from veloxquant_mlx.transfer import MapperConfig, ModelKVSpec, fit_mapper
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    source_geo, target_geo = geometry(layers[0], heads, dim), geometry(layers[1], heads, dim)
    shared = rng.standard_normal((rows, 2 * dim))
    source, target = related(source_geo, shared, rng), related(target_geo, shared, rng)
    mx.eval(source, target)
    positions = mx.arange(rows)

    def spec(n: int) -> Any:
        return ModelKVSpec(n_layers=n, n_kv_heads=heads, head_dim=dim, rope_theta=1e6)

    n_theirs = layers[1] if their_layers is None else min(their_layers, layers[1])
    marks: list[tuple[float, float]] = []

    def velox() -> None:
        fitted = fit_mapper(
            dict(enumerate(source)),
            dict(enumerate(target[:n_theirs])),
            spec(layers[0]),
            spec(n_theirs),
            positions,
            MapperConfig(k=k),
            # It has evaluated a layer when it reports it.
            progress=lambda done, total: marks.append((time.perf_counter(), time.process_time())),
        )
        mx.eval([(m.w_k, m.w_v) for m in fitted.layers])

    def ours() -> Any:
        config = FitConfig(k=k, layer_ranking="paper", heldout=1 / rows)
        return fit_arrays(source, target, source_geo, target_geo, positions, config)

    ours()  # BLAS threads, kernels
    our_seconds, our_cpu, mapper = timed(ours, repeats)
    marks.append((time.perf_counter(), time.process_time()))
    velox()
    their_seconds, their_cpu = (for_all([m[i] for m in marks], layers[1]) for i in (0, 1))
    return {
        "shape": f"{layers[0]}->{layers[1]} layers, {heads}x{dim}, {rows} rows, k={k}",
        "veloxquant_s": their_seconds,
        "veloxquant_layers": n_theirs,
        "kvgraft_s": our_seconds,
        "ratio": their_seconds / our_seconds,
        "ratio_cpu": their_cpu / our_cpu,
        "parameters": mapper.n_parameters,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--their-layers", type=int, help="target layers that VeloxQuant fits (default: all)"
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args(argv)
    preload = "openblas" in os.environ.get("LD_PRELOAD", "")
    print(f"MLX's BLAS: {'OpenBLAS preloaded' if preload else 'as shipped'}")
    out: dict[str, Any] = {"preload": preload, "speed": []}
    for name in args.shape:
        layers, heads, dim, rows, k = SHAPES[name]
        row = against_veloxquant(layers, heads, dim, rows, k, args.repeats, args.their_layers)
        if row is None:
            print("VeloxQuant-MLX is not installed; no ratio.")
            break
        out["speed"].append(row)
        part = row["veloxquant_layers"]
        scaled = "" if part == layers[1] else f" (scaled from {part} of {layers[1]} target layers)"
        print(
            f"{row['shape']:44s} VeloxQuant {row['veloxquant_s']:8.2f} s{scaled}   kvgraft "
            f"{row['kvgraft_s']:7.3f} s   {row['ratio']:6.0f} x   (CPU {row['ratio_cpu']:.0f} x)",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out["peak_rss_mb"] = peak / (1e6 if sys.platform == "darwin" else 1e3)
    print(f"peak resident memory {out['peak_rss_mb']:.0f} MB")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)
    return out


if __name__ == "__main__":
    main()
