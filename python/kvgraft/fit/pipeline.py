"""The whole fit: two models and text in, a mapper out."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.cache import check_mappable
from kvgraft.errors import FitError, GeometryError, QualityWarning
from kvgraft.fit.capture import CachedRows, FeatureExtractor, capture, row_positions
from kvgraft.fit.checkpoint import FitCheckpoint
from kvgraft.fit.config import FitConfig
from kvgraft.fit.diagnostics import doubts
from kvgraft.fit.features import KINDS, FeatureRows, common_heads
from kvgraft.fit.layer_ranking import LayerScores, score_layers
from kvgraft.fit.memory_plan import FitMemoryPlan, Part, plan_fit_memory, solve_bytes
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.moments import Moments
from kvgraft.fit.search import Documents, choose, read_documents, trace, with_own
from kvgraft.fit.solve import heldout_scores, mean_scores, solve_mapper, storage_problem
from kvgraft.fit.time_estimate import FitTime, estimate_time, measure_blas
from kvgraft.fit.token_weights import row_weights
from kvgraft.fit.tune import KEPT_BYTES, tune
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.save import check_destination
from kvgraft.models.attention_hook import can_capture
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import LoadedModel, ModelIdentity, check_tokenizers, load_model
from kvgraft.models.probe import read_geometry
from kvgraft.option_names import named
from kvgraft.progress import Progress, StepCounter
from kvgraft.text.corpus import CalibrationText, TextLike, as_list, check_sources, read_text

__all__ = [
    "CHECKPOINT_EVERY",
    "Forecast",
    "GatheredMoments",
    "fit",
    "fit_arrays",
    "fit_mapper",
    "forecast",
    "gather",
]

CHECKPOINT_EVERY = 50
"""Sequences between two saves of the moments, when there is a folder to save to."""

_KEPT_DOCUMENTS = 64
"""Documents that are kept for tuning when the source cannot stay."""

ModelLike = LoadedModel | str | os.PathLike[str]
Text = CalibrationText | TextLike | Sequence[TextLike]
Pair = tuple[mx.array, mx.array]
ArraysOf = Mapping[int, Pair] | Sequence[Pair]


class _Side:
    """One model of the pair, in memory or not."""

    def __init__(self, given: ModelLike, who: str) -> None:
        self.who = who
        self._given = given
        self._loaded = given if isinstance(given, LoadedModel) else None
        self.geometry: ModelGeometry
        self.identity: ModelIdentity
        self.tokenizer: Any = None
        self.nbytes = 0

    def model(self) -> Any:
        """The live model, loaded if need be."""
        if self._loaded is None:
            assert not isinstance(self._given, LoadedModel)
            self._loaded = load_model(self._given)
            if mx.default_device() == mx.Device(mx.cpu):
                # MLX's CPU back end multiplies 16-bit matrices one element at a time.
                self._loaded.model.set_dtype(mx.float32)
        return self._loaded.model

    def look(self) -> None:
        """Learn everything about the model that is needed without it."""
        from mlx.utils import tree_flatten

        model = self.model()
        assert self._loaded is not None
        self.geometry = read_geometry(model)
        self.identity = self._loaded.identity()
        self.tokenizer = self._loaded.tokenizer
        leaves: Any = tree_flatten(model.parameters())
        self.nbytes = sum(int(p.nbytes) for _, p in leaves)

    def release(self) -> None:
        """Let go of the model, unless the caller holds it."""
        if not isinstance(self._given, LoadedModel):
            self._loaded = None
            gc.collect()
            mx.clear_cache()


@dataclass(frozen=True)
class GatheredMoments:
    """What a pair's text comes down to: enough for any number of mappers.

    Attributes:
        fit: Moments of the text to fit on.
        heldout: Moments of held-out text.
        config: Settings that they were gathered with.
        facts: Facts about text and cost, for the artifact.
        source_model: Identity of the source.
        target_model: Identity of the target.
    """

    fit: MomentSet
    heldout: MomentSet
    config: FitConfig
    facts: dict[str, Any]
    source_model: ModelIdentity | None = None
    target_model: ModelIdentity | None = None

    def solve(
        self,
        config: FitConfig | None = None,
        *,
        scores: LayerScores | None = None,
        progress: Progress | None = None,
    ) -> Mapper:
        """A mapper out of these moments; the models are not needed.

        Args:
            config: k, λ, plan, selection and weights to use; its settings about
                text are taken from the moments. Default: the config that they
                were gathered with.
            scores: Single-source scores of an earlier call; see
                :func:`solve_mapper`.
            progress: Called with (layers done, layers in all).

        Raises:
            FitError: If the moments cannot serve it.
        """
        chosen = self.config if config is None else config
        for name in ("content_space", "stride", "skip", "seq_len", "token_weights"):
            chosen = replace(chosen, **{name: getattr(self.config, name)})
        mapper = solve_mapper(self.fit, self.heldout, chosen, scores=scores, progress=progress)
        mapper.fit |= self.facts
        mapper.source_model, mapper.target_model = self.source_model, self.target_model
        return mapper


def fit_mapper(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    group: mx.distributed.Group | None = None,
) -> Mapper:
    """Fit a mapper from one model's cache to another's.

    Args:
        source: The model whose caches are mapped: loaded, or a folder or
            repository to load it from (as float32 where there is no GPU).
        target: The model they are mapped for.
        text: Calibration text: a file or files (see :class:`TextSource`), or
            text that is tokenised already.
        config: Settings; default :class:`FitConfig`.
        work: Folder in which the fit keeps its state. An unfinished fit of the
            same models, text and settings that is found there is continued.
            Emptied when the fit is complete.
        progress: Called with (steps done, steps in all): one step per sequence
            and pass, and one per target layer solved.
        notify: Called with lines that a user should see.
        group: Processes that share the text, each reading every n-th sequence
            with models of its own. All of them call this with the same
            arguments, and get the same mapper.

    Returns:
        The mapper, with its scores on held-out text. Where these speak against
        using it, a :class:`kvgraft.errors.QualityWarning` says so; see
        :func:`kvgraft.fit.diagnostics.doubts`.

    Raises:
        TokenizerMismatchError: If the models do not share a tokenizer.
        UnsupportedModelError: If a model's cache cannot be mapped.
        FitError: If the text is too short, a model produces NaN, the memory
            limit is too small, or a layer cannot be fitted. Nothing but the
            ``work`` folder, if given, is left behind.
    """
    return _fit(source, target, text, config, work, progress, notify, group, lambda mapper: None)


def gather(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str],
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> GatheredMoments:
    """Run the models and keep the moments, to solve more than one mapper from them.

    Arguments and errors are those of :func:`fit_mapper`. The moments stay in
    the folder ``work``; calling again with the same arguments reads them.
    """
    cfg = FitConfig() if config is None else config
    with _gathered(source, target, text, cfg, work, progress, notify, keep=True) as (moments, _):
        return moments


def fit(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    text: Text,
    out: str | os.PathLike[str],
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    group: mx.distributed.Group | None = None,
) -> Mapper:
    """Fit a mapper and save it; what ``kvgraft fit`` does.

    Nothing is written to ``out`` before the fit is complete, and then all of it
    in one step; ``work`` is emptied after that. Arguments are those of
    :func:`fit_mapper`; ``out`` is the artifact's folder.
    """
    if work is not None:
        _check_apart(out, work)
    check_destination(out)

    def save(mapper: Mapper) -> None:
        if group is None or group.rank() == 0:
            mapper.save(out)

    return _fit(source, target, text, config, work, progress, notify, group, save)


def _fit(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None,
    work: str | os.PathLike[str] | None,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
    group: mx.distributed.Group | None,
    save: Callable[[Mapper], None],
) -> Mapper:
    cfg = FitConfig() if config is None else config
    with _gathered(source, target, text, cfg, work, progress, notify, group) as (moments, stage):
        mapper = stage.finish(moments)
        save(mapper)  # before the folder is emptied: if this fails, the moments are still there
    against = doubts(mapper)
    if against:
        warnings.warn(" ".join([mapper.describe() + ":", *against]), QualityWarning, stacklevel=3)
    return mapper


@dataclass(frozen=True)
class Forecast:
    """What a fit is going to take.

    Attributes:
        plan: Memory and disk.
        time: Seconds, by stage; estimated from one sequence and one product.
        sequences: Sequences that will be read.
        notes: What a user should be told.
    """

    plan: FitMemoryPlan
    time: FitTime
    sequences: int
    notes: tuple[str, ...]


def forecast(
    source: ModelLike,
    target: ModelLike,
    text: Text | None = None,
    config: FitConfig | None = None,
) -> Forecast:
    """Say what a fit needs before it is run; what ``kvgraft plan`` does.

    Both models are loaded, one after the other, and read one sequence.

    Args:
        source: The source; see :func:`fit_mapper`.
        target: The target.
        text: Calibration text, if it is there already: what it is enough for is
            then known.
        config: Settings.

    Raises:
        TokenizerMismatchError: If the models do not share a tokenizer.
        UnsupportedModelError: If a model's cache cannot be mapped.
        FitError: If the memory limit is too small, or the text too short.
    """
    cfg = FitConfig() if config is None else config
    _check_request(text, cfg, None)
    sides = _Side(source, "source"), _Side(target, "target")
    seconds = 0.0
    positions = row_positions(cfg.seq_len, cfg.stride, cfg.skip)
    remarks: list[str] = []
    for side in sides:
        side.look()
        watch = None
        if side is sides[1]:
            cfg = _settle_weights(side, cfg, remarks.append)
            watch = side.geometry if cfg.token_weights == "attention" else None
        tokens = np.arange(cfg.seq_len, dtype=np.int32) % 256
        for warm in (True, False):
            begun = time.perf_counter()
            read = tokens[: 8 if warm else None]
            rows = capture(side.model(), read, positions[:1], watch=watch)
            mx.eval(rows.keys, rows.values, rows.sensitivity)
        seconds += time.perf_counter() - begun
        side.release()
    check_tokenizers(sides[0].tokenizer, sides[1].tokenizer)
    cfg, more = cfg.within(len(sides[0].geometry.layers))
    _check_storage(sides, cfg)
    notes: tuple[str, ...] = (*more, *remarks)
    sequences, rows_fitted = cfg.sequences, None
    if text is not None:
        calibration = _calibrate(text, sides[0].tokenizer, cfg)
        notes, sequences = (*notes, *calibration.notes), len(calibration)
        rows_fitted = int((~calibration.heldout).sum()) * len(positions)
    geometries = sides[0].geometry, sides[1].geometry
    plan = plan_fit_memory(
        *geometries,
        cfg,
        model_bytes=(sides[0].nbytes, sides[1].nbytes),
        rows=rows_fitted,
        sequences=sequences,
    )
    took = estimate_time(plan, *geometries, cfg, measure_blas(), seconds, sequences)
    return Forecast(plan, took, sequences, notes)


@contextmanager
def _gathered(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig,
    work: str | os.PathLike[str] | None,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
    group: mx.distributed.Group | None = None,
    *,
    keep: bool = False,
) -> Iterator[tuple[GatheredMoments, _LastStage]]:
    """The moments of a pair, for as long as they are solved."""
    started = time.perf_counter()
    tell = notify if notify is not None else _quiet
    _check_request(text, config, work)
    sides = _Side(source, "source"), _Side(target, "target")
    settled: list[str] = []
    for side in sides:
        side.look()
        if side is sides[1]:
            config = _settle_weights(side, config, settled.append)
        if config.sequential:
            side.release()
    check_tokenizers(sides[0].tokenizer, sides[1].tokenizer)
    calibration = _calibrate(text, sides[0].tokenizer, config)
    config, remarks = config.within(len(sides[0].geometry.layers))
    _check_storage(sides, config)
    for note in (*remarks, *settled):
        if notify is None:
            warnings.warn(note, stacklevel=5)  # where fit_mapper or gather was called
        tell(note)
    for note in calibration.notes:
        tell(note)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    mine = list(range(rank, len(calibration), size))
    positions = row_positions(calibration.seq_len, config.stride, config.skip)
    n_fit = int((~calibration.heldout).sum()) * len(positions)
    plan = plan_fit_memory(
        sides[0].geometry,
        sides[1].geometry,
        replace(config, seq_len=calibration.seq_len),
        model_bytes=(sides[0].nbytes, sides[1].nbytes),
        rows=n_fit,
        sequences=len(mine),
    )
    if group is not None:
        if plan.spill:
            raise FitError(
                "Several processes cannot fit in several passes: their moments meet in memory. "
                f"Raise {named('memory_limit')}, or give {named('head_mapping', 'local')}."
            )
        _check_agreement(group, _identity(plan, sides, calibration, config))
        work = None if work is None else Path(work) / f"process-{rank}-of-{size}"
    if n_fit < 4 * plan.in_dim:
        tell(
            f"{n_fit:,} rows are few for {plan.in_dim:,} features per target head: the map will "
            f"be worse than the pair allows. Give more text, a smaller {named('k')}, or "
            f"{named('head_mapping', 'local')}."
        )
    total = len(mine) * len(plan.passes) * (2 if config.sequential else 1)
    total += len(sides[1].geometry.layers) + config.tune_steps
    clock = StepCounter(progress, total)
    with _work_folder(work, plan, sides, calibration, config, keep) as folder:
        gatherer = _Gatherer(sides, calibration, mine, config, plan, folder, clock, group)
        fitted, heldout = gatherer.run()
        facts = {
            "text": calibration.describe(),
            "stride": config.stride,
            "skip": config.skip,
            "token_weights": config.token_weights,
            "effective_rows": round(fitted.effective_count("keys")),
            "seconds": round(time.perf_counter() - started, 1),
            "seconds_models": round(gatherer.model_seconds, 1),
        }
        moments = GatheredMoments(
            fitted, heldout, config, facts, sides[0].identity, sides[1].identity
        )
        yield (
            moments,
            _LastStage(config, plan, sides, gatherer.documents, gatherer, clock, tell),
        )
        for side in sides:
            side.release()


@dataclass(frozen=True)
class _LastStage:
    """From moments to the mapper, while the target may still be there."""

    config: FitConfig
    plan: FitMemoryPlan
    sides: tuple[_Side, _Side]
    documents: Documents | None
    gatherer: _Gatherer
    clock: StepCounter
    tell: Callable[[str], None]

    def finish(self, moments: GatheredMoments) -> Mapper:
        """The mapper that the config asks for."""
        if not self.config.needs_models:
            return moments.solve(progress=self.clock.stage())
        assert self.documents is not None
        if self.config.is_auto:
            mapper = self._choose(moments, self.documents)
        else:
            mapper = moments.solve(progress=self.clock.stage())
        if not self.config.tune_steps or not self._can_tune():
            return mapper
        tuned = self._tune(mapper, self.documents)
        for layer in tuned.layers:
            layer.scores |= heldout_scores(layer, moments.heldout)
            for kind in KINDS:  # that of the closed form says nothing any more
                layer.scores.pop(f"r2_{kind}_unrounded", None)
                tuned.fit.pop(f"mean_r2_{kind}_unrounded", None)
        tuned.fit |= mean_scores(tuned.layers)
        return tuned

    def _can_tune(self) -> bool:
        try:
            for side in self.sides:
                check_mappable(side.geometry, side.who)
        except GeometryError as error:
            self.tell(f"{error} Tuning does not go through such layers; the closed form stays.")
            return False
        return True

    def _choose(self, moments: GatheredMoments, documents: Documents) -> Mapper:
        source, target = (side.geometry for side in self.sides)
        ridge = self.config.penalty(moments.fit.count("keys"))
        scores = score_layers(
            moments.fit, moments.heldout, rule=self.config.layer_ranking, ridge=ridge
        )
        documents = with_own(documents, self.sides[1].model())
        mapper, trials = choose(
            lambda config: moments.solve(config, scores=scores),
            documents,
            self.sides[1].model(),
            source,
            target,
            self.config,
            fits=self._fits,
            notify=self.tell,
        )
        self.clock.step(len(target.layers))
        mapper.fit["choice"] = trace(documents, trials)
        return mapper

    def _tune(self, mapper: Mapper, documents: Documents) -> Mapper:
        room = KEPT_BYTES
        if self.config.memory_limit is not None:
            room = max(0, min(room, self.config.memory_limit - self.plan.peak_bytes))
        result = tune(
            mapper,
            self.gatherer.training_document,
            documents,
            self.sides[1].model(),
            self.sides[1].geometry,
            config=self.config,
            distinct=self.gatherer.training_documents,
            kept_bytes=room,
            progress=self.clock.stage(),
            notify=self.tell,
        )
        result.mapper.fit["tuning"] = {
            "steps": result.steps,
            "batch": self.config.tune_batch,
            "rate": self.config.tune_rate,
            "divergence_before": result.before,
            "divergence_after": result.after,
            "trace": [list(point) for point in result.trace],
        }
        if result.steps == 0:
            self.tell("Tuning did not help on held-out text; the closed form stands.")
        return result.mapper

    def _fits(self, config: FitConfig) -> bool:
        limit = self.config.memory_limit
        source, target = (side.geometry for side in self.sides)
        needed = solve_bytes(source, target, config) - self.plan.solve_bytes
        return limit is None or self.plan.peak_bytes + max(0, needed) <= limit


def _check_request(
    text: Text | None, config: FitConfig, work: str | os.PathLike[str] | None
) -> None:
    """Refuse what cannot be done before models are loaded."""
    seq_len = config.seq_len
    if isinstance(text, CalibrationText):
        seq_len = text.seq_len
    elif text is not None:
        check_sources(as_list(text))
    if config.needs_models and config.prefix is not None and config.prefix >= seq_len:
        raise FitError(
            f"{named('prefix')} {config.prefix} leaves nothing to score of sequences of "
            f"{seq_len} tokens. Give a smaller one, or a larger {named('seq_len')}."
        )
    if work is not None and Path(work).exists() and not Path(work).is_dir():
        raise FitError(
            f"{work} is a file; a fit keeps its state in a folder. Give a new or empty folder, or "
            "that of an unfinished fit."
        )


def _check_storage(sides: tuple[_Side, _Side], config: FitConfig) -> None:
    problem = storage_problem(sides[0].geometry, sides[1].geometry, config)
    if problem is not None:
        raise FitError(f"{problem}; or give {named('weight_format', 'float16')}.")


def _check_apart(out: str | os.PathLike[str], work: str | os.PathLike[str]) -> None:
    """The artifact is moved into place as a whole, and the state is removed as a whole."""
    a, b = Path(out).resolve(), Path(work).resolve()
    if a == b or a in b.parents or b in a.parents:
        raise FitError(
            f"The mapper ({out}) and the state of an unfinished fit ({named('work')} {work}) need "
            "folders of their own, neither inside the other."
        )


def _settle_weights(target: _Side, config: FitConfig, tell: Callable[[str], None]) -> FitConfig:
    """Decide how rows are weighted, where that is left open."""
    if config.token_weights != "auto":
        return config
    seen = can_capture(target.model())
    if not seen:
        tell(
            f"The attention of {target.geometry.model_type} cannot be instrumented; all tokens "
            "count alike."
        )
    return replace(config, token_weights="attention" if seen else "uniform")


def _calibrate(text: Text, tokenizer: Any, config: FitConfig) -> CalibrationText:
    if isinstance(text, CalibrationText):
        if config.skip >= text.seq_len:
            raise FitError(f"{named('skip')} {config.skip} leaves none of {text.seq_len} tokens.")
        return text
    return read_text(
        text,
        tokenizer,
        sequences=config.sequences,
        seq_len=config.seq_len,
        heldout=config.heldout,
        chat=config.chat,
    )


def _check_agreement(group: mx.distributed.Group, identity: dict[str, Any]) -> None:
    """Refuse processes that were given different models, text or settings."""
    # Where each machine keeps the models does not matter.
    facts = {
        key: {**value, "name": None} if key.endswith(" model") else value
        for key, value in identity.items()
    }
    text = json.dumps(facts, sort_keys=True).encode()
    mine = np.frombuffer(hashlib.sha256(text).digest(), "<i4")
    with mx.stream(mx.cpu):
        found = np.array(mx.distributed.all_gather(mx.array(mine)[None], group=group))
    if (found != mine).any():
        raise FitError(
            "The processes do not agree on models, text or settings. Start all of them with the "
            "same arguments and the same files."
        )


@contextmanager
def _work_folder(
    given: str | os.PathLike[str] | None,
    plan: FitMemoryPlan,
    sides: tuple[_Side, _Side],
    text: CalibrationText,
    config: FitConfig,
    keep: bool,
) -> Iterator[FitCheckpoint | None]:
    """The user's folder, a temporary one where the plan needs one, or none."""
    if given is None and not plan.spill and not plan.sequential:
        yield None
        return
    made: str | None = None
    if given is None:
        made = tempfile.mkdtemp(prefix="kvgraft-fit-")
    path = Path(made or given or ".")
    try:
        # A save is written beside the one before it.
        saves = 0 if given is None or plan.spill else 2 * plan.moment_bytes
        _check_space(path, plan.disk_bytes + saves)
        folder = FitCheckpoint(path, _identity(plan, sides, text, config))
        yield folder
        # Not in a finally: an interrupted fit keeps what it has.
        if not keep:
            folder.remove()
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _check_space(path: Path, needed: int) -> None:
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    free = shutil.disk_usage(at).free
    if free < needed:
        raise FitError(
            f"The fit needs about {needed / 1e9:.1f} GB of disk at {path}, and {free / 1e9:.1f} "
            f"GB are free. Free some space, or give another folder ({named('work')})."
        )


