"""The fit's accuracy: weights from streamed moments against float64 on all rows.

    python -m benchmarks.fit_accuracy [--source A --target B] [--rows N] [--k 4 8]

The fit multiplies chunks of rows in float32 and adds them up in float64. Here the
same rows are multiplied in float64, and the solutions of both are compared. Rows
are drawn with the mean and covariance of what the two models (default: the
bundled pair) cache over the bundled text, keys without RoPE, so the systems are
as ill-conditioned as real ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.demo.data import bundled
from kvgraft.fit import Moments, MomentSet, read_text
from kvgraft.fit.capture import FeatureExtractor, capture, row_positions
from kvgraft.fit.features import Columns, FeatureRows
from kvgraft.fit.ridge import solve_ridge
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import LoadedModel, load_model
from kvgraft.models.probe import read_geometry

CHUNK = 1000


def captured(model: LoadedModel, tokens: np.ndarray) -> tuple[ModelGeometry, FeatureRows]:
    """Features of all rows of some sequences."""
    if mx.default_device() == mx.Device(mx.cpu):
        model.model.set_dtype(mx.float32)
    geometry = read_geometry(model.model)
    positions = row_positions(tokens.shape[1], 1)
    strip = FeatureExtractor(geometry, positions, "model")
    found = [strip(capture(model.model, row, positions)) for row in tokens]
    sides = [
        [
            np.concatenate([f.of(kind)[i] for f in found], axis=1)
            for i in range(len(geometry.layers))
        ]
        for kind in ("keys", "values")
    ]
    return geometry, FeatureRows(*sides)


def flat(layers: Sequence[np.ndarray]) -> np.ndarray:
    """``[rows, features]``, layer by layer and head by head."""
    return np.concatenate([head for layer in layers for head in layer], axis=1)


def some(geometry: ModelGeometry, layers: Sequence[int]) -> ModelGeometry:
    return ModelGeometry(tuple(geometry.layers[i] for i in layers), geometry.dtype, "")


def compare(
    kind: str,
    source: tuple[ModelGeometry, FeatureRows],
    target: tuple[ModelGeometry, FeatureRows],
    k: int,
    rows: int,
    ridge: float,
) -> dict[str, Any]:
    """Both solutions for the middle target layer and ``k`` spread source layers."""
    n_source, n_target = len(source[0].layers), len(target[0].layers)
    picked = sorted({round(x) for x in np.linspace(0, n_source - 1, k)})
    middle = n_target // 2
    geometries = some(source[0], picked), some(target[0], [middle])
    real = flat([*(source[1].of(kind)[i] for i in picked), target[1].of(kind)[middle]])
    real = real.astype(np.float64)
    mean = real.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(real.T))
    mix = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    x_columns, y_columns = (Columns.of(g, kind) for g in geometries)
    n = x_columns.width
    moments = Moments(*geometries, kinds=(kind,))
    xx, xy, total = np.zeros((n, n)), np.zeros((n, y_columns.width)), np.zeros(len(mean))
    rng, seconds = np.random.default_rng(0), 0.0
    for _ in range(rows // CHUNK):
        drawn = (rng.standard_normal((CHUNK, len(mean))) @ mix + mean).astype(np.float32)
        wide = drawn.astype(np.float64) - mean
        xx += wide[:, :n].T @ wide[:, :n]
        xy += wide[:, :n].T @ wide[:, n:]
        total += wide.sum(axis=0)
        sides = []
        for columns, part in ((x_columns, drawn[:, :n]), (y_columns, drawn[:, n:])):
            layers = []
            for start, heads, dim in zip(columns.starts, columns.heads, columns.dims):
                block = part[:, start : start + heads * dim].reshape(CHUNK, heads, dim)
                layers.append(np.ascontiguousarray(block.swapaxes(0, 1)))
            sides.append(FeatureRows(layers, layers))
        begun = time.perf_counter()
        moments.add(*sides)
        seconds += time.perf_counter() - begun
    count = rows // CHUNK * CHUNK
    xx -= np.outer(total[:n], total[:n]) / count
    xy -= np.outer(total[:n], total[n:]) / count
    view, every = MomentSet(moments), range(len(picked))
    got, report = solve_ridge(
        view.xx(kind, every, None), view.xy(kind, every, None, [0], None), ridge
    )
    want, _ = solve_ridge(xx, xy, ridge)
    return {
        "kind": kind,
        "k": len(picked),
        "features": n,
        "rows": count,
        "lambda": ridge,
        "condition": report.condition,
        "relative_error_of_W": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "seconds_moments": seconds,
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", default=str(bundled("models/large")))
    parser.add_argument("--target", default=str(bundled("models/small")))
    parser.add_argument("--rows", type=int, default=128_000)
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--lambda", dest="ridge", type=float, default=0.01)
    parser.add_argument("--sequences", type=int, default=12, help="of 512 tokens, to learn from")
    parser.add_argument("--json", help="write the numbers here")
    args = parser.parse_args(argv)
    source = load_model(args.source)
    text = read_text(
        bundled("text/calibration_novels.txt"),
        source.tokenizer,
        sequences=args.sequences,
        seq_len=512,
    )
    sides = captured(source, text.tokens), captured(load_model(args.target), text.tokens)
    out = []
    for k in args.k:
        for kind in ("keys", "values"):
            row = compare(kind, *sides, k, args.rows, args.ridge)
            out.append(row)
            print(
                f"{kind:6s} k={row['k']}, {row['features']} features, {row['rows']:,} rows, "
                f"condition {row['condition']:.1e}: W differs from float64 by "
                f"{row['relative_error_of_W']:.1e}",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)
    return out


if __name__ == "__main__":
    main()
