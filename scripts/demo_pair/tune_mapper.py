"""Tunes the demo's mapper on what the target predicts, after `fit_mapper.sh` has fitted it.

    python -m demo_pair.tune_mapper --mapper FITTED --out TUNED [--steps 300]

The same as `kvgraft fit --tune-steps`, on longer documents than the closed form was
fitted on. All text is the bundled calibration text; a share of it that is not
trained on decides which step is kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.demo.data import bundled
from kvgraft.fit import FitConfig, Moments, MomentSet, TextSource, read_text
from kvgraft.fit.capture import FeatureExtractor, capture, row_positions
from kvgraft.fit.search import read_documents
from kvgraft.fit.solve import heldout_scores, mean_scores
from kvgraft.fit.tune import tune
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry


def rescore(mapper: Mapper, models: list[Any], tokens: np.ndarray) -> None:
    """Held-out R² of the tuned maps, over all rows of ``tokens``."""
    geometries = [read_geometry(m) for m in models]
    positions = row_positions(tokens.shape[1], 1)
    strips = [FeatureExtractor(g, positions, w) for g, w in zip(geometries, ("source", "target"))]
    moments = Moments(*geometries, dtype="float32")
    for row in tokens:
        sides = [s(capture(m, row, positions)) for s, m in zip(strips, models, strict=True)]
        moments.add(*sides)
    for layer in mapper.layers:
        # In-sample scores and conditions are those of the closed form; they go.
        layer.scores = heldout_scores(layer, MomentSet(moments))
    mapper.fit = {k: v for k, v in mapper.fit.items() if not k.startswith("mean_r2")}
    mapper.fit |= mean_scores(mapper.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mapper", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--seq-len", type=int, default=640)
    parser.add_argument("--prefix", type=int, default=448)
    parser.add_argument("--held-out", type=int, default=24, help="documents that decide")
    args = parser.parse_args()
    pair = [load_model(bundled(f"models/{name}")) for name in ("large", "small")]
    models = [loaded.model for loaded in pair]
    for model in models:
        model.set_dtype(mx.float32)
    sources = [
        TextSource(bundled("text/calibration_stories.txt"), 2.0),
        TextSource(bundled("text/calibration_novels.txt")),
    ]
    text = read_text(sources, pair[0].tokenizer, sequences=2000, seq_len=args.seq_len, heldout=0.04)
    fitted = text.tokens[~text.heldout]
    fitted = fitted[np.random.default_rng(0).permutation(len(fitted))]
    heldout = text.tokens[text.heldout][: args.held_out]
    begun = time.perf_counter()
    result = tune(
        Mapper.load(args.mapper),
        lambda i: read_documents(
            models[0], fitted[i % len(fitted)][None], args.prefix, score_source=False
        ),
        read_documents(models[0], heldout, args.prefix, score_source=False),
        models[1],
        read_geometry(models[1]),
        config=FitConfig(tune_steps=args.steps, tune_batch=args.batch, tune_rate=args.rate),
        distinct=len(fitted),
        kept_bytes=3 << 30,
        notify=lambda line: print(line, flush=True),
    )
    mapper = result.mapper
    rescore(mapper, models, heldout)
    mapper.fit["tuning"] = {
        "steps": result.steps,
        "batch": args.batch,
        "rate": args.rate,
        "documents": len(fitted),
        "heldout_documents": len(heldout),
        "seq_len": args.seq_len,
        "prefix": args.prefix,
        "text_sha256": text.digest,
        "divergence_before": result.before,
        "divergence_after": result.after,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    mapper.save(args.out)
    print(f"kept step {result.steps}: divergence {result.before:.4f} -> {result.after:.4f}")


if __name__ == "__main__":
    main()
