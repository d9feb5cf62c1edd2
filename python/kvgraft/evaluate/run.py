"""The whole evaluation: a mapper, its two models and held-out text in; numbers out.

The models are never held at once. First the source reads everything and leaves
its caches on disk; then it is released, the target is loaded, and every arm is
run on the same tokens.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft import _ext
from kvgraft import cache as caches
from kvgraft.errors import CacheError, EvaluationError
from kvgraft.evaluate import arms
from kvgraft.evaluate import timing as speed
from kvgraft.evaluate.checkpoint import EvalCheckpoint, SourceLayers
from kvgraft.evaluate.importance import source_shares
from kvgraft.evaluate.metrics import TokenScores, Variance, attention_cosines, score_tokens
from kvgraft.evaluate.native_ends import choose_policy, search
from kvgraft.evaluate.needle import NeedleTask, answer, is_right, make_tasks
from kvgraft.evaluate.results import DocumentResult, EvalConfig, Measurements, NeedleResult
from kvgraft.files import atomic
from kvgraft.mapper import artifact
from kvgraft.mapper.config import to_config
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.attention_hook import AttentionCall, capture_attention
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import LoadedModel, ModelIdentity, check_tokenizers, load_model
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import strip_rope
from kvgraft.models.vocabulary import check_tokens
from kvgraft.option_names import named
from kvgraft.progress import Progress, StepCounter
from kvgraft.text.heldout import HeldoutText, read_heldout

__all__ = ["SWITCHES", "mapper_digest", "measure"]

ModelLike = LoadedModel | str | os.PathLike[str]

KEEP_BYTES = 2_000_000_000
"""Mapper weights of at most this many bytes stay in memory between documents."""

SWITCHES = ("before the answer", "mid-context")
_MID = 0.75
_QUESTION = 64  # tokens that a needle's question and answer may take
_TIMED_HEADS = 3


class _Side:
    """One model, loaded when it is its turn."""

    def __init__(self, given: ModelLike, dtype: str | None) -> None:
        self._given = given
        self._dtype = dtype

    def peek(self) -> LoadedModel:
        """Tokenizer and identity; the weights stay on disk."""
        if isinstance(self._given, LoadedModel):
            return self._given
        return load_model(self._given, lazy=True)

    @contextmanager
    def loaded(self) -> Iterator[LoadedModel]:
        """The live model, released afterwards unless the caller holds it."""
        if isinstance(self._given, LoadedModel):
            yield self._given
            return
        model = load_model(self._given)
        dtype = self._dtype
        if dtype is None and mx.default_device() == mx.Device(mx.cpu):
            # MLX's CPU back end multiplies 16-bit matrices one element at a time.
            dtype = "float32"
        if dtype is not None:
            model.model.set_dtype(getattr(mx, dtype))
        try:
            yield model
        finally:
            del model
            gc.collect()
            mx.clear_cache()


def measure(
    mapper: Mapper,
    source: ModelLike,
    target: ModelLike,
    text: Sequence[str | os.PathLike[str]],
    config: EvalConfig | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    calibration: Sequence[str | os.PathLike[str]] = (),
    chat: bool = False,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """Measure a mapper on held-out text.

    Args:
        mapper: The mapper.
        source: The model whose caches it maps: loaded, or a folder or repository.
        target: The model they are mapped for.
        text: Files with held-out text; see :func:`read_heldout`.
        config: Settings.
        path: Where the mapper is on disk, for cold timings.
        calibration: The text that it was fitted on, if the artifact doesn't
            carry fingerprints of it.
        chat: Render chats with the tokenizer's template.
        work: Folder that keeps the state: an evaluation that was stopped goes on
            there. Default a temporary one.
        progress: Called with (steps done, steps in all).

    Raises:
        EvaluationError: If the text is too short, was fitted on, or is longer than
            a sliding layer's window, the mapper leaves out target layers, or the
            folder belongs to another evaluation.
        PairMismatchError: If the mapper is for other models.
        TokenizerMismatchError: If the models do not share a tokenizer.
    """
    cfg = EvalConfig() if config is None else config
    sides = _Side(source, cfg.dtype), _Side(target, cfg.dtype)
    first, second = (side.peek() for side in sides)
    identities = first.identity(), second.identity()
    artifact.check_pair(mapper, source_model=identities[0], target_model=identities[1])
    check_tokenizers(first.tokenizer, second.tokenizer)
    tokenizer = first.tokenizer
    _check_complete(mapper)
    _check_windows(mapper, cfg)
    heldout = read_heldout(
        text,
        tokenizer,
        mapper.fit,
        count=cfg.documents,
        length=cfg.prefix + cfg.scored,
        calibration=calibration,
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
    del first, second
    notes = [*heldout.notes]
    if len(heldout) < cfg.documents:
        notes.append(
            f"The text is enough for {len(heldout)} documents of {cfg.prefix + cfg.scored} tokens, "
            f"not the {cfg.documents} asked for."
        )
    steps = 2 * len(heldout) + 2 * len(tasks) + len(cfg.speed_lengths)
    clock = StepCounter(progress, steps)
    with _folder(work, mapper, identities, heldout, cfg) as folder:
        run = _Run(mapper, None if path is None else Path(path), heldout, tasks, cfg, folder, clock)
        run.read_with(sides[0])
        return run.finish_with(sides[1], tokenizer, identities, notes)


def _check_complete(mapper: Mapper) -> None:
    absent = set(range(len(mapper.target.layers))) - {m.target_layer for m in mapper.layers}
    if absent:
        raise EvaluationError(
            f"This mapper does not produce target layers {sorted(absent)}, so the target cannot go "
            "on from its caches alone. Fit a whole one."
        )


def _check_windows(mapper: Mapper, config: EvalConfig) -> None:
    """Refuse texts that a sliding layer would forget the start of.

    Every arm compares all tokens of the prefix; beyond the window they are gone
    from the source's cache and from the target's own.
    """
    longest = max(config.prefix + config.scored, *config.needle_lengths, *config.speed_lengths, 0)
    for who, geometry in (("source", mapper.source), ("target", mapper.target)):
        windows = [layer.window for layer in geometry.layers if layer.window is not None]
        if windows and longest + _QUESTION > min(windows):
            raise EvaluationError(
                f"The {who} {geometry.model_type} has layers that see the last {min(windows)} "
                f"tokens only; this evaluation needs {longest + _QUESTION}. Use a shorter "
                f"{named('prefix')}, {named('scored')}, {named('needle_lengths')} and "
                f"{named('speed_lengths')}."
            )


@contextmanager
def _folder(
    work: str | os.PathLike[str] | None,
    mapper: Mapper,
    identities: tuple[ModelIdentity, ModelIdentity],
    text: HeldoutText,
    config: EvalConfig,
) -> Iterator[EvalCheckpoint]:
    identity = {
        "mapper": mapper_digest(mapper),
        "source": identities[0].to_dict(),
        "target": identities[1].to_dict(),
        "text": text.digest,
        "settings": config.to_dict(),
    }
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


class _Run:
    """The stages of one evaluation."""

    def __init__(
        self,
        mapper: Mapper,
        path: Path | None,
        text: HeldoutText,
        tasks: list[NeedleTask],
        config: EvalConfig,
        folder: EvalCheckpoint,
        clock: StepCounter,
    ) -> None:
        self.mapper, self.path, self.text, self.tasks = mapper, path, text, tasks
        self.config, self.folder, self.clock = config, folder, clock
        nbytes = sum(
            part.storage.nbytes(part.shape) for m in mapper.layers for part in (m.keys, m.values)
        )
        self.keep = nbytes <= KEEP_BYTES
        self.raw = arms.raw_layers(mapper.source, mapper.target)
        self.wanted = sorted({*mapper.source_layers, *(self.raw or ())})

    # ------------------------------------------------------------- the source

    def read_with(self, side: _Side) -> None:
        """Let the source read all documents and tasks that it has not read yet."""
        documents = [f"source-document-{i:04d}" for i in range(len(self.text))]
        tasks = [f"source-task-{i:04d}" for i in range(len(self.tasks))]
        missing = [name for name in (*documents, *tasks) if self.folder.read(name) is None]
        for _ in range(len(documents) + len(tasks) - len(missing)):
            self.clock.step()
        if not missing:
            return
        with side.loaded() as loaded:
            geometry = read_geometry(loaded.model)
            artifact.check_pair(self.mapper, source=geometry)
            atomic.check_space(self.folder.path, self._capture_bytes(geometry, missing))
            prefill(loaded.model, self.text.tokens[0, :8].tolist())  # warm up
            for name in missing:
                index = int(name.rsplit("-", 1)[1])
                if name in documents:
                    self._read_document(loaded.model, name, self.text.tokens[index].tolist())
                else:
                    self._read_task(loaded, name, self.tasks[index])
                mx.clear_cache()
                self.clock.step()

    def _capture_bytes(self, geometry: ModelGeometry, missing: Sequence[str]) -> int:
        layers = [geometry.layers[i] for i in self.wanted]
        per_token = sum(x.n_kv_heads * (x.key_dim + x.value_dim) for x in layers)
        per_token *= 4 if geometry.dtype == "float32" else 2
        tokens = sum(
            self.config.prefix
            if "document" in name
            else len(self.tasks[int(name.rsplit("-", 1)[1])].tokens)
            for name in missing
        )
        return int(per_token * tokens)

    def _keep(self, name: str, cache: list[Any]) -> None:
        pairs = caches.read_cache(cache, self.mapper.source).layers
        self.folder.keep_cache(
            name, {i: (mx.contiguous(pairs[i][0]), mx.contiguous(pairs[i][1])) for i in self.wanted}
        )

    def _read_document(self, model: Any, name: str, tokens: list[int]) -> None:
        at = self.config.prefix - 1
        check_tokens(model, tokens)
        start = time.perf_counter()
        cache = prefill(model, tokens[:at])
        seconds = time.perf_counter() - start
        self._keep(name, cache)
        logits = model(mx.array([tokens[at:-1]]), cache=cache)[0]
        scores, _ = score_tokens(logits, tokens[at + 1 :])
        self.folder.write(name, {"scores": scores.to_dict(), "seconds": seconds})

    def _read_task(self, loaded: LoadedModel, name: str, task: NeedleTask) -> None:
        cache = prefill(loaded.model, task.tokens[:-1])
        self._keep(name, cache)
        reply = answer(loaded.model, loaded.tokenizer, cache, task.tokens[-1:])
        self.folder.write(name, {"reply": reply})

    # ------------------------------------------------------------- the target

    def finish_with(
        self,
        side: _Side,
        tokenizer: Any,
        identities: tuple[ModelIdentity, ModelIdentity],
        notes: list[str],
    ) -> Measurements:
        """Let the target go on from every cache; everything that came of it."""
        with side.loaded() as loaded:
            geometry = read_geometry(loaded.model)
            artifact.check_pair(self.mapper, target=geometry)
            prefill(loaded.model, self.text.tokens[0, :8].tolist())  # warm up
            documents = [self._document(i, loaded.model, geometry) for i in range(len(self.text))]
            policy = self._policy(documents)
            ends = (policy["head"], policy["tail"])
            needles = [
                self._needle(i, loaded.model, tokenizer, geometry, ends)
                for i in range(len(self.tasks))
            ]
            times = self._speed(loaded.model, geometry, ends)
        importance = source_shares(self.mapper, self.folder.cache("source-document-0000"))
        names = ("source", "target")
        return Measurements(
            self.config,
            self.text,
            documents,
            needles,
            times,
            policy,
            importance,
            {name: identity.to_dict() for name, identity in zip(names, identities, strict=True)},
            notes,
        )

    def _document(self, i: int, model: Any, geometry: ModelGeometry) -> DocumentResult:
        name = f"target-document-{i:04d}"
        stored = self.folder.read(name)
        if stored is None:
            result = self._run_document(i, model, geometry)
            self.folder.write(name, result.to_dict())
            mx.clear_cache()
        else:
            result = DocumentResult.from_dict(stored)
        self.clock.step()
        return result

    def _run_document(self, i: int, model: Any, geometry: ModelGeometry) -> DocumentResult:
        cfg, at = self.config, self.config.prefix - 1
        tokens = self.text.tokens[i].tolist()
        read = self.folder.read(f"source-document-{i:04d}")
        seconds: dict[str, float] = {"source prefill": read["seconds"]}
        found: dict[str, TokenScores] = {arms.ALONE: TokenScores.from_dict(read["scores"])}
        following = tokens[at + 1 :]
        check_tokens(model, tokens)

        start = time.perf_counter()
        cache = prefill(model, tokens[:at])
        seconds["prefill"] = time.perf_counter() - start
        native = arms.copy_of(cache)
        calls: list[AttentionCall] = []
        with capture_attention(model, cache, calls.append):
            logits = model(mx.array([tokens[at:-1]]), cache=cache)[0]
        found[arms.NATIVE], log_p = score_tokens(logits, following)

        def go_on(pairs: arms.Pairs | None, head: int = 0, tail: int = 1) -> TokenScores:
            cache = None
            if pairs is not None:
                try:
                    cache = arms.assemble(geometry, native, pairs, head, cfg.prefix - tail)
                except CacheError:
                    return TokenScores.broken(len(following))
                took = arms.timed_extend(model, cache, tokens[cfg.prefix - tail : at])
                if tail > 1:
                    seconds[f"tail {tail}"] = took
            logits = model(mx.array([tokens[at:-1]]), cache=cache)[0]
            return score_tokens(logits, following, log_p)[0]

        source = self.folder.cache(f"source-document-{i:04d}")
        start = time.perf_counter()
        mapped = arms.map_pairs(source, self.mapper, geometry, self.keep)
        seconds["map"] = time.perf_counter() - start
        finite = all(_ext.all_finite(x) for pair in mapped for x in pair)
        cosines, keys, values = self._compare(geometry, calls, native, mapped)
        calls.clear()
        for head, tail in cfg.ends:
            found[arms.with_ends(head, tail)] = go_on(mapped, head, tail)
        for head in sorted({h for h, _ in cfg.ends if h}) if i < _TIMED_HEADS else ():
            start = time.perf_counter()
            prefill(model, tokens[:head])
            seconds[f"head {head}"] = time.perf_counter() - start
        del mapped
        found[arms.NONE] = go_on(None)
        other = self.folder.cache(f"source-document-{(i + 1) % len(self.text):04d}")
        found[arms.WRONG] = go_on(arms.map_pairs(other, self.mapper, geometry, self.keep))
        del other
        noise = arms.random_mapper(self.mapper, cfg.seed)
        found[arms.RANDOM] = go_on(arms.map_pairs(source, noise, geometry, False))
        if self.raw is not None:
            found[arms.RAW] = go_on(arms.raw_pairs(source, self.raw, geometry))
        return DocumentResult(found, cosines, finite, seconds, keys, values)

    def _compare(
        self,
        geometry: ModelGeometry,
        calls: Sequence[AttentionCall],
        native: arms.Pairs,
        mapped: arms.Pairs,
    ) -> tuple[list[list[float]], list[list[list[float]]], list[list[list[float]]]]:
        """Cosines by layer and head, and the sums that R² is made of."""
        cosines: list[list[float]] = [[] for _ in native]
        for call in calls:
            keys, values = mapped[call.layer]
            found: Any = attention_cosines(call, keys[0], values[0]).tolist()
            cosines[call.layer] = [float(c) for c in found]
        sums: tuple[list[Any], list[Any]] = ([], [])
        for layer, (own, got) in enumerate(zip(native, mapped, strict=True)):
            rope = geometry.layers[layer].rope
            positions = mx.arange(own[0].shape[2])
            for kind in (0, 1):
                pair = [got[kind], own[kind]]
                if kind == 0 and self.mapper.content_space:
                    # The map is of content; rotation mixes what it gets right and wrong.
                    pair = [strip_rope(x, positions, rope) for x in pair]
                one = Variance()
                one.add(*(np.array(x[0].astype(mx.float32)) for x in pair))
                sums[kind].append(one.to_list())
        return cosines if any(cosines) else [], sums[0], sums[1]

    def _policy(self, documents: Sequence[DocumentResult]) -> dict[str, Any]:
        # Weights come from disk for the first document.
        timed = documents[1:] if len(documents) > 1 else documents

        def median(name: str) -> float:
            found = [d.seconds[name] for d in timed if name in d.seconds]
            return statistics.median(found) if found else 0.0

        mean = {
            name: [float(d.arms[name].nll.mean()) for d in documents] for name in documents[0].arms
        }
        losses = {ends: mean[arms.with_ends(*ends)] for ends in self.config.ends}
        seconds = {
            (h, t): (median(f"head {h}") if h else 0.0) + (median(f"tail {t}") if t > 1 else 0.0)
            for h, t in losses
        }
        candidates = search(losses, mean[arms.NATIVE], seconds, median("map"), median("prefill"))
        chosen = choose_policy(candidates)
        return {
            "head": chosen.head,
            "tail": chosen.tail,
            "map_seconds": median("map"),
            "prefill_seconds": median("prefill"),
            "source_prefill_seconds": median("source prefill"),
            "candidates": [c.to_dict() for c in candidates],
        }

    def _needle(
        self, i: int, model: Any, tokenizer: Any, geometry: ModelGeometry, ends: tuple[int, int]
    ) -> NeedleResult:
        name = f"target-task-{i:04d}"
        stored = self.folder.read(name)
        if stored is None:
            stored = asdict(self._run_needle(i, model, tokenizer, geometry, ends))
            self.folder.write(name, stored)
            mx.clear_cache()
        self.clock.step()
        return NeedleResult(**stored)

    def _run_needle(
        self, i: int, model: Any, tokenizer: Any, geometry: ModelGeometry, ends: tuple[int, int]
    ) -> NeedleResult:
        task = self.tasks[i]
        tokens, n = list(task.tokens), len(task.tokens) - 1
        border = round(_MID * task.n_context)
        replies = {arms.ALONE: self.folder.read(f"source-task-{i:04d}")["reply"]}
        cache = prefill(model, tokens[:n])
        native = arms.copy_of(cache)
        replies[arms.NATIVE] = answer(model, tokenizer, cache, tokens[n:])
        mapped = arms.map_pairs(
            self.folder.cache(f"source-task-{i:04d}"), self.mapper, geometry, self.keep
        )
        trials = {
            f"{arms.MAPPED}, switch {SWITCHES[0]}": (0, n),
            f"{arms.MAPPED}, switch {SWITCHES[1]}": (0, border),
        }
        if ends != arms.PLAIN:
            trials[f"{arms.with_ends(*ends)}, switch {SWITCHES[0]}"] = (ends[0], n + 1 - ends[1])
        for name, (head, end) in trials.items():
            try:
                cache = arms.assemble(geometry, native, mapped, head, end)
            except CacheError:
                replies[name] = ""
                continue
            replies[name] = answer(model, tokenizer, cache, tokens[end:])
        return NeedleResult(
            task.n_context,
            task.depth,
            task.at < border,
            {name: is_right(reply, task) for name, reply in replies.items()},
            replies,
            task.answer,
            task.kind,
        )

    def _speed(
        self, model: Any, geometry: ModelGeometry, ends: tuple[int, int]
    ) -> list[dict[str, Any]]:
        rows = []
        capture: SourceLayers | None = None
        for n in sorted(self.config.speed_lengths):
            row = self.folder.read(f"speed-{n:07d}")
            if row is None:
                if capture is None:
                    whole = self.folder.cache("source-document-0000")
                    capture = {s: whole[s] for s in self.mapper.source_layers}
                row = speed.time_length(
                    n,
                    mapper=self.mapper,
                    artifact=self.path,
                    model=model,
                    geometry=geometry,
                    capture=capture,
                    tokens=self.text.tokens[0].tolist(),
                    policy=ends,
                    repeats=self.config.repeats,
                )
                self.folder.write(f"speed-{n:07d}", row)
                mx.clear_cache()
            rows.append(row)
            self.clock.step()
        return rows
