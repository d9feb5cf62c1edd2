"""From text to moments: the models read it, pass by pass, and what they cache is summed up."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.capture import CachedRows, FeatureExtractor, capture, row_positions
from kvgraft.fit.checkpoint import FitCheckpoint
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import FeatureRows
from kvgraft.fit.layer_ranking import LayerScores
from kvgraft.fit.memory_plan import Part
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.moments import Moments
from kvgraft.fit.prepare import FitJob
from kvgraft.fit.search import Documents, read_documents
from kvgraft.fit.solve import solve_mapper
from kvgraft.fit.token_weights import row_weights
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.loading import ModelIdentity
from kvgraft.option_names import named
from kvgraft.progress import Progress, StepCounter

__all__ = [
    "CHECKPOINT_EVERY",
    "GatheredMoments",
    "Gatherer",
    "SourceDocuments",
    "open_checkpoint",
]

CHECKPOINT_EVERY = 50
"""Sequences between two saves of the moments, when there is a folder to save to."""

_KEPT_DOCUMENTS = 64
"""Documents that are kept for tuning when the source cannot stay in memory."""

WHO = ("source", "target")


@dataclass(frozen=True)
class GatheredMoments:
    """The moments of a pair on a text: enough for any number of mappers.

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
        """A mapper from these moments; the models are not needed.

        Args:
            config: k, λ, head mapping, layer ranking and weight format to use; its
                settings about text are taken from the moments. Default: the config
                that they were gathered with.
            scores: Single-source scores of an earlier call; see
                :func:`solve_mapper`.
            progress: Called with (layers done, layers in all).

        Raises:
            FitError: If other moments are needed for these settings.
        """
        chosen = self.config if config is None else config
        for name in ("content_space", "stride", "skip", "seq_len", "token_weights"):
            chosen = replace(chosen, **{name: getattr(self.config, name)})
        mapper = solve_mapper(self.fit, self.heldout, chosen, scores=scores, progress=progress)
        mapper.fit |= self.facts
        mapper.source_model, mapper.target_model = self.source_model, self.target_model
        return mapper


@contextmanager
def open_checkpoint(
    job: FitJob, work: str | os.PathLike[str] | None, *, keep: bool = False
) -> Iterator[FitCheckpoint | None]:
    """The folder of a fit: the user's, a temporary one where the plan needs one, or none.

    Args:
        job: The fit.
        work: The user's folder, if given. Each process of a group has a part of it.
        keep: Leave the state there when the block ends well.

    Raises:
        FitError: If the disk has no room, or the folder belongs to something else.
    """
    plan = job.plan
    if work is None and not plan.spill and not plan.sequential:
        yield None
        return
    if work is not None and job.group is not None:
        work = Path(work) / f"process-{job.group.rank()}-of-{job.group.size()}"
    made = tempfile.mkdtemp(prefix="kvgraft-fit-") if work is None else None
    path = Path(made or work or ".")
    try:
        # A save is written beside the one before it.
        saves = 0 if work is None or plan.spill else 2 * plan.moment_bytes
        _check_space(path, plan.disk_bytes + saves)
        folder = FitCheckpoint(path, job.identity())
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


