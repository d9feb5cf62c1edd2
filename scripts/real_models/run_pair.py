"""Both directions of a real pair, from text to loss after a hand-off.

Runs both models once over the text, fits every map asked for in both directions,
saves, verifies and loads each, and measures the loss of the receiving model after
a prefix whose cache is its own, mapped, or missing, the sender alone beside it.

    python scripts/real_models/run_pair.py A B --text FILE --heldout FILE --out FOLDER

On Linux run it with OpenBLAS in front of MLX's own BLAS (`kvgraft env` tells how).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from kvgraft.cache.map import map_cache
from kvgraft.evaluate.arms import run_arms
from kvgraft.fit import FitConfig, GatheredMoments, Moments, MomentSet, read_text
from kvgraft.fit.capture import FeatureExtractor, capture, row_positions
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.verify import verify_artifact
from kvgraft.models.forward import prefill
from kvgraft.models.loading import LoadedModel, check_tokenizers, load_model
from kvgraft.models.probe import read_geometry

END_OF_TEXT = "<|endoftext|>"
Documents = list[list[int]]


def gather_both_ways(
    a: LoadedModel, b: LoadedModel, text: Sequence[Path], config: FitConfig
) -> tuple[GatheredMoments, GatheredMoments, dict[str, float]]:
    """Moments of a to b and of b to a from one run over the text."""
    calibration = read_text(
        [str(p) for p in text],
        a.tokenizer,
        sequences=config.sequences,
        seq_len=config.seq_len,
        heldout=config.heldout,
    )
    positions = row_positions(calibration.seq_len, config.stride, config.skip)
    geometries = [read_geometry(m.model) for m in (a, b)]
    strippers = [
        FeatureExtractor(g, positions, who)
        for g, who in zip(geometries, ("source", "target"), strict=True)
    ]
    moments = {
        (way, held): Moments(
            geometries[way],
            geometries[1 - way],
            structure="full",
            dtype="float32" if held else "float64",
        )
        for way in (0, 1)
        for held in (False, True)
    }
    seconds = {"models": 0.0, "moments": 0.0}
    for i, tokens in enumerate(calibration.tokens):
        start = time.perf_counter()
        rows = [
            strip.finish(strip.start(capture(m.model, tokens, positions)))
            for strip, m in zip(strippers, (a, b), strict=True)
        ]
        mx.clear_cache()
        seconds["models"] += time.perf_counter() - start
        start = time.perf_counter()
        held = bool(calibration.heldout[i])
        for way in (0, 1):
            moments[way, held].add(rows[way], rows[1 - way])
        seconds["moments"] += time.perf_counter() - start
        print(
            f"sequence {i + 1}/{len(calibration)}",
            {k: round(v) for k, v in seconds.items()},
            flush=True,
        )
    for part in moments.values():
        part.flush()
    ids = [m.identity() for m in (a, b)]
    both = [
        GatheredMoments(
            MomentSet(moments[way, False]),
            MomentSet(moments[way, True]),
            config,
            {"text": calibration.describe(), "stride": config.stride, "skip": config.skip},
            ids[way],
            ids[1 - way],
        )
        for way in (0, 1)
    ]
    return both[0], both[1], seconds


def read_documents(path: Path, tokenizer: Any, length: int, count: int) -> Documents:
    """Stretches of ``length`` tokens, one per document that is long enough."""
    out = []
    for text in path.read_text(encoding="utf-8").split(END_OF_TEXT):
        ids = tokenizer.encode(text.strip())
        if len(ids) >= length:
            out.append(list(ids[:length]))
    if len(out) < count:
        print(f"only {len(out)} documents of {length} tokens in {path}")
    return out[:count]


def once(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one run, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(
    source: LoadedModel,
    target: LoadedModel,
    mappers: dict[str, Mapper],
    documents: Documents,
    prefix: int,
) -> dict[str, Any]:
    """Losses of all arms, seconds of a hand-off, and what the target writes."""
    geometry = read_geometry(target.model)
    read: dict[tuple[int, ...], list[Any]] = {}

    def by_source(tokens: Sequence[int]) -> list[Any]:
        # All arms of one document share the sender's prefill; the last arm uses it up.
        key = tuple(tokens)
        if key not in read:
            read.clear()
            read[key] = prefill(source.model, tokens)
        return read[key]

    def grafted(mapper: Mapper) -> Callable[[Sequence[int]], list[Any]]:
        return lambda tokens: map_cache(
            by_source(tokens), mapper, target.model, target_geometry=geometry
        )

    arms: dict[str, Any] = {name: (target.model, grafted(m)) for name, m in mappers.items()}
    arms["target native"] = (target.model, lambda t: prefill(target.model, t))
    arms["target no context"] = (target.model, lambda t: None)
    arms["source alone"] = (source.model, by_source)
    results = run_arms(
        arms, documents, prefix, lambda done, total: print(f"scored {done}/{total}", flush=True)
    )
    out: dict[str, Any] = {"nll": {}}
    native = results["target native"]
    for name, result in results.items():
        gap, error = result.gap(native)
        out["nll"][name] = {"nll": result.nll, "gap": gap, "gap_error": error}
        print(f"  {name:24s} {result.nll:.4f}  {gap:+.4f} ± {error:.4f}")
    best = min(mappers, key=lambda name: results[name].nll)
    tokens = documents[0][:prefix]
    source_seconds, cache = once(lambda: prefill(source.model, tokens[:-1]))
    graft = grafted(mappers[best])
    read.clear()
    read[tuple(tokens[:-1])] = cache
    map_seconds, mapped = once(lambda: graft(tokens[:-1]))
    native_seconds, own = once(lambda: prefill(target.model, tokens[:-1]))
    out |= {
        "best": best,
        "tokens": prefix - 1,
        "seconds": {
            "source prefill": source_seconds,
            "map": map_seconds,
            "target prefill": native_seconds,
        },
        "text": {
            name: reply(target, held, tokens[-1:])
            for name, held in (("mapped", mapped), ("native", own))
        },
    }
    return out


def reply(loaded: LoadedModel, cache: list[Any], tokens: Sequence[int], limit: int = 40) -> str:
    """Greedy continuation."""
    steps = generate_step(
        mx.array(list(tokens)), loaded.model, max_tokens=limit, prompt_cache=cache
    )
    return str(loaded.tokenizer.decode([int(token) for token, _ in steps]))


def solve_all(
    moments: GatheredMoments, configs: dict[str, FitConfig], folder: Path
) -> tuple[dict[str, Mapper], dict[str, Any]]:
    """Fit, save, verify and load a mapper per config."""
    mappers, facts = {}, {}
    for name, config in configs.items():
        seconds, mapper = once(lambda config=config: moments.solve(config))
        path = mapper.save(folder / name.replace(" ", "-"))
        verify_artifact(path)
        mappers[name] = Mapper.load(path)
        keys = [m.scores["r2_keys"] for m in mapper.layers]
        values = [m.scores["r2_values"] for m in mapper.layers]
        facts[name] = {
            "seconds": seconds,
            "parameters": mapper.n_parameters,
            "r2_keys": sum(keys) / len(keys),
            "r2_values": sum(values) / len(values),
        }
        print(f"  {name:16s}", {k: round(v, 3) for k, v in facts[name].items()}, flush=True)
    return mappers, facts


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Command line; returns what it writes to ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs=2, help="two mlx-lm model folders of one family")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="calibration text")
    parser.add_argument("--heldout", type=Path, required=True, help="documents to score")
    parser.add_argument("--out", type=Path, required=True, help="folder for mappers and results")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--scored", type=int, default=128)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plans", nargs="+", default=["full", "local"])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(argv)
    a, b = (load_model(m) for m in args.models)
    for loaded in (a, b):
        loaded.model.set_dtype(getattr(mx, args.dtype))
    check_tokenizers(a.tokenizer, b.tokenizer)
    config = FitConfig(sequences=args.sequences, seq_len=args.seq_len, stride=args.stride)
    configs = {
        f"{plan} k={k}": replace(config, head_mapping=plan, k=k)
        for plan in args.plans
        for k in args.k
    }
    forth, back, seconds = gather_both_ways(a, b, args.text, config)
    documents = read_documents(args.heldout, a.tokenizer, args.prefix + args.scored, args.documents)
    results: dict[str, Any] = {"seconds": seconds, "config": config.to_dict()}
    for moments, source, target in ((forth, a, b), (back, b, a)):
        way = f"{Path(source.name).name} to {Path(target.name).name}"
        print(way)
        mappers, fits = solve_all(moments, configs, args.out / way.replace(" ", "-"))
        results[way] = {"fits": fits} | measure(source, target, mappers, documents, args.prefix)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results["peak_rss_gb"] = peak / 1e6  # kilobytes on Linux
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=2))
    print(f"peak resident memory {results['peak_rss_gb']:.1f} GB")
    return results


if __name__ == "__main__":
    main()
