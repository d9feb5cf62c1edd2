"""Seconds of a hand-off against seconds of re-prefill, on this machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from kvgraft import cache as caches
from kvgraft.evaluate.arms import timed_extend
from kvgraft.evaluate.checkpoint import SourceLayers
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry

__all__ = ["break_even", "forget_file_cache", "time_length"]


def time_length(
    n: int,
    *,
    mapper: Mapper,
    artifact: Path | None,
    model: Module,
    geometry: ModelGeometry,
    capture: SourceLayers,
    tokens: Sequence[int],
    native_start: int,
    native_end: int,
    repeats: int,
) -> dict[str, Any]:
    """Time mapping and prefill of ``n`` tokens.

    The source's cache is repeated to that length: the time does not depend on its
    content. Medians of ``repeats`` runs after one warm-up run; cold runs open the
    artifact anew and have no warm-up.

    Args:
        n: Tokens in the cache.
        mapper: The mapper.
        artifact: Where it is on disk; without it there are no cold runs.
        model: The target.
        geometry: Its geometry.
        capture: A cache of the source, ``{layer: (keys, values)}``.
        tokens: Token ids for the prefill; repeated to the length.
        native_start: Native tokens at the start.
        native_end: Native tokens at the end, the last one included.
        repeats: Timed runs.

    Returns:
        Seconds, tokens per second and peak bytes, JSON-ready.
    """
    source = {i: (_tiled(k, n), _tiled(v, n)) for i, (k, v) in capture.items()}
    mx.eval(source)
    text = (list(tokens) * (n // len(tokens) + 1))[:n]
    # The last one is not counted: it comes on top of a cache of n tokens, mapped or not.
    head, tail = min(native_start, n // 2), min(native_end - 1, n // 2)

    def mapped(with_mapper: Mapper, drop: bool) -> list[Any]:
        layers = iter_transfer(source, with_mapper, unload_after=drop, dtype=geometry.mx_dtype)
        return caches.build_cache(geometry, ((k, v) for _, k, v in layers))

    prefill_seconds, prefill_peak = _time(lambda: prefill(model, text), repeats)
    warm, map_peak = _time(lambda: mapped(mapper, False), repeats)
    row: dict[str, Any] = {
        "tokens": n,
        "prefill_seconds": prefill_seconds,
        "map_warm_seconds": warm,
        "prefill_tokens_per_second": n / prefill_seconds,
        "map_tokens_per_second": n / warm,
        "prefill_peak_bytes": prefill_peak,
        "map_peak_bytes": map_peak,
    }
    if artifact is not None:
        mapper.unload_all()
        mx.clear_cache()
        cold = []
        for _ in range(repeats):
            row["file_cache_dropped"] = forget_file_cache(artifact)
            start = time.perf_counter()
            mapped(open_mapper(artifact), True)
            cold.append(time.perf_counter() - start)
        row["map_cold_seconds"] = statistics.median(cold)
    native = 0.0
    if head:
        native += _time(lambda: prefill(model, text[:head]), repeats)[0]
    if tail:
        native += _extend_seconds(lambda: mapped(mapper, False), model, text[n - tail :], repeats)
    row["native_seconds"] = native
    row["handoff_warm_seconds"] = warm + native
    if artifact is not None:
        row["handoff_cold_seconds"] = row["map_cold_seconds"] + native
    return row


def _tiled(x: mx.array, n: int) -> mx.array:
    times = -(-n // x.shape[2])
    return mx.contiguous(mx.concatenate([x] * times, axis=2)[:, :, :n])


def _time(work: Callable[[], Any], repeats: int) -> tuple[float, int]:
    work()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), max(0, mx.get_peak_memory() - before)


def _extend_seconds(
    make_cache: Callable[[], list[Any]], model: Module, tokens: Sequence[int], repeats: int
) -> float:
    """Median seconds to read the last tokens of a cache again on top of the others."""
    times = []
    for _ in range(repeats + 1):
        cache = make_cache()
        for entry in cache:
            entry.trim(len(tokens))
        times.append(timed_extend(model, cache, tokens))
    return statistics.median(times[1:])


def break_even(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """From how many tokens on the hand-off is faster than re-prefill.

    Between measured lengths the difference is interpolated linearly.

    Args:
        rows: What :func:`time_length` returned, ascending.
        kind: ``"warm"`` or ``"cold"``.

    Returns:
        ``{"tokens": n, "is": "at most" | "about"}``; ``{"tokens": None}`` if it
        is not faster at the longest measured length; ``None`` if nothing was
        measured.
    """
    name = f"handoff_{kind}_seconds"
    points = [(r["tokens"], r["prefill_seconds"] - r[name]) for r in rows if name in r]
    if not points:
        return None
    if points[-1][1] <= 0:
        return {"tokens": None}
    if all(won > 0 for _, won in points):
        return {"tokens": points[0][0], "is": "at most"}
    at = max(i for i, (_, won) in enumerate(points) if won <= 0)
    (n0, w0), (n1, w1) = points[at], points[at + 1]
    return {"tokens": round(n0 + (n1 - n0) * -w0 / (w1 - w0)), "is": "about"}


def forget_file_cache(artifact: Path) -> bool:
    """Ask the system to drop its cached copy of an artifact's files.

    Returns:
        Whether that is possible here; elsewhere a "cold" run reads files that
        the system may still hold in memory.
    """
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    files = [artifact] if artifact.is_file() else sorted(artifact.glob("*.safetensors"))
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            advise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True