class SourceDocuments:
    """Documents of which the source has read the first part: to score on, and to tune on.

    The held-out ones are read at once. Those to tune on are read when they are asked
    for; where the source is going to be unloaded before, up to 64 of them at once.

    Args:
        job: The fit.
    """

    def __init__(self, job: FitJob) -> None:
        self._job = job
        self._kept: list[Documents] = []
        config, text = job.config, job.calibration
        if job.plan.sequential and config.tune_steps:
            wanted = config.tune_steps * config.tune_batch
            for i in range(min(wanted, _KEPT_DOCUMENTS)):
                self._kept.append(self._read(i))
        tokens = text.tokens[text.heldout][: config.documents]
        self.heldout = read_documents(job.source.load(), tokens, self._prefix)

    @property
    def _prefix(self) -> int:
        return self._job.config.prefix or min(768, self._job.calibration.seq_len * 3 // 4)

    def training(self, i: int) -> Documents:
        """A sequence that was fitted on, alone."""
        return self._kept[i % len(self._kept)] if self._kept else self._read(i)

    @property
    def n_training(self) -> int:
        """How many different ones there are."""
        return len(self._kept) or int((~self._job.calibration.heldout).sum())

    def _read(self, i: int) -> Documents:
        text = self._job.calibration
        fitted = text.tokens[~text.heldout]
        row = fitted[i % len(fitted)]
        return read_documents(self._job.source.load(), row[None], self._prefix, score_source=False)


_Sequence = tuple[int, FeatureRows, FeatureRows, dict[str, NDArray[np.float64]] | None]
"""Place in a process's share, features of source and target, and row weights of one sequence."""


class Gatherer:
    """Runs the text through the models, pass by pass.

    Args:
        job: The fit.
        folder: Where rows and moments are saved, if anywhere.
        counter: Counts one step per sequence and pass.
    """

    def __init__(self, job: FitJob, folder: FitCheckpoint | None, counter: StepCounter) -> None:
        self._job = job
        self._folder = folder
        self._counter = counter
        config, text = job.config, job.calibration
        self._positions = row_positions(text.seq_len, config.stride, config.skip)
        self._extractors = [
            FeatureExtractor(geometry, self._positions, who, content_space=config.content_space)
            for geometry, who in zip(job.geometries, WHO, strict=True)
        ]
        self._model_seconds = 0.0

    def run(self) -> GatheredMoments:
        """The moments of the fitted and of the held-out text.

        The models may be unloaded afterwards, except where tuning needs them.

        Raises:
            FitError: If a model produces NaN, or a save cannot be written.
        """
        job = self._job
        if job.plan.sequential:
            self._store_source_rows()
        parts: list[list[Moments]] = [[], []]
        for index in range(len(job.plan.passes)):
            for n, some in enumerate(self._one_pass(index)):
                parts[n] += some
        if job.group is not None:
            for moments in (*parts[0], *parts[1]):
                moments.all_reduce(job.group)
        fitted, heldout = MomentSet(parts[0]), MomentSet(parts[1])
        facts = {
            "text": job.calibration.describe(),
            "stride": job.config.stride,
            "skip": job.config.skip,
            "token_weights": job.config.token_weights,
            "effective_rows": round(fitted.effective_count("keys")),
            "seconds": round(time.perf_counter() - job.started, 1),
            "seconds_models": round(self._model_seconds, 1),
        }
        identities = job.source.identity, job.target.identity
        return GatheredMoments(fitted, heldout, job.config, facts, *identities)

    def _store_source_rows(self) -> None:
        """Write the source's rows of all sequences to disk, and unload it."""
        assert self._folder is not None
        finished = self._folder.current_pass >= len(self._job.plan.passes)
        for i in self._job.sequences:
            if not finished and not self._folder.has_rows("source", i):
                self._folder.save_rows("source", i, self._run_model(0, i))
            self._counter.step()
        self._job.source.unload()

    def _one_pass(self, index: int) -> tuple[list[Moments], list[Moments]]:
        """Fitted and held-out moments of one pass."""
        folder, n = self._folder, len(self._job.sequences)
        if folder is not None and index < folder.current_pass:
            self._counter.step(n)
            return self._read(index)
        first = 0
        if folder is not None and folder.done:
            fitted, heldout = self._read(index, mapped=False)
            first = folder.done
        else:
            fitted = [self._make(part, "float64") for part in self._job.plan.passes[index]]
            heldout = [self._make(part, "float32") for part in self._job.plan.passes[index]]
        self._counter.step(first)
        for at, source, target, weights in self._rows(index, first):
            held = self._job.calibration.heldout[self._job.sequences[at]]
            for moments in heldout if held else fitted:
                # All held-out tokens have the same weight: scores are means over them.
                moments.add(source, target, None if held else weights)
            self._counter.step()
            if folder is not None and (at + 1) % CHECKPOINT_EVERY == 0 and at + 1 < n:
                folder.checkpoint(index, at + 1, [*fitted, *heldout])
        for moments in (*fitted, *heldout):
            moments.flush()
        if folder is None:
            return fitted, heldout
        folder.checkpoint(index, n, [*fitted, *heldout], complete=True)
        if not self._job.plan.spill:
            return fitted, heldout
        return self._read(index)

    def _make(self, part: Part, dtype: str) -> Moments:
        return Moments(
            *self._job.geometries,
            structure=self._job.plan.structure,
            kinds=(part.kind,),
            heads=part.heads,
            targets=part.targets,
            dtype=dtype,
        )

    def _read(self, index: int, *, mapped: bool = True) -> tuple[list[Moments], list[Moments]]:
        """Saved moments of a pass; memory-mapped unless they are going to be added to."""
        assert self._folder is not None
        files = self._folder.moments_of(index)
        moments = [Moments.load(path, mapped=mapped)[0] for path in files]
        half = len(moments) // 2
        return moments[:half], moments[half:]

    def _rows(self, index: int, first: int) -> Iterator[_Sequence]:
        """Features of this process's sequences from ``first`` on, in order.

        On a GPU the next sequence is queued before this one is yielded.
        """
        ahead = mx.default_device() == mx.Device(mx.gpu)
        waiting: list[tuple[int, list[CachedRows]]] = []
        for at in range(first, len(self._job.sequences)):
            waiting.append((at, self._start(index, at)))
            if len(waiting) > int(ahead):
                yield self._finish(*waiting.pop(0))
        for item in waiting:
            yield self._finish(*item)

    def _start(self, index: int, at: int) -> list[CachedRows]:
        """Queue the features of a sequence, from disk or from the models."""
        folder, label, i = self._folder, f"pair{index}", self._job.sequences[at]
        rows: list[CachedRows] = []
        if folder is not None and self._job.plan.sequential:
            rows += folder.load_rows("source", i) or []
        saved = None if folder is None else folder.load_rows(label, at)
        if saved is None:
            saved = [self._run_model(side, i) for side in range(len(rows), 2)]
            if folder is not None:
                folder.save_rows(label, at, *saved)
        rows += saved
        return [
            extractor.start(side) for extractor, side in zip(self._extractors, rows, strict=True)
        ]

    def _finish(self, at: int, started: list[CachedRows]) -> _Sequence:
        begun = time.perf_counter()
        source, target = (
            extractor.finish(side)
            for extractor, side in zip(self._extractors, started, strict=True)
        )
        weights = None
        if started[1].sensitivity is not None:
            weights = row_weights(started[1].sensitivity, self._job.config.effective_rows)
        self._model_seconds += time.perf_counter() - begun
        mx.clear_cache()
        return at, source, target, weights

    def _run_model(self, side: int, i: int) -> CachedRows:
        begun = time.perf_counter()
        weighted = side == 1 and self._job.config.token_weights == "attention"
        rows = capture(
            self._job.models[side].load(),
            self._job.calibration.tokens[i],
            self._positions,
            attention_geometry=self._job.geometries[side] if weighted else None,
        )
        self._model_seconds += time.perf_counter() - begun
        return rows
