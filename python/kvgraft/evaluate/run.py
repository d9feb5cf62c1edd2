"""Evaluate a mapper: its artifact, two models and held-out text in; verdict and report out.

The two models are never in memory together. First the source reads all documents and
its caches are written to disk; then it is unloaded, the target is loaded, and every arm
runs on the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraft.errors import ArgumentError, EvaluationError
from kvgraft.evaluate import output
from kvgraft.evaluate.checkpoint import EvalCheckpoint
from kvgraft.evaluate.needle import make_tasks
from kvgraft.evaluate.results import EvalConfig, Measurements
from kvgraft.evaluate.stages import Stages
from kvgraft.evaluate.summary import summarise, verdict_of
from kvgraft.evaluate.verdict import Verdict
from kvgraft.mapper.config import to_config
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.handle import ModelHandle, choose_dtype
from kvgraft.models.loading import ModelIdentity, ModelLike, check_tokenizers
from kvgraft.option_names import named
from kvgraft.progress import Progress, StepCounter
from kvgraft.text.heldout import read_heldout

__all__ = ["Evaluation", "evaluate_mapper", "mapper_digest", "measure"]

PathLike = str | os.PathLike[str]

_QUESTION = 64  # tokens that a needle's question and answer may take


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        results: Every number, JSON-ready: the content of ``eval.json``. What it holds
            is in ``docs/quality.md``.
        verdict: The verdict with its reasons.
        files: The report: ``report.html``, ``report.md`` and ``eval.json``; empty
            without ``out``.
        stored: Whether verdict and numbers were written into the artifact.
    """

    results: dict[str, Any]
    verdict: Verdict
    files: tuple[Path, ...] = ()
    stored: bool = False


