"""From measurements to results: what is judged, reported and stored."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kvgraft.evaluate import arms
from kvgraft.evaluate.metrics import Interval, Variance, bootstrap, distance_bins
from kvgraft.evaluate.needle import SWITCHES
from kvgraft.evaluate.results import DocumentResult, Measurements, NeedleResult
from kvgraft.evaluate.timing import break_even
from kvgraft.evaluate.verdict import Facts, Verdict, judge
from kvgraft.mapper.config import to_json_value
from kvgraft.mapper.mapper import Mapper
from kvgraft.ops import env

__all__ = [
    "RESULTS_VERSION",
    "machine",
    "recommended_arm",
    "stored_quality",
    "summarise",
    "verdict_of",
]

RESULTS_VERSION = 1


def summarise(mapper: Mapper, measured: Measurements) -> dict[str, Any]:
    """Everything that the report shows, JSON-ready; ``eval.json``."""
    documents = measured.documents
    by_arm = {name: _arm(documents, name, measured.config.seed) for name in _order(documents)}
    r2 = {
        "keys": _r2([d.keys for d in documents]),
        "values": _r2([d.values for d in documents]),
    }
    cosines = _cosines(documents)
    needle = _needle(measured.needles)
    even = {kind: break_even(measured.speed, kind) for kind in ("warm", "cold")}
    verdict = judge(_facts(measured, cosines, needle, even))
    layers = sorted(mapper.layers, key=lambda m: m.target_layer)
    result = {
        "results_version": RESULTS_VERSION,
        "date": date.today().isoformat(),
        "verdict": {
            "level": verdict.level,
            "reasons": list(verdict.reasons),
            "notes": [*verdict.notes, *measured.notes],
        },
        "mapper": {
            "summary": mapper.describe(),
            "parameters": mapper.n_parameters,
            "sources": {
                "keys": [list(m.keys.sources) for m in layers],
                "values": [list(m.values.sources) for m in layers],
            },
            "target_layers": [m.target_layer for m in layers],
            "source_layer_count": len(mapper.source.layers),
            "fit": {
                k: v
                for k, v in mapper.fit.items()
                if isinstance(v, (str, int, float)) and not isinstance(v, bool)
            },
        },
        "models": measured.models,
        "text": measured.text.describe(),
        "settings": measured.config.to_dict(),
        "machine": machine(),
        "versions": _versions(),
        "arms": by_arm,
        "by_distance": _by_distance(documents, measured.config.seed),
        "attention_cosine": cosines,
        "r2": r2,
        "importance": measured.importance,
        "needle": needle,
        "speed": measured.speed,
        "break_even": even,
        "policy": measured.policy,
    }
    out: dict[str, Any] = to_json_value(result, "results")
    return out


def recommended_arm(results: dict[str, Any]) -> str | None:
    """The arm with the recommended native tokens; ``None`` if that is the plain hand-off."""
    name = arms.with_ends(results["policy"]["head"], results["policy"]["tail"])
    return name if name != arms.MAPPED and name in results["arms"] else None


def stored_quality(results: dict[str, Any]) -> dict[str, Any]:
    """The part of the results that goes into the artifact (``Mapper.quality``)."""
    by_arm, cosine = results["arms"], results["attention_cosine"]
    quality = {
        "verdict": results["verdict"]["level"],
        "reasons": results["verdict"]["reasons"],
        "notes": results["verdict"]["notes"],
        "policy": {name: results["policy"][name] for name in ("head", "tail")},
        "nll": {name: arm["nll"][0] for name, arm in by_arm.items()},
        "gap": by_arm[arms.MAPPED]["gap"],
        "agreement": by_arm[arms.MAPPED]["agreement"],
        "kl": by_arm[arms.MAPPED]["kl"],
        "attention_cosine": None if cosine is None else cosine["mean"],
        "r2": {kind: results["r2"][kind]["mean"] for kind in ("keys", "values")},
        "needle": None if results["needle"] is None else results["needle"]["overall"],
        "break_even_tokens": {
            kind: None if found is None else found["tokens"]
            for kind, found in results["break_even"].items()
        },
        "speed": [
            {
                k: row[k]
                for k in ("tokens", "map_warm_seconds", "map_cold_seconds", "prefill_seconds")
                if k in row
            }
            for row in results["speed"]
        ],
        "text": results["text"],
        "prefix": results["settings"]["prefix"],
        "scored": results["settings"]["scored"],
        "seed": results["settings"]["seed"],
        "models": results["models"],
        "versions": results["versions"],
        "machine": results["machine"],
        "date": results["date"],
    }
    return quality


def machine() -> dict[str, Any]:
    """The machine of the measurement, without names of user or host."""
    facts = env.report()
    library = facts["blas"]["library"]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(env.machine_memory() / 1e9, 1),
        "device": facts["device"],
        "map_layer": facts["map_layer"][facts["device"]],
        "blas": None if library is None else Path(library).name,
    }


def _versions() -> dict[str, Any]:
    facts = env.report()
    return {name: facts[name] for name in ("kvgraft", "mlx", "mlx_lm", "python")}


def _processor() -> str:
    if sys.platform == "darwin":
        try:
            found = subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            )
            return found.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --------------------------------------------------------------------- arms


def _order(documents: Sequence[DocumentResult]) -> list[str]:
    """Arms, the native one first and the controls last."""
    names = list(documents[0].arms)
    ends = [n for n in names if n.startswith(arms.MAPPED) and n != arms.MAPPED]
    first = [arms.NATIVE, arms.MAPPED, *ends, arms.ALONE, arms.NONE, arms.WRONG, arms.RANDOM]
    return [n for n in (*first, arms.RAW) if n in names]


def _losses(documents: Sequence[DocumentResult], name: str) -> np.ndarray:
    return np.array([d.arms[name].nll.astype(np.float64).mean() for d in documents])


def _arm(documents: Sequence[DocumentResult], name: str, seed: int) -> dict[str, Any]:
    losses, native = _losses(documents, name), _losses(documents, arms.NATIVE)
    nll = bootstrap(losses, seed)
    agree = [float((d.arms[name].top == d.arms[arms.NATIVE].top).mean()) for d in documents]
    kl = [float(d.arms[name].kl.mean()) for d in documents if len(d.arms[name].kl)]
    return {
        "nll": nll.to_list(),
        "perplexity": math.exp(nll.mean) if math.isfinite(nll.mean) and nll.mean < 50 else None,
        "gap": bootstrap(losses - native, seed).to_list(),
        "agreement": float(np.mean(agree)),
        "kl": float(np.mean(kl)) if kl else None,
        "finite": bool(np.isfinite(losses).all()),
        "per_document": [float(x) for x in losses],
    }


def _by_distance(documents: Sequence[DocumentResult], seed: int) -> dict[str, Any]:
    scored = len(documents[0].arms[arms.NATIVE].nll)
    bins = distance_bins(scored)
    shown = [n for n in _order(documents) if n not in (arms.RANDOM, arms.NATIVE)]
    out: dict[str, Any] = {"bins": [list(b) for b in bins], "gap": {}}
    for name in shown:
        out["gap"][name] = [
            bootstrap(
                [
                    float((d.arms[name].nll[a:b] - d.arms[arms.NATIVE].nll[a:b]).mean())
                    for d in documents
                ],
                seed,
            ).to_list()
            for a, b in bins
        ]
    return out


def _r2(stored: Sequence[Sequence[Sequence[Sequence[float]]]]) -> dict[str, Any]:
    by_head = []
    for layer in range(len(stored[0])):
        sums = Variance()
        for document in stored:
            sums.merge(document[layer])
        by_head.append(sums.r2())
    by_layer = [float(np.nanmean(x)) if np.isfinite(x).any() else float("nan") for x in by_head]
    finite = [x for x in by_layer if math.isfinite(x)]
    return {
        "by_head": by_head,
        "by_layer": by_layer,
        "mean": float(np.mean(finite)) if finite else float("nan"),
    }


def _cosines(documents: Sequence[DocumentResult]) -> dict[str, Any] | None:
    if not documents[0].cosines:
        return None
    by_head = np.mean([np.array(d.cosines) for d in documents], axis=0)
    by_layer = by_head.mean(axis=1)
    return {
        "by_head": by_head.tolist(),
        "by_layer": by_layer.tolist(),
        "mean": float(by_layer.mean()),
        "min": float(by_layer.min()),
    }


# ------------------------------------------------------------------- needles


def _needle(needles: Sequence[NeedleResult]) -> dict[str, Any] | None:
    if not needles:
        return None
    names = list(needles[0].right)
    cells = []
    for length in sorted({n.length for n in needles}):
        for depth in sorted({n.depth for n in needles}):
            here = [n for n in needles if n.length == length and n.depth == depth]
            cells.append(
                {
                    "length": length,
                    "depth": depth,
                    "tasks": len(here),
                    "mapped_at_mid": sum(n.mapped_at_mid for n in here),
                    "right": {name: sum(n.right[name] for n in here) for name in names},
                }
            )
    return {
        "tasks": len(needles),
        "overall": {name: _share(needles, name) for name in names},
        "by_kind": {
            kind: {name: _share([n for n in needles if n.kind == kind], name) for name in names}
            for kind in sorted({n.kind for n in needles})
        },
        "cells": cells,
        "examples": [
            {"length": n.length, "depth": n.depth, "answer": n.answer, "replies": n.replies}
            for n in needles[:4]
        ],
    }


def _share(needles: Sequence[NeedleResult], name: str) -> float:
    return sum(n.right[name] for n in needles) / len(needles)


# -------------------------------------------------------------------- verdict


def _facts(
    measured: Measurements,
    cosines: dict[str, Any] | None,
    needle: dict[str, Any] | None,
    even: dict[str, Any],
) -> Facts:
    documents = measured.documents
    mapped = _losses(documents, arms.MAPPED)

    def over(name: str) -> tuple[float, float, float]:
        other = _losses(documents, name)
        # An arm with NaN is worse than any finite one.
        x: Interval = bootstrap(
            np.where(np.isnan(other), 1e3, other) - mapped, measured.config.seed
        )
        return (x.mean, x.low, x.high)

    native, none = _losses(documents, arms.NATIVE), _losses(documents, arms.NONE)
    context = bootstrap(none - native, measured.config.seed)
    agree = {
        name: float(
            np.mean([(d.arms[name].top == d.arms[arms.NATIVE].top).mean() for d in documents])
        )
        for name in (arms.MAPPED, arms.NONE)
    }
    recall = None
    if needle is not None:
        switched = f"{arms.MAPPED}, switch {SWITCHES[0]}"
        recall = (needle["overall"][arms.NATIVE], needle["overall"][switched])
    warm = even["warm"]
    return Facts(
        finite=all(d.finite for d in documents) and bool(np.isfinite(mapped).all()),
        documents=len(documents),
        scored_tokens=len(documents) * measured.config.scored,
        native=float(native.mean()),
        mapped=float(mapped.mean()),
        alone=float(_losses(documents, arms.ALONE).mean()),
        context=(context.mean, context.low, context.high),
        over_none=over(arms.NONE),
        over_wrong=over(arms.WRONG),
        over_random=over(arms.RANDOM),
        over_alone=over(arms.ALONE),
        agreement=agree[arms.MAPPED],
        agreement_none=agree[arms.NONE],
        cosine=None if cosines is None else cosines["mean"],
        needle=recall,
        break_even=None if warm is None else warm["tokens"] is not None,
        disjoint=measured.text.disjoint is not None,
    )


def verdict_of(results: dict[str, Any]) -> Verdict:
    """The verdict in results."""
    found = results["verdict"]
    return Verdict(found["level"], tuple(found["reasons"]), tuple(found["notes"]))