def _identity(
    plan: FitMemoryPlan, sides: tuple[_Side, _Side], text: CalibrationText, config: FitConfig
) -> dict[str, Any]:
    """What must be the same for a fit to be continued."""
    return {
        "source geometry": sides[0].geometry.to_dict(),
        "target geometry": sides[1].geometry.to_dict(),
        "source model": sides[0].identity.to_dict(),
        "target model": sides[1].identity.to_dict(),
        "text": text.digest,
        "stride": config.stride,
        "skip": config.skip,
        "content_space": config.content_space,
        "token_weights": [config.token_weights, config.effective_rows],
        "passes": [[[p.kind, p.heads, p.targets] for p in one] for one in plan.passes],
        "n_passes": len(plan.passes),
        "structure": plan.structure,
        "sequential": plan.sequential,
    }


_Sequence = tuple[int, FeatureRows, FeatureRows, dict[str, NDArray[np.float64]] | None]
"""Place in a process's share, features of source and target, and row weights of one sequence."""


class _Gatherer:
    """Runs the text through the models, pass by pass."""

    def __init__(
        self,
        sides: tuple[_Side, _Side],
        text: CalibrationText,
        mine: list[int],
        config: FitConfig,
        plan: FitMemoryPlan,
        folder: FitCheckpoint | None,
        clock: StepCounter,
        group: mx.distributed.Group | None,
    ) -> None:
        self._sides = sides
        self._text = text
        self._mine = mine  # sequences that this process reads
        self._group = group
        self._plan = plan
        self._folder = folder
        self._clock = clock
        self._positions = row_positions(text.seq_len, config.stride, config.skip)
        self._strip = [
            FeatureExtractor(s.geometry, self._positions, s.who, content_space=config.content_space)
            for s in sides
        ]
        self._config = config
        self.model_seconds = 0.0
        self.documents: Documents | None = None
        self._kept: list[Documents] = []

    def run(self) -> tuple[MomentSet, MomentSet]:
        """The moments of the fitted and of the held-out text."""
        if self._config.needs_models:
            self.documents = self._read_documents()
        if self._plan.sequential:
            self._store_source_rows()
        parts: list[list[Moments]] = [[], []]
        for index in range(len(self._plan.passes)):
            for n, group in enumerate(self._one_pass(index)):
                parts[n] += group
        if not self._config.tune_steps:
            self._sides[0].release()
        if self._group is not None:
            for moments in (*parts[0], *parts[1]):
                moments.all_reduce(self._group)
        return MomentSet(parts[0]), MomentSet(parts[1])

    @property
    def _prefix(self) -> int:
        return self._config.prefix or min(768, self._text.seq_len * 3 // 4)

    def _read_documents(self) -> Documents:
        """Held-out text as the source caches it."""
        if self._plan.sequential and self._config.tune_steps:
            # Afterwards the source is gone.
            wanted = self._config.tune_steps * self._config.tune_batch
            for i in range(min(wanted, _KEPT_DOCUMENTS)):
                self._kept.append(self._document(i))
        tokens = self._text.tokens[self._text.heldout][: self._config.documents]
        return read_documents(self._sides[0].model(), tokens, self._prefix)

    def training_document(self, i: int) -> Documents:
        """A sequence that was fitted on, as the source caches it."""
        return self._kept[i % len(self._kept)] if self._kept else self._document(i)

    @property
    def training_documents(self) -> int:
        """How many different ones there are."""
        return len(self._kept) or int((~self._text.heldout).sum())

    def _document(self, i: int) -> Documents:
        fitted = self._text.tokens[~self._text.heldout]
        row = fitted[i % len(fitted)]
        return read_documents(self._sides[0].model(), row[None], self._prefix, alone=False)

    def _store_source_rows(self) -> None:
        """Write the source's rows of all sequences to disk, and let the source go."""
        assert self._folder is not None
        finished = self._folder.current_pass >= len(self._plan.passes)
        for i in self._mine:
            if not finished and not self._folder.has_rows("source", i):
                self._folder.save_rows("source", i, self._run_model(0, i))
            self._clock.step()
        self._sides[0].release()

    def _one_pass(self, index: int) -> tuple[list[Moments], list[Moments]]:
        """Fitted and held-out moments of one pass."""
        folder, n = self._folder, len(self._mine)
        if folder is not None and index < folder.current_pass:
            self._clock.step(n)
            return self._read(index)
        first = 0
        if folder is not None and folder.done:
            fitted, heldout = self._read(index, mapped=False)
            first = folder.done
        else:
            fitted = [self._make(part, "float64") for part in self._plan.passes[index]]
            heldout = [self._make(part, "float32") for part in self._plan.passes[index]]
        self._clock.step(first)
        for at, source, target, weights in self._rows(index, first):
            held = self._text.heldout[self._mine[at]]
            for moments in heldout if held else fitted:
                # Scores are those of all tokens alike.
                moments.add(source, target, None if held else weights)
            self._clock.step()
            if folder is not None and (at + 1) % CHECKPOINT_EVERY == 0 and at + 1 < n:
                folder.checkpoint(index, at + 1, [*fitted, *heldout])
        for moments in (*fitted, *heldout):
            moments.flush()
        if folder is None:
            return fitted, heldout
        folder.checkpoint(index, n, [*fitted, *heldout], complete=True)
        if not self._plan.spill:
            return fitted, heldout
        return self._read(index)

    def _make(self, part: Part, dtype: str) -> Moments:
        return Moments(
            self._sides[0].geometry,
            self._sides[1].geometry,
            structure=self._plan.structure,
            kinds=(part.kind,),
            heads=part.heads,
            targets=part.targets,
            dtype=dtype,
        )

    def _read(self, index: int, *, mapped: bool = True) -> tuple[list[Moments], list[Moments]]:
        assert self._folder is not None
        files = self._folder.moments_of(index)
        moments = [Moments.load(path, mapped=mapped)[0] for path in files]
        half = len(moments) // 2
        return moments[:half], moments[half:]

    def _rows(self, index: int, first: int) -> Iterator[_Sequence]:
        """Features of this process's sequences from ``first`` on, in order.

        On a GPU the next sequence is queued before this one is handed out.
        """
        ahead = mx.default_device() == mx.Device(mx.gpu)
        waiting: list[tuple[int, list[CachedRows]]] = []
        for at in range(first, len(self._mine)):
            waiting.append((at, self._start(index, at)))
            if len(waiting) > int(ahead):
                yield self._finish(*waiting.pop(0))
        for item in waiting:
            yield self._finish(*item)

    def _start(self, index: int, at: int) -> list[CachedRows]:
        """Queue the features of a sequence, from disk or from the models."""
        folder, label, i = self._folder, f"pair{index}", self._mine[at]
        rows: list[CachedRows] = []
        if folder is not None and self._plan.sequential:
            rows += folder.load_rows("source", i) or []
        saved = None if folder is None else folder.load_rows(label, at)
        if saved is None:
            saved = [self._run_model(side, i) for side in range(len(rows), 2)]
            if folder is not None:
                folder.save_rows(label, at, *saved)
        rows += saved
        return [strip.start(side) for strip, side in zip(self._strip, rows, strict=True)]

    def _finish(self, at: int, started: list[CachedRows]) -> _Sequence:
        begun = time.perf_counter()
        source, target = (
            strip.finish(side) for strip, side in zip(self._strip, started, strict=True)
        )
        weights = None
        if started[1].sensitivity is not None:
            weights = row_weights(started[1].sensitivity, self._config.effective_rows)
        self.model_seconds += time.perf_counter() - begun
        mx.clear_cache()
        return at, source, target, weights

    def _run_model(self, side: int, i: int) -> CachedRows:
        begun = time.perf_counter()
        watched = side == 1 and self._config.token_weights == "attention"
        rows = capture(
            self._sides[side].model(),
            self._text.tokens[i],
            self._positions,
            watch=self._sides[side].geometry if watched else None,
        )
        self.model_seconds += time.perf_counter() - begun
        return rows


def fit_arrays(
    source_kv: ArraysOf,
    target_kv: ArraysOf,
    source_geometry: ModelGeometry,
    target_geometry: ModelGeometry,
    positions: mx.array | None = None,
    config: FitConfig | None = None,
    *,
    progress: Progress | None = None,
) -> Mapper:
    """Fit on keys and values that were captured before.

    Takes what ``veloxquant_mlx.transfer.fit_mapper`` takes. All rows are used
    as they come (``stride`` and ``skip`` do not apply), and count alike: there is no
    model here whose attention could weigh them. The last of them, a share of
    ``config.heldout``, are held out.

    Args:
        source_kv: ``(keys, values)`` per source layer, ``[H, N, D]``, keys with
            RoPE.
        target_kv: The same tokens' ``(keys, values)`` per target layer.
        source_geometry: Geometry of the source.
        target_geometry: Geometry of the target.
        positions: ``[N]`` positions; default ``0 … N-1``.
        config: Settings; those about text are not used.
        progress: Called with (layers solved, layers in all).

    Raises:
        GeometryError: If the arrays do not fit the geometries.
        FitError: If there are too few rows, or they hold NaN.
    """
    cfg = FitConfig() if config is None else config
    rows = [
        _as_rows(kv, geometry, who)
        for kv, geometry, who in (
            (source_kv, source_geometry, "source"),
            (target_kv, target_geometry, "target"),
        )
    ]
    counts = {int(x.shape[1]) for side in rows for x in (*side.keys, *side.values)}
    if len(counts) != 1:
        raise GeometryError(f"The layers hold different numbers of tokens: {sorted(counts)}.")
    n = counts.pop()
    at = np.arange(n, dtype=np.int32) if positions is None else np.array(positions, dtype=np.int32)
    if at.shape != (n,):
        raise GeometryError(f"{n} tokens need {n} positions, got an array of {at.shape}.")
    n_held = max(1, round(cfg.heldout * n))
    if n - n_held < 2:
        raise FitError(f"{n} tokens are too few to fit on and to hold some out.")
    structure = cfg.structure
    if structure == "auto":
        matched = common_heads(source_geometry, target_geometry) is not None
        structure = "heads" if cfg.head_mapping == "local" and matched else "full"
    parts = [
        Moments(source_geometry, target_geometry, structure=structure, dtype=dtype)
        for dtype in ("float64", "float32")
    ]
    for part, (begin, end) in zip(parts, ((0, n - n_held), (n - n_held, n)), strict=True):
        for start in range(begin, end, part.chunk_rows):
            stop = min(end, start + part.chunk_rows)
            features = []
            for side, geometry, who in zip(
                rows, (source_geometry, target_geometry), ("source", "target"), strict=True
            ):
                strip = FeatureExtractor(
                    geometry, at[start:stop], who, content_space=cfg.content_space
                )
                features.append(
                    strip(
                        CachedRows(
                            [x[:, start:stop] for x in side.keys],
                            [x[:, start:stop] for x in side.values],
                        )
                    )
                )
            part.add(features[0], features[1])
    return solve_mapper(parts[0], parts[1], cfg, progress=progress)


def _as_rows(kv: ArraysOf, geometry: ModelGeometry, who: str) -> CachedRows:
    n_layers = len(geometry.layers)
    if isinstance(kv, Mapping):
        missing = [i for i in range(n_layers) if i not in kv]
        if missing or len(kv) != n_layers:
            raise GeometryError(f"The {who} has {n_layers} layers; missing are {missing}.")
        pairs = [kv[i] for i in range(n_layers)]
    else:
        pairs = list(kv)
        if len(pairs) != n_layers:
            raise GeometryError(f"The {who} has {n_layers} layers, got {len(pairs)}.")
    for i, ((keys, values), layer) in enumerate(zip(pairs, geometry.layers, strict=True)):
        want = (layer.n_kv_heads, layer.key_dim), (layer.n_kv_heads, layer.value_dim)
        got = tuple((x.shape[0], x.shape[-1]) if x.ndim == 3 else x.shape for x in (keys, values))
        if got != want:
            raise GeometryError(
                f"The {who}'s layer {i} must be keys [{want[0][0]}, N, {want[0][1]}] and values "
                f"[{want[1][0]}, N, {want[1][1]}]; got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}."
            )
    return CachedRows([k for k, _ in pairs], [v for _, v in pairs])


def _quiet(line: str) -> None:
    """Show nothing."""
