"""Moving a generation to another model: release, load, map, read the rest, go on."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvgraft import cache as caches
from kvgraft.cache.map import map_prompt, split_prompt
from kvgraft.errors import GeometryError, HandoffError, KvgraftError, MemoryLimitError
from kvgraft.handoff.memory import MemoryLimit, MemoryPlan, cache_bytes, plan_memory
from kvgraft.handoff.state import GenerationState, Span, cut, join, last_mapped_position, spans_of
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.forward import extend_cache
from kvgraft.models.handle import ModelHandle, ModelSource

__all__ = ["Handoff", "SwitchReport", "switch"]

_log = logging.getLogger("kvgraft.handoff")


@dataclass
class SwitchReport:
    """What one hand-off did and cost.

    Attributes:
        source: Name of the model that left.
        target: Name of the model that goes on.
        n_tokens: Tokens of the conversation.
        head: First tokens, read by the target itself.
        mapped: Tokens after them whose rows were mapped: reading was skipped.
        tail: Last tokens, read by the target on top; at least one, and that one
            when generation goes on.
        reused: Tokens of the head that the target still had in a cache of its own.
        reason: Why nothing was mapped and the target reads everything; ``None``
            if rows were mapped.
        warnings: What else the user should know.
        seconds: Wall time by part: ``release``, ``load``, ``head``, ``map``,
            ``tail``; ``read`` instead of the last three where nothing was mapped.
        plan: Memory as counted before.
        peak_bytes: MLX's peak during the hand-off, as its allocator measured it.
        active_bytes: MLX's arrays in use afterwards.
        over_limit: Whether a limit was given and the measured peak is beyond it.
    """

    source: str
    target: str
    n_tokens: int
    head: int = 0
    mapped: int = 0
    tail: int = 0
    reused: int = 0
    reason: str | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    peak_bytes: int = 0
    active_bytes: int = 0
    over_limit: bool = False

    @property
    def total_seconds(self) -> float:
        """Wall time of the hand-off, loading included."""
        return sum(self.seconds.values())

    def describe(self) -> str:
        """A few lines for people."""
        if self.reason is None:
            how = f"{self.mapped} mapped"
            if self.head:
                how += f" after a native head of {self.head}"
                how += f" ({self.reused} of it kept from before)" if self.reused else ""
            how += f", the last {self.tail} read by the target"
        else:
            how = f"all read again: {self.reason}"
        parts = ", ".join(f"{name} {s:.2f} s" for name, s in self.seconds.items())
        lines = [
            f"{self.source} -> {self.target}: {self.n_tokens} tokens, {how}",
            f"{self.total_seconds:.2f} s ({parts}); peak {self.peak_bytes / 1e6:.0f} MB, "
            f"then {self.active_bytes / 1e6:.0f} MB",
        ]
        if self.over_limit:
            lines.append("The memory limit was exceeded.")
        return "\n".join([*lines, *self.warnings])


@dataclass
class Handoff:
    """The result of :func:`switch`.

    Attributes:
        state: The generation, now the target's; resume it with
            :class:`~kvgraft.handoff.Generation`.
        report: What was done.
    """

    state: GenerationState
    report: SwitchReport


def switch(
    state: GenerationState,
    target: ModelSource | ModelHandle,
    mapper: Mapper | str | os.PathLike[str] | None,
    *,
    head: int | None = None,
    tail: int | None = None,
    memory_limit: MemoryLimit | None = None,
    keep_source: bool = False,
    keep_cache: bool = False,
    force: bool = False,
    max_mapped: int | None = 1,
    own_cache: list[Any] | None = None,
    own_spans: Sequence[Span] | None = None,
    prefill_step: int = 2048,
) -> Handoff:
    """Hand a stopped generation over to another model.

    The order is that of the molt protocol: what the map needs is kept (the
    cache), the source's weights are released, the target is loaded, and layers
    are mapped one by one, each source layer dropped when no later one needs it.
    So both models are never in memory together, unless ``keep_source`` asks for
    it or somebody else holds the source.

    The token that the source computed ahead is not part of the state, so it is
    never emitted; the last token of the conversation is always read by the
    target. Positions, sampler, random sequence and the history of the logits
    processors go on. So does the quantisation of the source's cache, where the target's
    can be quantised so; if not, ``report.warnings`` says it.

    Whatever prevents mapping (no mapper, another pair's, a verdict of "do not
    ship", a cache that can't be read, NaN, memory, any error in the middle) makes
    the target read the tokens instead, and ``report.reason`` says so, as does a
    warning in the log ``kvgraft.handoff``.

    Args:
        state: What :meth:`Generation.stop <kvgraft.handoff.Generation.stop>` gave.
            Used up unless ``keep_source``: its cache is taken apart, its tokens
            remain.
        target: The model to go on with: a folder, a repository, a function that
            loads it, or a live model.
        mapper: Mapper from the source to the target, or its path; ``None`` to
            have the target read everything.
        head: Tokens at the start that the target reads itself, for quality; exact
            by causality. Default: the mapper's measured policy, else 0.
        tail: Tokens at the end that it reads on top of the mapped rows. Default
            likewise, else 1; never less than 1.
        memory_limit: Limit to hold the hand-off to.
        keep_source: Leave the source and its cache as they are.
        keep_cache: Release the source but leave its cache in ``state``, to come
            back to with ``own_cache``.
        force: Map even if the mapper's measured verdict is "do not ship".
        max_mapped: How often a row may be mapped, over all hand-offs. Rows at
            that number, and all before them, are read by the target instead.
            ``None`` for no limit.
        own_cache: A cache of the target's own from earlier in the same
            conversation, holding its first tokens. They are neither read nor
            mapped again; used up.
        own_spans: How the rows of ``own_cache`` came to be, as in the state that
            it was in; default all computed by the target.
        prefill_step: Tokens per forward pass while reading.

    Returns:
        The state for the target, and a report.

    Raises:
        MemoryLimitError: If not even reading again fits the memory_limit. Before
            anything is released, or, where only loading the target tells how large
            its cache is, right after that; the state is whole.
        HandoffError: If the target can't be loaded. The state is whole: the
            source can be loaded again, or another target tried.

    Example:
        >>> from itertools import islice
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> from kvgraft.handoff import Generation
        >>> run = Generation.start(bundled("models/large"), [5, 6, 7, 8, 9, 10])
        >>> said = list(islice(run, 4))  # token ids
        >>> done = kvgraft.switch(run.stop(), bundled("models/small"), bundled("mapper"))
        >>> done.report.mapped, done.report.reason
        (9, None)
        >>> said += islice(Generation(done.state), 4)
    """
    handle = ModelHandle.of(target)
    return _Switch(
        state, handle, mapper, head, tail, memory_limit, keep_source, keep_source or keep_cache,
        force, max_mapped, own_cache, list(own_spans or ()), prefill_step,
    ).run()  # fmt: skip


class _Refused(Exception):
    """Mapping is not to be done; the message is the reason."""


@dataclass
class _Switch:
    state: GenerationState
    handle: ModelHandle
    mapper_source: Mapper | str | os.PathLike[str] | None
    head: int | None
    tail: int | None
    memory_limit: MemoryLimit | None
    keep_source: bool
    keep_cache: bool
    force: bool
    max_mapped: int | None
    own_cache: list[Any] | None
    own_spans: list[Span]
    prefill_step: int

    def run(self) -> Handoff:
        state = self.state
        state.settle()
        if self.own_cache and not self.own_spans:
            self.own_spans = spans_of(self.own_cache)
        self.report = SwitchReport(state.handle.name, self.handle.name, len(state.tokens))
        self.mapper: Mapper | None = None
        self.quantized = caches.quantization(state.cache or ())
        # What the target's cache looks like, where that is known without loading it.
        self.geometry = self.handle.known_geometry
        try:
            self.mapper = self._open_mapper()
            self.geometry = self.geometry or self.mapper.target
            self._check_before()
        except (_Refused, KvgraftError) as error:
            self._fall_back(str(error))
        self._plan()
        mx.reset_peak_memory()
        self._release()
        self._load()
        self._plan_again()
        tokens = self._tokens_for_target()
        cache, spans = self._fill(tokens)
        return self._done(tokens, cache, spans)

    # -------------------------------------------------- before anything is given up

    def _open_mapper(self) -> Mapper:
        if self.mapper_source is None:
            raise _Refused("there is no mapper for this pair")
        if isinstance(self.mapper_source, Mapper):
            return self.mapper_source
        return open_mapper(self.mapper_source)

    def _check_before(self) -> None:
        assert self.mapper is not None
        state, mapper = self.state, self.mapper
        if state.cache is None or state.n_cached == 0:
            raise _Refused("the source has no cache to map")
        for m in mapper.layers:
            for part in (m.keys, m.values):
                part.storage  # noqa: B018 - raises where weights are missing
        quality = mapper.quality
        refusal = quality.refusal()
        if refusal and not self.force:
            raise _Refused(f"the mapper should not be used: {refusal}")
        if quality.evaluated:
            self.report.warnings += quality.warnings()
        identity = state.handle.identity
        self.report.warnings += check_pair(
            mapper,
            # A bare model has no identity, only what it computes.
            source=state.handle.geometry if identity is None and state.handle.is_loaded else None,
            source_model=identity,
            target=self.handle.known_geometry,
            target_model=self.handle.identity,
        )
        caches.read_cache(state.cache, mapper.source)

    def _plan(self) -> None:
        mapped = self._memory_plan(self.mapper)
        self.report.plan = mapped
        if self.memory_limit is None or self.memory_limit.fits(mapped):
            return
        if self.mapper is not None:
            plain = self._memory_plan(None)
            if self.memory_limit.fits(plain):
                self._fall_back(
                    f"mapping would take {mapped.peak / 1e6:.1f} MB, the limit leaves "
                    f"{self.memory_limit.usable / 1e6:.1f} MB"
                )
                self.report.plan = plain
                return
            mapped = plain
        raise MemoryLimitError(
            f"{self.handle.name} does not fit: {mapped.peak / 1e6:.1f} MB are needed, the limit "
            f"leaves {self.memory_limit.usable / 1e6:.1f} MB. Moment by moment:\n"
            f"{mapped.describe()}"
        )

    def _memory_plan(self, mapper: Mapper | None) -> MemoryPlan:
        state = self.state
        weights = (state.handle.nbytes or 0) if state.handle.is_loaded else 0
        held = cache_bytes(state.cache)
        # Other models, parked caches: whatever MLX holds beside these two.
        counted = weights + held + (self.handle.nbytes or 0 if self.handle.is_loaded else 0)
        other = max(0, mx.get_active_memory() - counted) if self.memory_limit is not None else 0
        plan = plan_memory(
            source_weights=weights,
            source_cache=held,
            target_weights=self.handle.nbytes or 0,
            n_tokens=len(state.tokens),
            target=self.geometry,
            mapper=mapper,
            keep_source=self.keep_source,
            keep_cache=self.keep_cache,
            other=other,
        )
        if self.keep_source or not state.handle.is_loaded:
            return plan
        # The source running is how things are now, not something to be planned.
        return MemoryPlan(plan.stages[1:])

    def _plan_again(self) -> None:
        """Count again, if the target had to be loaded to know how large its cache is."""
        if self.memory_limit is None or self.geometry is not None:
            return
        try:
            self.geometry = self.handle.geometry
        except KvgraftError:
            return  # a cache of another kind, whose size nothing tells
        plan = self._memory_plan(None)
        if not self.memory_limit.fits(plan):
            self.handle.unload()
            raise MemoryLimitError(
                f"{self.handle.name} does not fit with a cache of {self.report.n_tokens} tokens: "
                f"{plan.peak / 1e6:.1f} MB are needed, the limit leaves "
                f"{self.memory_limit.usable / 1e6:.1f} MB. The conversation is as it was."
            )
        self.report.plan = plan

    # ----------------------------------------------------------- the point of no return

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.report.seconds[name] = self.report.seconds.get(name, 0.0) + spent

    def _release(self) -> None:
        state = self.state
        if self.keep_source or not state.handle.is_loaded or state.handle is self.handle:
            return
        with self._timed("release"):
            gone = state.handle.unload()
        if gone:
            return
        text = (
            f"{state.handle.name} is still in memory: something else refers to it. Hand over the "
            "only reference, or give its folder instead of a live model"
        )
        if self.memory_limit is not None:
            resident = state.handle.nbytes or 0
            assert self.report.plan is not None
            if self.report.plan.peak + resident > self.memory_limit.usable:
                raise MemoryLimitError(f"{text}; both models do not fit the limit.")
        self.report.warnings.append(f"{text}.")

    def _load(self) -> None:
        try:
            with self._timed("load"):
                self.handle.load()
        except Exception as error:  # a loader of the caller's may raise anything
            self.handle.unload()
            raise HandoffError(
                f"{self.handle.name} could not be loaded ({type(error).__name__}: {error}). The "
                "conversation is as it was: go on from the same state, or switch to another model."
            ) from error
        self.report.target = self.handle.name
        if self.mapper is None:
            return
        try:
            # Probing the target's geometry is part of it: not every model can be mapped to.
            self.report.warnings += [
                line
                for line in check_pair(
                    self.mapper, target=self.handle.geometry, target_model=self.handle.identity
                )
                if line not in self.report.warnings
            ]
        except KvgraftError as error:
            self._fall_back(str(error))

    def _tokens_for_target(self) -> list[int]:
        """The conversation in the target's ids: another tokenizer needs others."""
        state, handle = self.state, self.handle
        a, b = state.handle.identity, handle.identity
        if a is None or b is None or a.tokenizer_sha256 == b.tokenizer_sha256:
            return list(state.tokens)
        text = state.handle.tokenizer.decode(state.tokens)
        ids = [int(t) for t in handle.tokenizer.encode(text, add_special_tokens=False)]
        self._fall_back("the two models have different tokenizers, so the text was encoded again")
        self.own_cache, self.own_spans = None, []
        self.report.n_tokens = len(ids)
        return ids

    # --------------------------------------------------------------- the target's cache

    def _fill(self, tokens: Sequence[int]) -> tuple[list[Any] | None, list[Span]]:
        """The target's cache of all tokens but the last, and how its rows came to be."""
        last = len(tokens) - 1
        failure = None
        if self.mapper is not None:
            try:
                return self._map(self.mapper, tokens, last)
            except Exception as error:  # NaN, memory, a damaged file: none may lose the user's turn
                failure = (
                    str(error)
                    if isinstance(error, (_Refused, KvgraftError))
                    else (f"{type(error).__name__}: {error}")
                )
            # Here, where the error and what its frames held are gone.
            self._fall_back(failure)
            gc.collect()
            mx.clear_cache()
        if not self.keep_cache:
            self.state.cache = None
            mx.clear_cache()
        self.report.head, self.report.mapped = 0, 0
        self.report.tail = len(tokens)
        with self._timed("read"):
            cache = self._own(min(last, _leading(self.own_spans, native_only=True)))
            n = self.report.reused
            extend_cache(self.handle.load(), tokens[n:last], cache, step=self.prefill_step)
            self._quantize(cache)
        return cache, [Span(last, 0)]

    def _packing(self) -> tuple[int, int] | None:
        """Bits and group size of the target's cache: those of the source's, if it can."""
        if self.quantized is not None:
            try:
                caches.check_quantizable(self.handle.geometry, *self.quantized)
            except GeometryError as error:
                self.report.warnings.append(f"The cache is not quantised any more: {error}")
                self.quantized = None
        return self.quantized

    def _quantize(self, cache: list[Any]) -> None:
        """Pack a cache that the target has just filled."""
        packing = self._packing()
        if packing is None or not all(type(entry).__name__ == "KVCache" for entry in cache):
            return
        for i, entry in enumerate(cache):
            if entry.offset:
                cache[i] = entry.to_quantized(group_size=packing[1], bits=packing[0])
                mx.eval(cache[i].keys, cache[i].values)

    def _own(self, length: int) -> list[Any]:
        """The target's own earlier cache, cut to ``length``; an empty one if there is none."""
        own, self.own_cache = self.own_cache, None
        self.report.reused = 0
        if own and length > 0:
            n = caches.n_tokens(own)
            if n <= length or caches.trim(own, length):
                self.report.reused = min(n, length)
                return own
        return list(make_prompt_cache(self.handle.load(), self.state.max_kv_size))

    def _map(
        self, mapper: Mapper, tokens: Sequence[int], last: int
    ) -> tuple[list[Any], list[Span]]:
        state, report = self.state, self.report
        head = mapper.quality.native_start if self.head is None else self.head
        tail = max(1, mapper.quality.native_end if self.tail is None else self.tail)
        stop = min(len(tokens) - tail, state.n_cached)
        held = min(_leading(self.own_spans), stop) if self.own_cache else 0
        if self.max_mapped is not None:
            # Rows that the target still has are not mapped again, so they don't count.
            worn = last_mapped_position(cut(state.spans, held, stop), self.max_mapped)
            if worn and held + worn > head:
                report.warnings.append(
                    f"Tokens up to {held + worn} were mapped before and are read again, so that "
                    "errors do not add up."
                )
                head = held + worn
        split = split_prompt(last, max(head, held), tail, available=state.n_cached)
        own = self._own(held) if split.native_start else None
        assert state.cache is not None
        source = list(state.cache)
        if not self.keep_cache:
            state.cache = None
        bits, group_size = self._packing() or (None, 64)
        started = time.perf_counter()
        try:
            done = map_prompt(
                source,
                mapper,
                self.handle.load(),
                tokens,
                n_tokens=last,
                native_start=split.native_start,
                native_end=tail,
                start_cache=own,
                step=self.prefill_step,
                on_start_step=lambda _: self._check("reading the head"),
                target_geometry=self.handle.geometry,
                consume=not self.keep_cache,
                on_layer=lambda layer: self._check(f"mapping layer {layer}"),
                kv_bits=bits,
                kv_group_size=group_size,
            )
        except Exception:
            report.seconds["map"] = time.perf_counter() - started
            raise
        names = {"start": "head", "map": "map", "end": "tail"}
        report.seconds |= {names[part]: seconds for part, seconds in done.seconds.items()}
        report.head, report.mapped, report.tail = done.native_start, done.mapped, done.native_end
        spans = [
            *cut(self.own_spans, 0, done.reused),
            Span(done.native_start - done.reused, 0),
            *(Span(s.n_tokens, s.mapped + 1) for s in cut(state.spans, split.native_start, stop)),
            Span(last - split.stop, 0),
        ]
        return done.cache, join(spans)

    def _check(self, doing: str) -> None:
        if self.memory_limit is not None:
            self.memory_limit.check(doing)

    def _fall_back(self, reason: str) -> None:
        self.report.reason = reason
        self.mapper = None
        _log.warning(
            "%s -> %s: the conversation is read again: %s",
            self.report.source, self.report.target, reason,
        )  # fmt: skip

    def _done(self, tokens: list[int], cache: list[Any] | None, spans: list[Span]) -> Handoff:
        state, report = self.state, self.report
        new = GenerationState(
            self.handle, tokens, cache or None, state.sampler, state.logits_processors,
            state.rng_key, spans, max_kv_size=state.max_kv_size,
        )  # fmt: skip
        new.settle()
        if not self.keep_cache:
            state.cache, state.spans = None, []
        state.repair = None
        mx.clear_cache()
        report.peak_bytes = mx.get_peak_memory()
        report.active_bytes = mx.get_active_memory()
        report.over_limit = (
            self.memory_limit is not None and report.peak_bytes > self.memory_limit.limit
        )
        return Handoff(new, report)


def _leading(spans: Sequence[Span], *, native_only: bool = False) -> int:
    """Tokens of ``spans``; with ``native_only``, before the first one that was mapped."""
    n = 0
    for span in spans:
        if native_only and span.mapped:
            break
        n += span.n_tokens
    return n
