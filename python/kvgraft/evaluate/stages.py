"""The two stages of an evaluation: what the source runs, and what the target runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from kvgraft import _ext
from kvgraft import cache as caches
from kvgraft.errors import CacheError
from kvgraft.evaluate import arms, timing
from kvgraft.evaluate.checkpoint import EvalCheckpoint, SourceLayers
from kvgraft.evaluate.importance import source_shares
from kvgraft.evaluate.metrics import TokenScores, Variance, attention_cosines, score_tokens
from kvgraft.evaluate.native_ends import choose_native_ends, search
from kvgraft.evaluate.needle import SWITCHES, NeedleTask, answer, is_right
from kvgraft.evaluate.results import DocumentResult, EvalConfig, NeedleResult
from kvgraft.files import atomic
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.attention_hook import AttentionCall, capture_attention
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.handle import ModelHandle
from kvgraft.models.rope import strip_rope
from kvgraft.models.vocabulary import check_tokens
from kvgraft.progress import StepCounter
from kvgraft.text.heldout import HeldoutText

__all__ = ["KEEP_BYTES", "Stages", "TargetResults"]

KEEP_BYTES = 2_000_000_000
"""Mapper weights of at most this many bytes stay in memory between documents."""

_MID = 0.75  # share of the context before a switch "mid-context"
_TIMED_STARTS = 3  # documents at which the prefill of native starts is timed


@dataclass(frozen=True)
class TargetResults:
    """What the target's stage gives; see :class:`kvgraft.evaluate.results.Measurements`."""

    documents: list[DocumentResult]
    needles: list[NeedleResult]
    speed: list[dict[str, Any]]
    policy: dict[str, Any]


