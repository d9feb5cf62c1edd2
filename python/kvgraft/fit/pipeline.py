"""The whole fit: two models and text in, a mapper out.

Its stages: prepare (:mod:`kvgraft.fit.prepare`), gather moments
(:mod:`kvgraft.fit.gather`), solve or search, tune.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from kvgraft.cache import check_mappable
from kvgraft.errors import FitError, GeometryError, QualityWarning
from kvgraft.fit.capture import capture
from kvgraft.fit.config import FitConfig
from kvgraft.fit.diagnostics import quality_warnings
from kvgraft.fit.features import KINDS
from kvgraft.fit.gather import WHO, GatheredMoments, Gatherer, SourceDocuments, open_checkpoint
from kvgraft.fit.layer_ranking import score_layers
from kvgraft.fit.memory_plan import FitMemoryPlan, solve_bytes
from kvgraft.fit.prepare import FitJob, Text, prepare
from kvgraft.fit.search import choose, trace, with_target_nll
from kvgraft.fit.solve import heldout_scores, mean_scores
from kvgraft.fit.time_estimate import FitTime, estimate_time, measure_blas
from kvgraft.fit.tune import KEPT_BYTES, tune
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.save import check_destination
from kvgraft.models.handle import ModelHandle
from kvgraft.models.loading import ModelLike
from kvgraft.option_names import named
from kvgraft.progress import Notify, Progress, StepCounter, ignore

__all__ = ["Forecast", "fit", "fit_mapper", "forecast", "gather_moments"]


def fit_mapper(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    notify: Notify | None = None,
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
            same models, text and settings that is found there is resumed.
            Removed when the fit is complete.
        progress: Called with (steps done, steps in all): one step per sequence
            and pass, and one per target layer solved.
        notify: Called with lines that a user should see.
        group: Processes that share the text, each reading every n-th sequence
            with models of its own. All of them call this with the same
            arguments, and get the same mapper. ``kvgraft fit`` passes the group
            that ``mlx.launch`` started; tested with several processes on one
            machine, not with several Macs.

    Returns:
        The mapper, with its scores on held-out text. Where these speak against
        using it, a :class:`kvgraft.errors.QualityWarning` says so; see
        :func:`kvgraft.fit.diagnostics.quality_warnings`.

    Raises:
        TokenizerMismatchError: If the models do not share a tokenizer.
        UnsupportedModelError: If a model's cache cannot be mapped.
        FitError: If the text is too short, a model produces NaN, the memory
            limit is too small, or a layer cannot be fitted. Nothing but the
            ``work`` folder, if given, is left behind.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> from kvgraft.fit import FitConfig
        >>> mapper = kvgraft.fit_mapper(
        ...     bundled("models/large"),
        ...     bundled("models/small"),
        ...     bundled("text/calibration_stories.txt"),
        ...     FitConfig(sequences=6, seq_len=64, k=2),  # far too little text for use
        ... )
        >>> len(mapper.layers), mapper.quality.verdict
        (3, None)
    """
    return _fit(source, target, text, config, work, progress, notify, group, lambda mapper: None)


def fit(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    text: Text,
    out: str | os.PathLike[str],
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    notify: Notify | None = None,
    group: mx.distributed.Group | None = None,
) -> Mapper:
    """Fit a mapper and save it; what ``kvgraft fit`` does.

    Nothing is written to ``out`` before the fit is complete, and then all of it
    in one step; ``work`` is removed after that. Arguments and errors are those of
    :func:`fit_mapper`; ``out`` is the artifact's folder.
    """
    if work is not None:
        _check_apart(out, work)
    check_destination(out)

    def save(mapper: Mapper) -> None:
        if group is None or group.rank() == 0:
            mapper.save(out)

    return _fit(source, target, text, config, work, progress, notify, group, save)