def evaluate_mapper(
    mapper: Mapper | PathLike,
    source: ModelLike,
    target: ModelLike,
    text: PathLike | Sequence[PathLike],
    config: EvalConfig | None = None,
    *,
    store: bool = False,
    out: PathLike | None = None,
    calibration: PathLike | Sequence[PathLike] = (),
    chat: bool = False,
    work: PathLike | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a mapper on held-out text, judge it, and store or report the result.

    Args:
        mapper: The mapper: its artifact's path, or a :class:`Mapper`. Mapping with the
            weights on disk is timed for a path only.
        source: The model whose caches are mapped: a folder, a repository, or loaded.
        target: The model that they are mapped for.
        text: Held-out text, one file or several: plain, JSONL or Parquet.
        config: Settings.
        store: Write verdict, recommended native tokens and numbers into the artifact.
            Needs a path.
        out: Folder to write the report to; none is written by default.
        calibration: The text that the mapper was fitted on, for artifacts without
            fingerprints of it.
        chat: Render JSONL chats with the tokenizer's template.
        work: Folder for the state: an evaluation that was stopped resumes from there.
            Default a temporary one.
        progress: Called with (steps done, steps in all).

    Raises:
        ArgumentError: If ``store`` is set and ``mapper`` is not a path.
        EvaluationError: If the text is too short, was fitted on, or is longer than
            a sliding layer's window, the mapper leaves out target layers, or ``work``
            belongs to another evaluation.
        PairMismatchError: If the mapper is for other models.
        TokenizerMismatchError: If the models do not share a tokenizer.
        ArtifactWriteError: If the artifact or the report cannot be written.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> from kvgraft.evaluate import EvalConfig
        >>> evaluation = kvgraft.evaluate_mapper(
        ...     bundled("mapper"),
        ...     bundled("models/large"),
        ...     bundled("models/small"),
        ...     bundled("text/heldout_stories.txt"),
        ...     EvalConfig(documents=2, prefix=64, scored=32, native_starts=(0,), native_ends=(1,),
        ...                needle_lengths=(), speed_lengths=()),  # far too few for a verdict
        ... )
        >>> evaluation.verdict.level in ("ship", "ship with warning", "do not ship")
        True
    """
    path = None if isinstance(mapper, Mapper) else Path(mapper)
    if store and path is None:
        raise ArgumentError("To store the verdict, give the path of the mapper's artifact.")
    opened = mapper if isinstance(mapper, Mapper) else open_mapper(mapper)
    measured = measure(
        opened,
        source,
        target,
        text,
        config,
        path=path,
        calibration=calibration,
        chat=chat,
        work=work,
        progress=progress,
    )
    results = summarise(opened, measured)
    if store and path is not None:
        output.store(opened, path, results)
    files = () if out is None else tuple(output.write_results(Path(out), results))
    return Evaluation(results, verdict_of(results), files, store)


def measure(
    mapper: Mapper,
    source: ModelLike,
    target: ModelLike,
    text: PathLike | Sequence[PathLike],
    config: EvalConfig | None = None,
    *,
    path: PathLike | None = None,
    calibration: PathLike | Sequence[PathLike] = (),
    chat: bool = False,
    work: PathLike | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """Measure a mapper on held-out text: the first half of :func:`evaluate_mapper`.

    Args and errors are those of :func:`evaluate_mapper`; ``path`` is where the mapper is
    on disk, for timings with the weights on disk.
    """
    cfg = EvalConfig() if config is None else config
    models = tuple(ModelHandle(model, dtype=choose_dtype(cfg.dtype)) for model in (source, target))
    identities = [_identity(model) for model in models]
    check_pair(mapper, source_model=identities[0], target_model=identities[1])
    tokenizer = models[0].tokenizer
    check_tokenizers(tokenizer, models[1].tokenizer)
    _check_complete(mapper)
    _check_windows(mapper, cfg)
    heldout = read_heldout(
        _paths(text),
        tokenizer,
        mapper.fit,
        count=cfg.documents,
        length=cfg.prefix + cfg.scored,
        calibration=_paths(calibration),
        chat=chat,
    )
    tasks = make_tasks(
        tokenizer,
        heldout.filler,
        lengths=cfg.needle_lengths,
        depths=cfg.needle_depths,
        samples=cfg.needle_samples,
        seed=cfg.seed,
    )
    notes = [*heldout.notes]
    if len(heldout) < cfg.documents:
        notes.append(
            f"The text is enough for {len(heldout)} documents of {cfg.prefix + cfg.scored} tokens, "
            f"not the {cfg.documents} asked for."
        )
    clock = StepCounter(progress, 2 * len(heldout) + 2 * len(tasks) + len(cfg.speed_lengths))
    identity = {
        "mapper": mapper_digest(mapper),
        "source": identities[0].to_dict(),
        "target": identities[1].to_dict(),
        "text": heldout.digest,
        "settings": cfg.to_dict(),
    }
    with _folder(work, identity) as folder:
        artifact = None if path is None else Path(path)
        stages = Stages(mapper, artifact, heldout, tasks, cfg, folder, clock)
        stages.run_source(models[0])
        found = stages.run_target(models[1])
        importance = stages.source_shares()
    return Measurements(
        cfg,
        heldout,
        found.documents,
        found.needles,
        found.speed,
        found.policy,
        importance,
        {"source": identities[0].to_dict(), "target": identities[1].to_dict()},
        notes,
    )


def _paths(given: PathLike | Sequence[PathLike]) -> Sequence[PathLike]:
    return [given] if isinstance(given, (str, os.PathLike)) else given


def _identity(model: ModelHandle) -> ModelIdentity:
    model.peek()
    if model.identity is None:
        raise EvaluationError(
            "An evaluation needs a model's tokenizer and identity: give its folder or repository, "
            "or a kvgraft.models.loading.LoadedModel."
        )
    return model.identity


def _check_complete(mapper: Mapper) -> None:
    absent = set(range(len(mapper.target.layers))) - {m.target_layer for m in mapper.layers}
    if absent:
        raise EvaluationError(
            f"This mapper does not produce target layers {sorted(absent)}, so the target cannot "
            "continue from its caches. Fit all layers."
        )


def _check_windows(mapper: Mapper, config: EvalConfig) -> None:
    """Refuse texts longer than a sliding layer's window.

    Every arm compares all tokens of the prefix; those beyond the window are in neither
    the source's cache nor the target's own.
    """
    longest = max(config.prefix + config.scored, *config.needle_lengths, *config.speed_lengths, 0)
    for who, geometry in (("source", mapper.source), ("target", mapper.target)):
        windows = [layer.window for layer in geometry.layers if layer.window is not None]
        if windows and longest + _QUESTION > min(windows):
            raise EvaluationError(
                f"The {who} {geometry.model_type} has layers that attend to the last "
                f"{min(windows)} tokens only; this evaluation needs {longest + _QUESTION}. Use a "
                f"shorter {named('prefix')}, {named('scored')}, {named('needle_lengths')} and "
                f"{named('speed_lengths')}."
            )


@contextmanager
def _folder(work: PathLike | None, identity: dict[str, Any]) -> Iterator[EvalCheckpoint]:
    if work is None:
        with tempfile.TemporaryDirectory(prefix="kvgraft-eval-") as name:
            yield EvalCheckpoint(Path(name), identity)
        return
    folder = EvalCheckpoint(Path(work), identity)
    yield folder
    folder.empty()


def mapper_digest(mapper: Mapper) -> str:
    """SHA-256 of what a mapper is, without what was measured of it."""
    kinds = ("keys", "values")
    storage = {(m.target_layer, k): getattr(m, k).storage for m in mapper.layers for k in kinds}
    config = to_config(mapper, storage)
    del config["quality"], config["kvgraft_version"]
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
