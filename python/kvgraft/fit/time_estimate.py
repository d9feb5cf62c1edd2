"""How long a fit takes on this machine, before it is run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import KINDS, Columns, common_heads
from kvgraft.fit.memory_plan import FitMemoryPlan
from kvgraft.fit.search import head_mappings_to_try, ks_to_try
from kvgraft.models.geometry import ModelGeometry

__all__ = ["BlasRate", "FitTime", "estimate_time", "measure_blas"]


@dataclass(frozen=True)
class BlasRate:
    """Floating-point operations per second of NumPy's matrix product.

    Attributes:
        single: In float32, which the moments that are scored on are multiplied in.
        double: In float64, which the others are, and the systems are solved in.
    """

    single: float
    double: float


@dataclass(frozen=True)
class FitTime:
    """Seconds of a fit, by stage.

    Attributes:
        models: Running the models over the text.
        moments: Multiplying what they cached.
        solve: Solving all candidates. Scoring them on the target is not in it.
    """

    models: float
    moments: float
    solve: float

    @property
    def total(self) -> float:
        """All stages."""
        return self.models + self.moments + self.solve


def measure_blas(size: int = 1024) -> BlasRate:
    """Time one product of each kind (a fraction of a second)."""
    rates = []
    for dtype in (np.float32, np.float64):
        a = np.ones((size, size), dtype)
        a @ a  # threads start with the first product
        begun = time.perf_counter()
        a @ a
        rates.append(2 * size**3 / (time.perf_counter() - begun))
    return BlasRate(*rates)


def estimate_time(
    plan: FitMemoryPlan,
    source: ModelGeometry,
    target: ModelGeometry,
    config: FitConfig,
    rate: BlasRate,
    seconds_per_sequence: float,
    sequences: int,
) -> FitTime:
    """Estimate a fit's time from the work that it has to do.

    Args:
        plan: Its memory plan.
        source: Geometry of the source.
        target: Geometry of the target.
        config: Settings.
        rate: What this machine multiplies; see :func:`measure_blas`.
        seconds_per_sequence: Seconds in which both models read a sequence.
        sequences: Sequences in all.
    """
    n_heads = common_heads(source, target)
    groups = n_heads if plan.structure == "heads" and n_heads is not None else 1
    rows = sequences * len(range(config.skip, config.seq_len, config.stride))
    work = 0.0
    for kind in KINDS:
        x, y = Columns.of(source, kind), Columns.of(target, kind)
        pairs = x.width * x.width * (1 + 1 / len(x.dims)) / 2 + x.width * y.width
        work += 2 * rows * pairs / groups
    solving = sum(_solve_work(source, target, one) for one in _candidates(source, target, config))
    return FitTime(
        seconds_per_sequence * sequences * len(plan.passes),
        work * ((1 - config.heldout) / rate.double + config.heldout / rate.single),
        solving / rate.double,
    )


def _candidates(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> list[FitConfig]:
    return [
        replace(config, head_mapping=plan, k=k)
        for plan in head_mappings_to_try(source, target, config)
        for k in ks_to_try(source, config)
    ]


def _solve_work(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> float:
    """Operations of the factors, the solutions and the held-out scores."""
    total = 0.0
    for kind in KINDS:
        x = Columns.of(source, kind)
        k = config.k if kind == "keys" else config.k_of_values
        n_layers = len(x.dims) if k == "all" else min(int(k), len(x.dims))
        for heads, dim in zip(Columns.of(target, kind).heads, Columns.of(target, kind).dims):
            if config.head_mapping == "full":
                systems, n, m = 1, n_layers * max(x.widths), heads * dim
            else:
                per_head = -(-max(x.heads) // heads) if config.head_mapping == "grouped" else 1
                systems, n, m = heads, n_layers * per_head * max(x.dims), dim
            total += systems * (n**3 / 3 + 4 * n * n * m)
    return total