def gather_moments(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str],
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> GatheredMoments:
    """Run the models and keep the moments, to solve more than one mapper from them.

    Arguments and errors are those of :func:`fit_mapper`. The moments stay in
    the folder ``work``; calling again with the same arguments reads them.
    """
    job = prepare(source, target, text, config, work=work, notify=notify)
    if notify is None:
        _warn(job.adjustments, 3)
    with open_checkpoint(job, work, keep=True) as folder:
        moments = Gatherer(job, folder, StepCounter(progress, job.steps)).run()
    for model in job.models:
        model.unload()
    return moments


def _fit(
    source: ModelLike,
    target: ModelLike,
    text: Text,
    config: FitConfig | None,
    work: str | os.PathLike[str] | None,
    progress: Progress | None,
    notify: Notify | None,
    group: mx.distributed.Group | None,
    save: Callable[[Mapper], None],
) -> Mapper:
    job = prepare(source, target, text, config, work=work, notify=notify, group=group)
    if notify is None:
        _warn(job.adjustments, 4)
    counter = StepCounter(progress, job.steps)
    with open_checkpoint(job, work) as folder:
        documents = SourceDocuments(job) if job.config.needs_models else None
        moments = Gatherer(job, folder, counter).run()
        if not job.config.tune_steps:
            job.source.unload()
        if documents is None:
            mapper = moments.solve(progress=counter.stage())
        else:
            mapper = _LastStages(job, moments, documents, counter, notify or ignore).run()
        save(mapper)  # before the folder is emptied: if this fails, the moments are still there
    for model in job.models:
        model.unload()
    against = quality_warnings(mapper)
    if against:
        warnings.warn(" ".join([mapper.describe() + ":", *against]), QualityWarning, stacklevel=3)
    return mapper


def _warn(lines: tuple[str, ...], stacklevel: int) -> None:
    for line in lines:
        warnings.warn(line, stacklevel=stacklevel)  # where the public function was called


class _LastStages:
    """Search and tuning, which need the target beside the moments."""

    def __init__(
        self,
        job: FitJob,
        moments: GatheredMoments,
        documents: SourceDocuments,
        counter: StepCounter,
        notify: Notify,
    ) -> None:
        self._job = job
        self._moments = moments
        self._documents = documents
        self._counter = counter
        self._notify = notify

    def run(self) -> Mapper:
        """The mapper that the settings ask for."""
        if self._job.config.is_auto:
            mapper = self._search()
        else:
            mapper = self._moments.solve(progress=self._counter.stage())
        if self._job.config.tune_steps and self._can_tune():
            mapper = self._tune(mapper)
        return mapper

    def _search(self) -> Mapper:
        """Try settings, and keep those with which the target predicts best."""
        job, moments = self._job, self._moments
        ridge = job.config.penalty(moments.fit.count("keys"))
        scores = score_layers(
            moments.fit, moments.heldout, rule=job.config.layer_ranking, ridge=ridge
        )
        documents = with_target_nll(self._documents.heldout, job.target.load())
        mapper, trials = choose(
            lambda config: moments.solve(config, scores=scores),
            documents,
            job.target.load(),
            *job.geometries,
            job.config,
            fits=self._fits_in_memory,
            notify=self._notify,
        )
        self._counter.step(len(job.target.geometry.layers))
        mapper.fit["choice"] = trace(documents, trials)
        return mapper

    def _fits_in_memory(self, config: FitConfig) -> bool:
        limit, plan = self._job.config.memory_limit, self._job.plan
        needed = solve_bytes(*self._job.geometries, config) - plan.solve_bytes
        return limit is None or plan.peak_bytes + max(0, needed) <= limit

    def _can_tune(self) -> bool:
        try:
            for geometry, who in zip(self._job.geometries, WHO, strict=True):
                check_mappable(geometry, who)
        except GeometryError as error:
            self._notify(
                f"{error} Tuning does not support such layers; keeping the closed-form map."
            )
            return False
        return True

    def _tune(self, mapper: Mapper) -> Mapper:
        """Tune the map on the target's predictions, and score it again."""
        job, room = self._job, KEPT_BYTES
        if job.config.memory_limit is not None:
            room = max(0, min(room, job.config.memory_limit - job.plan.peak_bytes))
        result = tune(
            mapper,
            self._documents.training,
            self._documents.heldout,
            job.target.load(),
            job.target.geometry,
            config=job.config,
            distinct=self._documents.n_training,
            kept_bytes=room,
            progress=self._counter.stage(),
            notify=self._notify,
        )
        tuned = result.mapper
        tuned.fit["tuning"] = {
            "steps": result.steps,
            "batch": job.config.tune_batch,
            "rate": job.config.tune_rate,
            "divergence_before": result.before,
            "divergence_after": result.after,
            "trace": [list(point) for point in result.trace],
        }
        if result.steps == 0:
            self._notify(
                "Tuning did not reduce the divergence on held-out text; keeping the closed-form "
                "map."
            )
        for layer in tuned.layers:
            layer.scores |= heldout_scores(layer, self._moments.heldout)
            for kind in KINDS:  # that of the closed form says nothing any more
                layer.scores.pop(f"r2_{kind}_unrounded", None)
                tuned.fit.pop(f"mean_r2_{kind}_unrounded", None)
        tuned.fit |= mean_scores(tuned.layers)
        return tuned


