"""Recipes of the fit compared by what the target loses with the maps they give.

    python -m benchmarks.fit_recipes [--source A --target B] [--recipes NAME ...] [--swap]
        [--text FILE[=WEIGHT] ...] [--held-out FILE[=WEIGHT] ...] [--folder DIR] [--json FILE]

Both models (default: the bundled pair) read the calibration text once and the beginnings
of the held-out documents; rows, documents and moments are kept in a folder, so that a
second call continues from there: after an interruption, with other recipes, or with --swap
the other way round. Each recipe is solved from the moments, and the target is scored on
the rest of each document, of which it has only the mapped cache.

Printed per recipe: the loss more than with the target's own cache ("gap"), and more than
with the baseline (the first recipe, the paper's: full, shared layers, λ = 0.01), document
by document, each ± standard error; held-out R² of keys and values; weights of the map.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from benchmarks.low_rank import add_low_rank
from numpy.typing import NDArray

from kvgraft.demo.data import bundled
from kvgraft.errors import FitError
from kvgraft.fit import (
    CalibrationText,
    FeatureRows,
    FitConfig,
    LayerScores,
    Moments,
    MomentSet,
    TextSource,
    parse_source,
    read_text,
    score_layers,
    solve_mapper,
)
from kvgraft.fit.capture import CachedRows, FeatureExtractor, capture, row_positions
from kvgraft.fit.checkpoint import FitCheckpoint
from kvgraft.fit.features import common_heads
from kvgraft.fit.search import Documents, read_documents, score, with_target_nll
from kvgraft.fit.token_weights import row_weights
from kvgraft.fit.tune import tune
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import LoadedModel, load_model
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import NO_ROPE, strip_rope

SIDES = ("a", "b")
BASELINE = "full"
CHOOSING = ("separate", "values", "paper-selection")
"""Recipes that differ from the baseline by which layers they take."""


@dataclass(frozen=True)
class Recipe:
    """A way to a map: settings of the fit, and what follows the closed form.

    Attributes:
        config: Settings; those about text are not used.
        about: What is different from the baseline.
        tuned: Go on with some steps of tuning on the target's predictions.
        low_rank: Half the layers, and for the saved weights a low-rank map of the others.
        together: Keys and values of the source are features of both; k counts their layers
            separately, so that equal k is equal weights.
        against: A recipe that it is compared with, besides the baseline.
    """

    config: FitConfig
    about: str
    tuned: bool = False
    low_rank: bool = False
    together: bool = False
    against: str | None = None


def recipes(k: int, n_layers: int, config: FitConfig) -> dict[str, Recipe]:
    """All recipes by name, for ``k`` source layers per target layer."""
    half = max(1, k // 2)
    local = replace(config, head_mapping="local")
    attention = replace(config, token_weights="attention")
    return {
        BASELINE: Recipe(config, f"full, k = {k}, lambda 0.01"),
        "half": Recipe(replace(config, k=half), f"k = {half}"),
        "one": Recipe(replace(config, k=1), "k = 1"),
        "local": Recipe(local, "local"),
        "local-half": Recipe(replace(local, k=half), f"local, k = {half}"),
        "lambda-auto": Recipe(replace(config, ridge_lambda="auto"), "lambda by held-out R2"),
        "separate": Recipe(
            replace(config, source_layers="separate"), "layers for keys, for values"
        ),
        "values": Recipe(
            replace(config, k_values=min(2 * k, n_layers)), "twice the layers for values"
        ),
        "paper-selection": Recipe(replace(config, layer_ranking="paper"), "layers by in-sample R2"),
        "skip": Recipe(replace(config, skip=4), "first 4 tokens left out"),
        "attention": Recipe(attention, "rows weighted by attention"),
        "attention-quarter": Recipe(
            replace(attention, effective_rows=0.25), "the same, a quarter of the rows counts"
        ),
        "attention-half": Recipe(
            replace(attention, k=half), f"weighted, k = {half}", against="half"
        ),
        "attention-local": Recipe(
            replace(attention, head_mapping="local"), "weighted, local", against="local"
        ),
        "attention-auto": Recipe(
            replace(attention, ridge_lambda="auto"), "weighted, lambda auto", against="lambda-auto"
        ),
        "low-rank": Recipe(
            replace(config, k=half), f"k = {half}, low rank of the others", low_rank=True
        ),
        "together": Recipe(config, f"{k} of keys and values as features", together=True),
        "together-double": Recipe(
            replace(config, k=2 * k), f"{2 * k} of keys and values as features", together=True
        ),
        "tuned": Recipe(config, "tuned", tuned=True),
        "attention-tuned": Recipe(attention, "weighted, then tuned", tuned=True, against="tuned"),
    }


@dataclass(frozen=True)
class Reading:
    """What both models read, and where it is kept.

    Attributes:
        folder: Rows, documents and moments.
        paths: Where the two models are.
        text: What is fitted on.
        documents: ``[n, length]`` what is scored on.
        prefix: Tokens of each document, and of each training document of the tuning,
            that the target has as a mapped cache.
    """

    folder: FitCheckpoint
    paths: tuple[str, str]
    text: CalibrationText
    documents: NDArray[np.int32]
    prefix: int

    @property
    def positions(self) -> NDArray[np.int32]:
        """Every row is taken."""
        return row_positions(self.text.seq_len, 1)

    def geometry(self, side: int) -> ModelGeometry:
        """Geometry of a model that has read its text."""
        file = self.folder.path / f"geometry-{SIDES[side]}.json"
        return ModelGeometry.from_dict(json.loads(file.read_text("utf-8")))

    def capture(self, side: int) -> None:
        """Let one model read what it has not read yet."""
        label = SIDES[side]
        sequences = [
            i for i in range(len(self.text)) if not self.folder.has_rows(f"text_{label}", i)
        ]
        documents = [
            i for i in range(len(self.documents)) if not self.folder.has_rows(f"doc_{label}", i)
        ]
        if not sequences and not documents:
            return
        begun = time.perf_counter()
        model = loaded(self.paths[side]).model
        geometry = read_geometry(model)
        for i in sequences:
            rows = capture(model, self.text.tokens[i], self.positions, attention_geometry=geometry)
            self.folder.save_rows(f"text_{label}", i, rows)
            mx.clear_cache()
        for i in documents:
            read = read_documents(model, self.documents[i][None], self.prefix, score_source=False)
            pairs = [read.source[0][layer] for layer in sorted(read.source[0])]
            kept = CachedRows([k[0] for k, _ in pairs], [v[0] for _, v in pairs])
            self.folder.save_rows(f"doc_{label}", i, kept)
        file = self.folder.path / f"geometry-{label}.json"
        file.write_text(json.dumps(geometry.to_dict()), encoding="utf-8")
        seconds = time.perf_counter() - begun
        print(
            f"{Path(self.paths[side]).name} read {len(sequences)} sequences and "
            f"{len(documents)} documents in {seconds:.0f} s",
            flush=True,
        )

    def rows(self, label: str, i: int) -> CachedRows:
        """Rows that :meth:`capture` kept."""
        found = self.folder.load_rows(label, i)
        if found is None:
            raise FitError(f"{self.folder.path} lacks the rows {label} {i}.")
        return found[0]

    def source_documents(self, side: int) -> Documents:
        """The scored documents as a source has read them."""
        return self._as_documents(
            self.documents,
            [self.rows(f"doc_{SIDES[side]}", i) for i in range(len(self.documents))],
        )

    def heldout_documents(self, side: int, count: int) -> Documents:
        """Held-out sequences of the calibration text, to decide about tuning."""
        chosen = np.flatnonzero(self.text.heldout)[:count]
        return self._as_documents(
            self.text.tokens[chosen], [self.rows(f"text_{SIDES[side]}", int(i)) for i in chosen]
        )

    def training_document(self, side: int, i: int) -> Documents:
        """A sequence that was fitted on."""
        fitted = np.flatnonzero(~self.text.heldout)
        at = int(fitted[i % len(fitted)])
        return self._as_documents(
            self.text.tokens[at][None], [self.rows(f"text_{SIDES[side]}", at)]
        )

    def _as_documents(self, tokens: NDArray[np.int32], rows: Sequence[CachedRows]) -> Documents:
        n = self.prefix - 1
        source = [
            {
                i: (k[None, :, :n], v[None, :, :n])
                for i, (k, v) in enumerate(zip(one.keys, one.values, strict=True))
            }
            for one in rows
        ]
        return Documents(tokens, self.prefix, source)


class Pair:
    """One direction of a pair: its moments and what its target says.

    Args:
        reading: What both models have read.
        source: Which of the two is the source.
    """

    def __init__(self, reading: Reading, source: int) -> None:
        self.reading = reading
        self.sides = source, 1 - source
        self.geometries = reading.geometry(source), reading.geometry(1 - source)
        self.model = loaded(reading.paths[1 - source]).model
        self.documents = with_target_nll(reading.source_documents(source), self.model)
        self._scores: dict[tuple[str, str], LayerScores] = {}
        self._together = False

    def together(self) -> Pair:
        """The same pair with the source's keys and values as features of both kinds.

        As a source of twice as many layers: those of the keys, as keys and as values,
        then those of the values, likewise.
        """
        out = copy.copy(self)
        source, n = self.geometries[0], len(self.geometries[0].layers)
        layers = [replace(g, value_dim=g.key_dim) for g in source.layers]
        layers += [replace(g, key_dim=g.value_dim, rope=NO_ROPE) for g in source.layers]
        out.geometries = replace(source, layers=tuple(layers)), self.geometries[1]
        at = mx.arange(self.reading.prefix - 1)
        doubled = []
        for one in self.documents.source:
            both = {i: (k, strip_rope(k, at, source.layers[i].rope)) for i, (k, _) in one.items()}
            both |= {i + n: (v, v) for i, (_, v) in one.items()}
            doubled.append(both)
        out.documents = replace(self.documents, source=doubled)
        out._scores, out._together = {}, True
        return out

    def moments(self, config: FitConfig) -> tuple[MomentSet, MomentSet]:
        """Moments of the fitted and of the held-out text, from the folder if they are there."""
        weighted = config.token_weights == "attention"
        fit = f"attention{config.effective_rows:g}" if weighted else "uniform"
        return (
            self._gathered(f"fit-{fit}", config, heldout=False),
            self._gathered("heldout", config, heldout=True),
        )

    def _gathered(self, name: str, config: FitConfig, *, heldout: bool) -> MomentSet:
        direction = SIDES[self.sides[0]] + SIDES[self.sides[1]]
        name += f"-skip{config.skip}" + ("-together" if self._together else "")
        file = self.reading.folder.path / f"sums-{direction}-{name}.safetensors"
        if not file.exists():
            moments = Moments(*self.geometries, dtype="float32" if heldout else "float64")
            for source, target, weights in self._features(config, heldout=heldout):
                moments.add(source, target, weights)
            moments.save(file)
            del moments
            gc.collect()
        return MomentSet(Moments.load(file, mapped=True)[0])

    def _features(
        self, config: FitConfig, *, heldout: bool
    ) -> Iterator[tuple[FeatureRows, FeatureRows, dict[str, NDArray[np.float64]] | None]]:
        reading, skip = self.reading, config.skip
        strips = [
            FeatureExtractor(reading.geometry(side), reading.positions, SIDES[side])
            for side in self.sides
        ]
        for i in np.flatnonzero(reading.text.heldout == heldout):
            rows = [reading.rows(f"text_{SIDES[side]}", int(i)) for side in self.sides]
            features = [
                FeatureRows([x[:, skip:] for x in f.keys], [x[:, skip:] for x in f.values])
                for f in (strip(r) for strip, r in zip(strips, rows, strict=True))
            ]
            if self._together:
                both = [*features[0].keys, *features[0].values]
                features[0] = FeatureRows(both, both)
            weights = None
            if config.token_weights == "attention" and not heldout:
                seen = rows[1].sensitivity
                assert seen is not None
                weights = row_weights(seen[:, skip:], config.effective_rows)
            yield features[0], features[1], weights
            mx.clear_cache()

    def solve(self, recipe: Recipe, baseline: FitConfig, tuning: FitConfig) -> tuple[Mapper, int]:
        """The map of a recipe, and the number of its weights."""
        config = recipe.config
        fit, heldout = self.moments(config)
        key = f"{config.token_weights}{config.effective_rows}{config.skip}", config.layer_ranking
        if key not in self._scores:
            ridge = config.penalty(fit.count("keys"))
            self._scores[key] = score_layers(fit, heldout, rule=config.layer_ranking, ridge=ridge)
        mapper = solve_mapper(fit, heldout, config, scores=self._scores[key])
        if recipe.low_rank:
            return add_low_rank(mapper, fit, heldout, config, baseline)
        if recipe.tuned:
            source = self.sides[0]
            mapper = tune(
                mapper,
                lambda i: self.reading.training_document(source, i),
                self.reading.heldout_documents(source, 8),
                self.model,
                self.geometries[1],
                config=replace(
                    config,
                    tune_steps=tuning.tune_steps,
                    tune_batch=tuning.tune_batch,
                    tune_rate=tuning.tune_rate,
                ),
                distinct=int((~self.reading.text.heldout).sum()),
                notify=lambda line: print(f"    {line}", flush=True),
            ).mapper
            for name in ("mean_r2_keys", "mean_r2_values"):
                mapper.fit.pop(name, None)  # those of the closed form
        return mapper, mapper.n_parameters


def loaded(path: str) -> LoadedModel:
    """A model, in the dtype that this machine multiplies."""
    model = load_model(path)
    if mx.default_device() == mx.Device(mx.cpu):
        model.model.set_dtype(mx.float32)
    return model


def mean_error(x: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Mean over documents and its standard error."""
    values = np.asarray(x, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def report(
    name: str,
    recipe: Recipe,
    mapper: Mapper,
    n_weights: int,
    losses: list[float],
    native: Sequence[float],
    earlier: dict[str, list[float]],
) -> dict[str, Any]:
    """The numbers of one recipe; printed as one line."""
    gap = mean_error(np.array(losses) - np.array(native))
    r2 = [mapper.fit.get(f"mean_r2_{kind}") for kind in ("keys", "values")]
    out: dict[str, Any] = {
        "recipe": name,
        "about": recipe.about,
        "config": recipe.config.to_dict(),
        "weights": n_weights,
        "rows": mapper.fit.get("rows"),
        "nll": losses,
        "gap": gap,
        "r2": r2,
    }
    line = f"{name:18s} {n_weights / 1e6:7.2f} M  gap {gap[0]:+.4f} ± {gap[1]:.4f}"
    compared = difference(losses, earlier.get(BASELINE))
    out["against"] = {} if compared is None else {BASELINE: compared}
    line += f"  {said(compared):34s}"
    if r2[0] is not None and r2[1] is not None:
        line += f"  R2 {r2[0]:.3f}, {r2[1]:.3f}"
    print(f"{line}  {recipe.about}", flush=True)
    if recipe.against in earlier:
        other = difference(losses, earlier[recipe.against])
        out["against"][recipe.against] = other
        print(f"{'':20s}against '{recipe.against}': {said(other)}", flush=True)
    return out


def difference(losses: Sequence[float], other: Sequence[float] | None) -> dict[str, float] | None:
    """Loss less that of another recipe, document by document."""
    if other is None:
        return None
    differences = np.array(losses) - np.array(other)
    mean, error = mean_error(differences)
    better = int((differences < 0).sum())
    return {"mean": mean, "error": error, "better_in": better, "of": len(losses)}


def said(compared: dict[str, float] | None) -> str:
    """A difference in words."""
    if compared is None:
        return ""
    return "{mean:+.4f} ± {error:.4f}, better in {better_in} of {of}".format_map(compared)


def read_all(args: argparse.Namespace, folder: Path) -> Reading:
    """Tokenise, and let both models read."""
    tokenizer = load_model(args.source).tokenizer
    text = read_text(
        args.text, tokenizer, sequences=args.sequences, seq_len=args.seq_len, heldout=args.heldout
    )
    documents = read_text(
        args.held_out, tokenizer, sequences=args.documents, seq_len=args.prefix + args.scored
    ).tokens
    print(
        f"{int((~text.heldout).sum())} sequences of {text.seq_len} tokens to fit on, "
        f"{int(text.heldout.sum())} held out; {len(documents)} documents, {args.prefix - 1} tokens "
        f"mapped, {args.scored} scored",
        flush=True,
    )
    identity = {
        "models": [load_model(p).identity().to_dict() for p in (args.source, args.target)],
        "text": text.digest,
        "documents": documents.tolist(),
        "prefix": args.prefix,
        "n_passes": 1,
    }
    reading = Reading(
        FitCheckpoint(folder, identity), (args.source, args.target), text, documents, args.prefix
    )
    for side in (0, 1):
        reading.capture(side)
        gc.collect()
        mx.clear_cache()
    return reading


def compare(
    pair: Pair,
    chosen: dict[str, Recipe],
    baseline: FitConfig,
    tuning: FitConfig,
    fitted: Sequence[Path] = (),
) -> list[dict[str, Any]]:
    """All recipes, the baseline first, then mappers that were fitted elsewhere."""
    native = pair.documents.native_nll
    earlier: dict[str, list[float]] = {}
    out = []
    for name, recipe in chosen.items():
        begun = time.process_time()
        view = pair.together() if recipe.together else pair
        mapper, n_weights = view.solve(recipe, baseline, tuning)
        seconds = time.process_time() - begun
        losses = score(mapper, view.documents, pair.model, pair.geometries[1])
        row = report(name, recipe, mapper, n_weights, losses, native, earlier)
        earlier[name] = losses
        out.append({**row, "cpu_seconds": seconds})
        del mapper
        mx.clear_cache()
    for folder in fitted:
        mapper = Mapper.load(folder)
        losses = score(mapper, pair.documents, pair.model, pair.geometries[1])
        recipe = Recipe(baseline, f"from {folder}")
        n_weights = mapper.n_parameters
        out.append(report(folder.name, recipe, mapper, n_weights, losses, native, earlier))
        out[-1]["config"] = mapper.fit
    return out


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--source", default=str(bundled("models/large")))
    out.add_argument("--target", default=str(bundled("models/small")))
    texts = {
        "--text": ("calibration", "what is fitted on"),
        "--held-out": ("heldout", "what is scored on"),
    }
    for option, (part, what) in texts.items():
        default = [TextSource(bundled(f"text/{part}_{kind}.txt")) for kind in ("stories", "novels")]
        out.add_argument(option, nargs="+", type=_source, default=default, help=what)
    out.add_argument("--sequences", type=int, default=60)
    out.add_argument("--seq-len", type=int, default=512)
    out.add_argument("--heldout", type=float, default=0.1, help="share of --sequences held out")
    out.add_argument("--documents", type=int, default=24)
    out.add_argument("--prefix", type=int, default=384, help="of each document")
    out.add_argument("--scored", type=int, default=128, help="tokens of each document")
    out.add_argument("--k", type=int, default=8, help="source layers; 'half' takes half of them")
    out.add_argument("--swap", action="store_true", help="map from --target to --source")
    out.add_argument("--recipes", nargs="+", metavar="NAME", help="default: all but the tuned ones")
    out.add_argument("--mapper", nargs="+", type=Path, default=[], help="score these mappers, too")
    out.add_argument("--tune-steps", type=int, default=48)
    out.add_argument("--tune-batch", type=int, default=4)
    out.add_argument("--tune-rate", type=float, default=0.003)
    out.add_argument("--folder", type=Path, help="where to keep what was read and summed up")
    out.add_argument("--json", type=Path, help="write all numbers here")
    return out


def _source(text: str) -> TextSource:
    found = parse_source(text)
    return found if isinstance(found, TextSource) else TextSource(Path(found))


def chosen_recipes(
    given: Sequence[str] | None, every: dict[str, Recipe], *, matched: bool, all_layers: bool
) -> dict[str, Recipe]:
    """Recipes by name, the baseline first; those that the pair cannot have are left out.

    Unless they are named, so are those that choose among layers where all are taken.

    Raises:
        FitError: If a name is not known.
    """
    unknown = sorted(set(given or ()) - set(every))
    if unknown:
        raise FitError(f"No recipe {', '.join(unknown)}; there are {', '.join(every)}.")
    names = list(given) if given else [name for name, r in every.items() if not r.tuned]
    if all_layers and not given:
        names = [name for name in names if name not in CHOOSING]
    out = {name: every[name] for name in [BASELINE, *names]}
    return {name: r for name, r in out.items() if matched or r.config.head_mapping != "local"}


def run(
    argv: Sequence[str] | None = None,
    read: Callable[[argparse.Namespace, Path], Reading] = read_all,
) -> dict[str, Any]:
    """Everything; what is printed comes back as one dictionary."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        reading = read(args, args.folder or Path(temporary))
        geometries = reading.geometry(0), reading.geometry(1)
        n_layers = len(geometries[int(args.swap)].layers)
        baseline = FitConfig(k=min(args.k, n_layers), head_mapping="full", token_weights="uniform")
        tuning = replace(
            baseline,
            tune_steps=args.tune_steps,
            tune_batch=args.tune_batch,
            tune_rate=args.tune_rate,
        )
        every = recipes(min(args.k, n_layers), n_layers, baseline)
        chosen = chosen_recipes(
            args.recipes,
            every,
            matched=common_heads(*geometries) is not None,
            all_layers=args.k >= n_layers,
        )
        pair = Pair(reading, int(args.swap))
        native, none = np.mean(pair.documents.native_nll), np.mean(pair.documents.no_context_nll)
        names = [Path(reading.paths[side]).name for side in pair.sides]
        print(
            f"{names[0]} -> {names[1]}: loss with its own cache {native:.4f}, without context "
            f"{none:.4f}; below: more than with its own, more than '{BASELINE}'",
            flush=True,
        )
        rows = compare(pair, chosen, baseline, tuning, args.mapper)
    out = {
        "source": names[0],
        "target": names[1],
        "text": reading.text.describe(),
        "documents": len(reading.documents),
        "prefix": reading.prefix,
        "scored": reading.documents.shape[1] - reading.prefix,
        "native": list(pair.documents.native_nll),
        "no_context": list(pair.documents.no_context_nll),
        "recipes": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(out, indent=1), encoding="utf-8")
    return out


def main() -> None:
    try:
        run()
    except FitError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