class Stages:
    """The stages of one evaluation: the source prefills, then the target runs every arm.

    Args:
        mapper: The mapper.
        path: Where the artifact is on disk, for cold timings; ``None`` for no cold timings.
        text: The held-out documents.
        tasks: The needle tasks.
        config: Settings.
        folder: Where finished units and the source's caches are kept.
        clock: Counts finished units.
    """

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

    def run_source(self, source: ModelHandle) -> None:
        """Prefill all documents and tasks with the source, except those already in the folder."""
        documents = [f"source-document-{i:04d}" for i in range(len(self.text))]
        tasks = [f"source-task-{i:04d}" for i in range(len(self.tasks))]
        missing = [name for name in (*documents, *tasks) if self.folder.read(name) is None]
        self.clock.step(len(documents) + len(tasks) - len(missing))
        if missing:
            with source.loaded():
                self._prefill_missing(source, missing)

    def _prefill_missing(self, source: ModelHandle, missing: Sequence[str]) -> None:
        model, geometry = source.load(), source.geometry
        check_pair(self.mapper, source=geometry)
        atomic.check_space(self.folder.path, self._capture_bytes(geometry, missing))
        prefill(model, self.text.tokens[0, :8].tolist())  # warm up
        for name in missing:
            index = int(name.rsplit("-", 1)[1])
            if "document" in name:
                self._source_document(model, name, self.text.tokens[index].tolist())
            else:
                self._source_task(model, source.tokenizer, name, self.tasks[index])
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

    def _source_document(self, model: Module, name: str, tokens: list[int]) -> None:
        at = self.config.prefix - 1
        check_tokens(model, tokens)
        start = time.perf_counter()
        cache = prefill(model, tokens[:at])
        seconds = time.perf_counter() - start
        self._keep(name, cache)
        logits = model(mx.array([tokens[at:-1]]), cache=cache)[0]
        scores, _ = score_tokens(logits, tokens[at + 1 :])
        self.folder.write(name, {"scores": scores.to_dict(), "seconds": seconds})

    def _source_task(self, model: Module, tokenizer: Any, name: str, task: NeedleTask) -> None:
        cache = prefill(model, task.tokens[:-1])
        self._keep(name, cache)
        reply = answer(model, tokenizer, cache, task.tokens[-1:])
        self.folder.write(name, {"reply": reply})

    # ------------------------------------------------------------- the target

    def run_target(self, target: ModelHandle) -> TargetResults:
        """Run every arm with the target; what is in the folder is not run again."""
        with target.loaded():
            return self._run_arms(target)

    def _run_arms(self, target: ModelHandle) -> TargetResults:
        model, geometry = target.load(), target.geometry
        check_pair(self.mapper, target=geometry)
        prefill(model, self.text.tokens[0, :8].tolist())  # warm up
        documents = [self._document(i, model, geometry) for i in range(len(self.text))]
        policy = self._policy(documents)
        ends = (policy["head"], policy["tail"])
        needles = [
            self._needle(i, model, target.tokenizer, geometry, ends) for i in range(len(self.tasks))
        ]
        return TargetResults(documents, needles, self._speed(model, geometry, ends), policy)

    def source_shares(self) -> dict[str, list[list[float]]]:
        """See :func:`kvgraft.evaluate.importance.source_shares`; on the first document."""
        return source_shares(self.mapper, self.folder.cache("source-document-0000"))

    def _document(self, i: int, model: Module, geometry: ModelGeometry) -> DocumentResult:
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

    def _run_document(self, i: int, model: Module, geometry: ModelGeometry) -> DocumentResult:
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

        def continued(pairs: arms.Pairs | None, head: int = 0, tail: int = 1) -> TokenScores:
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
            found[arms.with_ends(head, tail)] = continued(mapped, head, tail)
        for head in sorted({h for h, _ in cfg.ends if h}) if i < _TIMED_STARTS else ():
            start = time.perf_counter()
            prefill(model, tokens[:head])
            seconds[f"head {head}"] = time.perf_counter() - start
        del mapped
        found[arms.NONE] = continued(None)
        other = self.folder.cache(f"source-document-{(i + 1) % len(self.text):04d}")
        found[arms.WRONG] = continued(arms.map_pairs(other, self.mapper, geometry, self.keep))
        del other
        noise = arms.random_mapper(self.mapper, cfg.seed)
        found[arms.RANDOM] = continued(arms.map_pairs(source, noise, geometry, False))
        if self.raw is not None:
            found[arms.RAW] = continued(arms.raw_pairs(source, self.raw, geometry))
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
                    # The map is of keys without RoPE; rotation would mix their errors.
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
        chosen = choose_native_ends(candidates)
        return {
            "head": chosen.native_start,
            "tail": chosen.native_end,
            "map_seconds": median("map"),
            "prefill_seconds": median("prefill"),
            "source_prefill_seconds": median("source prefill"),
            "candidates": [c.to_dict() for c in candidates],
        }

    def _needle(
        self, i: int, model: Module, tokenizer: Any, geometry: ModelGeometry, ends: tuple[int, int]
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
        self, i: int, model: Module, tokenizer: Any, geometry: ModelGeometry, ends: tuple[int, int]
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
        self, model: Module, geometry: ModelGeometry, ends: tuple[int, int]
    ) -> list[dict[str, Any]]:
        rows = []
        capture: SourceLayers | None = None
        for n in sorted(self.config.speed_lengths):
            row = self.folder.read(f"speed-{n:07d}")
            if row is None:
                if capture is None:
                    whole = self.folder.cache("source-document-0000")
                    capture = {s: whole[s] for s in self.mapper.source_layers}
                row = timing.time_length(
                    n,
                    mapper=self.mapper,
                    artifact=self.path,
                    model=model,
                    geometry=geometry,
                    capture=capture,
                    tokens=self.text.tokens[0].tolist(),
                    native_start=ends[0],
                    native_end=ends[1],
                    repeats=self.config.repeats,
                )
                self.folder.write(f"speed-{n:07d}", row)
                mx.clear_cache()
            rows.append(row)
            self.clock.step()
        return rows