@dataclass(frozen=True)
class Forecast:
    """What a fit is going to take.

    Attributes:
        plan: Memory and disk.
        time: Seconds, by stage; estimated from one sequence and one product.
        sequences: Sequences that will be read.
        notes: Lines that a user should see.
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
    """The dry run of a fit, which says what it takes; what ``kvgraft plan`` does.

    Both models are loaded, one after the other, and read one sequence.

    Args:
        source: The source; see :func:`fit_mapper`.
        target: The target.
        text: Calibration text, if there is some already; the number of sequences is
            then known.
        config: Settings.

    Raises:
        TokenizerMismatchError: If the models do not share a tokenizer.
        UnsupportedModelError: If a model's cache cannot be mapped.
        FitError: If the memory limit is too small, or the text too short.
    """
    notes: list[str] = []
    seconds: list[float] = []

    def measure(model: ModelHandle, config: FitConfig) -> None:
        weighted = bool(seconds) and config.token_weights == "attention"
        seconds.append(_time_sequence(model, config, weighted))

    job = prepare(source, target, text, config, notify=notes.append, while_loaded=measure)
    config, n = job.config, len(job.sequences)
    if job.text is not None:
        config = replace(config, seq_len=job.text.seq_len)
    took = estimate_time(job.plan, *job.geometries, config, measure_blas(), sum(seconds), n)
    return Forecast(job.plan, took, n, tuple(notes))


def _time_sequence(model: ModelHandle, config: FitConfig, weighted: bool) -> float:
    """Seconds in which a model reads one sequence, once it is warm."""
    tokens = np.arange(config.seq_len, dtype=np.int32) % 256
    geometry = model.geometry if weighted else None
    begun = 0.0
    for n in (8, len(tokens)):
        begun = time.perf_counter()
        first = np.zeros(1, dtype=np.int32)
        rows = capture(model.load(), tokens[:n], first, attention_geometry=geometry)
        mx.eval(rows.keys, rows.values, rows.sensitivity)
    return time.perf_counter() - begun


def _check_apart(out: str | os.PathLike[str], work: str | os.PathLike[str]) -> None:
    """The artifact is moved into place as a whole, and the state is removed as a whole."""
    a, b = Path(out).resolve(), Path(work).resolve()
    if a == b or a in b.parents or b in a.parents:
        raise FitError(
            f"The mapper ({out}) and the state of an unfinished fit ({named('work')} {work}) need "
            "folders of their own, neither inside the other."
        )
