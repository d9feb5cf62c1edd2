"""Everything that a fit decides before it reads the text with a model: the checks and the plan.

:func:`prepare` serves the fit and its dry run, ``kvgraft plan``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.errors import FitError
from kvgraft.fit.capture import row_positions
from kvgraft.fit.config import FitConfig
from kvgraft.fit.memory_plan import FitMemoryPlan, plan_fit_memory
from kvgraft.fit.weight_format import storage_problem
from kvgraft.models.attention_hook import can_capture
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.handle import ModelHandle, default_dtype
from kvgraft.models.loading import ModelLike, check_tokenizers
from kvgraft.option_names import named
from kvgraft.progress import Notify, ignore
from kvgraft.text.corpus import CalibrationText, read_text
from kvgraft.text.sources import TextLike, check_sources

__all__ = ["FitJob", "Text", "prepare"]

Text = CalibrationText | TextLike | Sequence[TextLike]
"""Calibration text: files (see :class:`TextSource`), or text that is tokenised already."""


@dataclass(frozen=True)
class FitJob:
    """A fit that was checked and planned.

    Attributes:
        source: The model whose caches are mapped.
        target: The model that they are mapped for.
        config: Settings; what depends on the models is settled.
        text: Calibration text; ``None`` in a dry run without text.
        plan: Memory, disk and passes over the text.
        sequences: Indices of the sequences that this process reads.
        adjustments: Settings that were changed, one line each.
        group: Processes that share the text, or ``None``.
        started: :func:`time.perf_counter` at the beginning.
    """

    source: ModelHandle
    target: ModelHandle
    config: FitConfig
    text: CalibrationText | None
    plan: FitMemoryPlan
    sequences: tuple[int, ...]
    adjustments: tuple[str, ...]
    group: mx.distributed.Group | None
    started: float

    @property
    def models(self) -> tuple[ModelHandle, ModelHandle]:
        """Source and target."""
        return self.source, self.target

    @property
    def geometries(self) -> tuple[ModelGeometry, ModelGeometry]:
        """Geometry of source and target."""
        return self.source.geometry, self.target.geometry

    @property
    def calibration(self) -> CalibrationText:
        """The text of a fit, which has one."""
        assert self.text is not None
        return self.text

    @property
    def steps(self) -> int:
        """Steps of progress: one per sequence and pass, per target layer, and per tuning step."""
        per_sequence = len(self.plan.passes) * (2 if self.config.sequential else 1)
        n_layers = len(self.target.geometry.layers)
        return len(self.sequences) * per_sequence + n_layers + self.config.tune_steps

    def identity(self) -> dict[str, Any]:
        """What must be the same for a fit to be resumed, JSON-ready."""
        assert self.source.identity is not None and self.target.identity is not None
        config, plan = self.config, self.plan
        return {
            "source geometry": self.source.geometry.to_dict(),
            "target geometry": self.target.geometry.to_dict(),
            "source model": self.source.identity.to_dict(),
            "target model": self.target.identity.to_dict(),
            "text": self.calibration.digest,
            "stride": config.stride,
            "skip": config.skip,
            "content_space": config.content_space,
            "token_weights": [config.token_weights, config.effective_rows],
            "passes": [[[p.kind, p.heads, p.targets] for p in one] for one in plan.passes],
            "n_passes": len(plan.passes),
            "structure": plan.structure,
            "sequential": plan.sequential,
        }


def prepare(
    source: ModelLike,
    target: ModelLike,
    text: Text | None,
    config: FitConfig | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    notify: Notify | None = None,
    group: mx.distributed.Group | None = None,
    while_loaded: Callable[[ModelHandle, FitConfig], None] | None = None,
) -> FitJob:
    """Check a fit's models, text and settings, and plan its memory.

    Args:
        source: The source; see :func:`kvgraft.fit.fit_mapper`.
        target: The target.
        text: Calibration text; ``None`` for a dry run without text.
        config: Settings; default :class:`FitConfig`.
        work: The folder to resume from, if any.
        notify: Called with lines that a user should see.
        group: Processes that share the text.
        while_loaded: For a dry run: called with each model and the settings while the
            model is in memory. It is then unloaded, so that one is held at a time.

    Raises:
        TokenizerMismatchError: If the models do not share a tokenizer.
        UnsupportedModelError: If a model's cache cannot be mapped.
        TextError: If a file cannot be read.
        FitError: If the text is too short, the memory limit is
            too small, or the processes of ``group`` were given different arguments.
    """
    started = time.perf_counter()
    config = FitConfig() if config is None else config
    notify = ignore if notify is None else notify
    _check_request(text, config, work)
    handles = tuple(ModelHandle(model, dtype=default_dtype()) for model in (source, target))
    geometries: list[ModelGeometry] = []
    adjustments: list[str] = []
    for handle in handles:
        model = handle.load()
        geometries.append(handle.geometry)
        if handle is handles[1] and config.token_weights == "auto":
            config, adjustments = _choose_token_weights(model, geometries[1], config)
        if while_loaded is not None:
            while_loaded(handle, config)
        if config.sequential or while_loaded is not None:
            del model
            handle.unload()
    check_tokenizers(handles[0].tokenizer, handles[1].tokenizer)
    calibration = None if text is None else _read(text, handles[0].tokenizer, config)
    config, lines = config.within(len(geometries[0].layers))
    _check_storage(geometries[0], geometries[1], config)
    adjustments = [*lines, *adjustments]
    for line in (*adjustments, *(() if calibration is None else calibration.notes)):
        notify(line)
    n_sequences = config.sequences if calibration is None else len(calibration)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    mine = tuple(range(rank, n_sequences, size))
    nbytes = handles[0].nbytes or 0, handles[1].nbytes or 0
    plan = _plan(geometries[0], geometries[1], calibration, config, nbytes, len(mine))
    job = FitJob(
        handles[0], handles[1], config, calibration, plan, mine, tuple(adjustments), group, started
    )
    if group is not None:
        _check_agreement(job, group)
    if calibration is not None and plan.rows < 4 * plan.in_dim:
        notify(
            f"{plan.rows:,} rows are few for {plan.in_dim:,} features per target head: the map "
            f"will be worse than the pair allows. Give more text, a smaller {named('k')}, or "
            f"{named('head_mapping', 'local')}."
        )
    return job


def _check_request(
    text: Text | None, config: FitConfig, work: str | os.PathLike[str] | None
) -> None:
    """Refuse what cannot be done before models are loaded."""
    seq_len = config.seq_len
    if isinstance(text, CalibrationText):
        seq_len = text.seq_len
    elif text is not None:
        check_sources(text)
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


def _choose_token_weights(
    target: Any, geometry: ModelGeometry, config: FitConfig
) -> tuple[FitConfig, list[str]]:
    """Weights by attention where the target can be instrumented; else a line that says so."""
    if can_capture(target):
        return replace(config, token_weights="attention"), []
    line = (
        f"The attention of {geometry.model_type} cannot be instrumented; all tokens have the "
        "same weight."
    )
    return replace(config, token_weights="uniform"), [line]


def _read(text: Text, tokenizer: Any, config: FitConfig) -> CalibrationText:
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


def _check_storage(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> None:
    problem = storage_problem(source, target, config)
    if problem is not None:
        raise FitError(f"{problem}; or give {named('weight_format', 'float16')}.")


def _plan(
    source: ModelGeometry,
    target: ModelGeometry,
    text: CalibrationText | None,
    config: FitConfig,
    nbytes: tuple[int, int],
    sequences: int,
) -> FitMemoryPlan:
    rows = None
    if text is not None:
        config = replace(config, seq_len=text.seq_len)
        positions = row_positions(text.seq_len, config.stride, config.skip)
        rows = int((~text.heldout).sum()) * len(positions)
    return plan_fit_memory(
        source, target, config, model_bytes=nbytes, rows=rows, sequences=sequences
    )


def _check_agreement(job: FitJob, group: mx.distributed.Group) -> None:
    """Refuse processes that cannot share a fit: of several passes, or of other arguments."""
    if job.plan.spill:
        raise FitError(
            "Several processes cannot fit in several passes: their moments are summed in memory. "
            f"Raise {named('memory_limit')}, or give {named('head_mapping', 'local')}."
        )
    # Where each machine keeps the models does not matter.
    facts = {
        key: {**value, "name": None} if key.endswith(" model") else value
        for key, value in job.identity().items()
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
