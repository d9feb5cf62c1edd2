"""Drift: what is left of a conversation after many hand-offs back and forth.

    python -m benchmarks.handoff_drift [--hops N] [--documents N] [--up FOLDER] [--json FILE]

The bundled pair reads held-out documents. The large model reads the beginning;
then the conversation goes to the other model again and again, and each reads
(and is scored on) the next stretch. The same documents under four rules:

    re-prefill   the target re-prefills everything at each hand-off
    no limit     everything is mapped at each hand-off (max_mapped=None)
    limit 1      rows that were mapped once are re-prefilled (max_mapped=1, the default)
    kept caches  limit 1, and each model's own cache waits for it to come back

The map up, which does not ship, is fitted first on the bundled calibration text;
with --up it is kept in a folder for the next time.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.cache import n_tokens, trim
from kvgraft.demo.data import bundled, documents, windows
from kvgraft.fit import FitConfig, TextSource, fit_mapper
from kvgraft.handoff import GenerationState, SwitchOptions, switch
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.save import save_mapper
from kvgraft.models.forward import continuation_nll, prefill
from kvgraft.models.handle import ModelHandle
from kvgraft.models.loading import LoadedModel, load_model

RULES: dict[str, int | None] = {
    "re-prefill": 1,
    "no limit": None,
    "limit 1": 1,
    "kept caches": 1,
}
"""``max_mapped`` by rule."""

NAMES = ("large", "small")


def conversation(
    rule: str,
    handles: Sequence[ModelHandle],
    maps: Sequence[Mapper],
    tokens: Sequence[int],
    *,
    prefix: int,
    stretch: int,
    hops: int,
) -> dict[str, list[float]]:
    """One document: per hand-off the loss after it, seconds, tokens read, wear."""
    state = GenerationState.of(
        handles[0], tokens[:prefix], prefill(handles[0].load(), tokens[: prefix - 1])
    )
    parked: dict[int, list[Any]] = {}
    out: dict[str, list[float]] = {"nll": [], "seconds": [], "read": [], "worst": []}
    for hop in range(hops):
        here, there = hop % 2, (hop + 1) % 2
        start = time.perf_counter()
        done = switch(
            state,
            handles[there],
            None if rule == "re-prefill" else maps[here],
            SwitchOptions(keep_source=True, max_mapped=RULES[rule]),
            own_cache=parked.pop(there, None),
        )
        seconds = time.perf_counter() - start
        if rule == "kept caches" and state.cache is not None:
            parked[here] = state.cache
        n = len(state.tokens)
        state = done.state
        assert state.cache is not None
        report = done.report
        out["worst"].append(max((part.times for part in state.mapped_ranges), default=0))
        losses = continuation_nll(handles[there].load(), state.cache, tokens[n - 1 : n + stretch])
        out["nll"].append(float(np.mean(losses)))
        out["seconds"].append(seconds)
        out["read"].append(report.native_start - report.reused + report.native_end)
        held = n_tokens(state.cache)
        assert held in (n + stretch - 1, n + stretch)
        trim(state.cache, n + stretch - 1)
        state = GenerationState(handles[there], list(tokens[: n + stretch]), state.cache)
    return out


def upward(source: LoadedModel, target: LoadedModel, folder: Path | None) -> Mapper:
    """The mapper from the small model to the large one."""
    if folder is not None and folder.exists():
        return Mapper.load(folder)
    text = [TextSource(bundled(f"text/calibration_{part}.txt")) for part in ("stories", "novels")]
    config = FitConfig(sequences=96, seq_len=256, stride=1, k=2)
    mapper = fit_mapper(source, target, text, config)
    return mapper if folder is None else Mapper.load(save_mapper(mapper, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hops", type=int, default=8)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--stretch", type=int, default=32)
    parser.add_argument("--up", type=Path)
    parser.add_argument("--json")
    args = parser.parse_args()

    logging.getLogger("kvgraft.handoff").setLevel(logging.ERROR)  # re-prefill is a rule here
    loaded = [load_model(bundled(f"models/{name}")) for name in NAMES]
    for model in loaded:
        model.model.set_dtype(mx.float32)
    up = upward(loaded[1], loaded[0], args.up)
    maps = (Mapper.load(bundled("mapper")), up)
    handles = [ModelHandle(model) for model in loaded]
    length = args.prefix + args.hops * args.stretch + 1
    chosen = [
        window
        for part in ("heldout_stories", "heldout_novels")
        for window in windows(
            documents(part), loaded[0].tokenizer, length, (args.documents + 1) // 2
        )
    ]
    sizes = dict(prefix=args.prefix, stretch=args.stretch, hops=args.hops)
    runs = {
        rule: [conversation(rule, handles, maps, tokens, **sizes) for tokens in chosen]
        for rule in RULES
    }
    native = np.array([run["nll"] for run in runs["re-prefill"]])
    print(f"{len(chosen)} documents of {length} tokens, {mx.default_device()}, float32")
    print("rule         | hand-off          " + "".join(f"{i + 1:>9d}" for i in range(args.hops)))
    for rule, found in runs.items():
        arrays = {key: np.array([run[key] for run in found]) for key in found[0]}
        gap = arrays["nll"] - native
        error = gap.std(axis=0, ddof=1) / np.sqrt(len(chosen))
        rows = {
            "loss, nats/token": (arrays["nll"].mean(0), "9.3f"),
            "more than native": (gap.mean(0), "+9.3f"),
            "standard error": (error, "9.3f"),
            "tokens read": (arrays["read"].mean(0), "9.0f"),
            "mapped at most": (arrays["worst"].max(0), "9.0f"),
            "seconds": (np.median(arrays["seconds"], axis=0), "9.3f"),
        }
        for name, (values, form) in rows.items():
            print(f"{rule:12s} | {name:18s} " + "".join(format(v, form) for v in values))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(runs, file, indent=1)


if __name__ == "__main__":
    main()
