"""Moving a generation to another model: decide, release, load, then map or re-prefill."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvgraft import cache as caches
from kvgraft.cache.map import map_prompt, split_prompt
from kvgraft.errors import HandoffError, KvgraftError, MemoryLimitError
from kvgraft.handoff.decision import Decision, confirm, decide, same_tokenizer
from kvgraft.handoff.memory import MemoryLimit, MemoryPlan
from kvgraft.handoff.options import SwitchOptions
from kvgraft.handoff.report import SwitchReport
from kvgraft.handoff.state import GenerationState
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import extend_cache
from kvgraft.models.handle import ModelHandle, ModelSource
from kvgraft.progress import timed

__all__ = ["Handoff", "SwitchOptions", "SwitchReport", "switch"]

_log = logging.getLogger("kvgraft.handoff")


@dataclass(frozen=True)
class Handoff:
    """The result of :func:`switch`.

    Attributes:
        state: The generation, now the target's; continue it with
            :class:`~kvgraft.handoff.Generation`.
        report: What was done, and what it cost.
    """

    state: GenerationState
    report: SwitchReport


def switch(
    state: GenerationState,
    target: ModelSource | ModelHandle,
    mapper: Mapper | str | os.PathLike[str] | None,
    options: SwitchOptions | None = None,
    *,
    own_cache: list[Any] | None = None,
) -> Handoff:
    """Hand a stopped generation over to another model.

    First it is decided whether to map or to re-prefill. Then, in the order of the
    molt protocol: the source's weights are released and only its cache is kept, the
    target is loaded, and layers are mapped one by one, each source layer dropped when
    no later one needs it. So both models are never in memory together, unless
    ``keep_source`` asks for it or something else holds a reference to the source.

    The token that the source computed ahead is not part of the state, so it is
    never emitted; the target always reads the last token of the conversation itself.
    Positions, sampler, random sequence and the history of the logits processors
    carry over. So does the quantization of the source's cache if the target's can be
    quantized the same way; if not, ``report.warnings`` says so.

    Whatever prevents mapping (no mapper, a mapper of another pair, a verdict of "do
    not ship", a cache that can't be read, NaN, memory, an error while mapping) makes
    the target re-prefill the conversation instead. ``report.reason`` and a warning in
    the log ``kvgraft.handoff`` say why.

    Args:
        state: What :meth:`Generation.stop <kvgraft.handoff.Generation.stop>` returned.
            Its tokens stay; its cache list is emptied, unless ``keep_source`` or
            ``keep_cache`` is set.
        target: The model to continue with: a folder, a repository, a function that
            loads it, or a live model.
        mapper: Mapper from the source to the target, or its path; ``None`` to
            re-prefill.
        options: Everything else; default ``SwitchOptions()``.
        own_cache: A cache of the target's own from earlier in the same
            conversation, holding its first tokens. They are neither read nor
            mapped again. Used up.

    Returns:
        The state for the target, and a report.

    Raises:
        MemoryLimitError: If not even a re-prefill fits the memory limit. Before
            anything is released, or, where the size of the target's cache is only
            known once it is loaded, right after that; the state is unchanged.
        HandoffError: If the target can't be loaded. The state is unchanged: the
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
    options = SwitchOptions() if options is None else options
    handle = ModelHandle.of(target)
    decision = decide(state, handle, mapper, options)
    mx.reset_peak_memory()
    decision, seconds = _exchange_models(state, handle, options, decision)
    return _hand_over(state, handle, options, decision, seconds, own_cache or [])


# ------------------------------------------------------------------- from model to model


def _exchange_models(
    state: GenerationState, handle: ModelHandle, options: SwitchOptions, decision: Decision
) -> tuple[Decision, dict[str, float]]:
    """Release the source and load the target.

    Returns:
        The decision now that the target is loaded, and wall time by part.
    """
    seconds: dict[str, float] = {}
    if state.handle.is_loaded and state.handle is not handle and not options.keep_source:
        with timed(seconds, "release"):
            warnings = _release(state.handle, options.memory_limit, decision.plan)
        decision = replace(decision, warnings=(*decision.warnings, *warnings))
    with timed(seconds, "load"):
        _load(handle)
    try:
        return confirm(decision, state, handle, options), seconds
    except MemoryLimitError:
        handle.unload()
        raise


def _hand_over(
    state: GenerationState,
    handle: ModelHandle,
    options: SwitchOptions,
    decision: Decision,
    seconds: dict[str, float],
    own_cache: list[Any],
) -> Handoff:
    """Make the target's state, and the report."""
    tokens = _tokens_for(handle, state)
    if tokens != state.tokens:
        own_cache = []  # of other tokens
    packing, not_packed = _packing(state, handle)
    work = _Work(state, handle, options, tokens, own_cache, packing)
    decision, filled = _fill(work, decision)
    new = GenerationState(
        handle, tokens, filled.cache, state.sampler, state.logits_processors, state.rng_key,
        state.max_kv_size,
    )  # fmt: skip
    mx.clear_cache()
    peak, limit = mx.get_peak_memory(), options.memory_limit
    report = SwitchReport(
        source=state.handle.name,
        target=handle.name,
        n_tokens=len(tokens),
        native_start=filled.native_start,
        mapped=filled.mapped,
        native_end=len(tokens) - filled.native_start - filled.mapped,
        reused=filled.reused,
        reason=decision.reason,
        warnings=(*decision.warnings, *not_packed, *filled.warnings),
        seconds={**seconds, **filled.seconds},
        plan=decision.plan,
        peak_bytes=peak,
        active_bytes=mx.get_active_memory(),
        over_limit=limit is not None and peak > limit.limit,
    )
    return Handoff(new, report)


def _release(source: ModelHandle, limit: MemoryLimit | None, plan: MemoryPlan | None) -> list[str]:
    """Unload the source.

    Returns:
        A warning if it is still in memory.

    Raises:
        MemoryLimitError: If it is, and there is no room for both models.
    """
    if source.unload():
        return []
    text = (
        f"{source.name} is still in memory: something else refers to it. Hand over the only "
        "reference, or give its folder instead of a live model"
    )
    resident = (source.nbytes or 0) + (0 if plan is None else plan.peak)
    if limit is not None and resident > limit.usable:
        raise MemoryLimitError(f"{text}; both models do not fit the limit.")
    return [f"{text}."]


def _load(target: ModelHandle) -> None:
    try:
        target.load()
    except Exception as error:  # a loader of the caller's may raise anything
        target.unload()
        raise HandoffError(
            f"{target.name} could not be loaded ({type(error).__name__}: {error}). The "
            "conversation is unchanged: continue from the same state, or switch to another model."
        ) from error


def _tokens_for(target: ModelHandle, state: GenerationState) -> list[int]:
    """The conversation in the target's ids: another tokenizer needs others."""
    if same_tokenizer(state.handle.identity, target.identity):
        return list(state.tokens)
    text = state.handle.tokenizer.decode(state.tokens)
    return [int(t) for t in target.tokenizer.encode(text, add_special_tokens=False)]


def _packing(
    state: GenerationState, target: ModelHandle
) -> tuple[tuple[int, int] | None, list[str]]:
    """Bits and group size of the target's cache, those of the source's; or why not."""
    packing = caches.quantization(state.cache or ())
    if packing is None:
        return None, []
    try:
        caches.check_quantizable(target.geometry, *packing)
    except KvgraftError as error:
        return None, [f"The cache is no longer quantized: {error}"]
    return packing, []


# --------------------------------------------------------------------- the target's cache


@dataclass(frozen=True)
class _Filled:
    """The target's cache of all tokens but the last, and where its rows come from."""

    cache: list[Any]
    native_start: int = 0
    mapped: int = 0
    reused: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def _fill(work: _Work, decision: Decision) -> tuple[Decision, _Filled]:
    """Act on the decision; if mapping fails, decide to re-prefill and do so."""
    failed: dict[str, float] = {}
    if decision.mapper is not None:
        start = time.perf_counter()
        try:
            return decision, work.map(decision.mapper)
        except KvgraftError as error:
            decision = decision.reprefill(str(error))
        except Exception as error:  # whatever it is, the user's turn must not be lost
            decision = decision.reprefill(f"{type(error).__name__}: {error}")
        # Here, after the error and its frames are gone.
        gc.collect()
        mx.clear_cache()
        failed["map"] = time.perf_counter() - start
    _log.warning(
        "%s -> %s: re-prefill: %s", work.state.handle.name, work.target.name, decision.reason
    )
    filled = work.prefill()
    return decision, replace(filled, seconds={**failed, **filled.seconds})


@dataclass(frozen=True)
class _Work:
    """What both ways to the target's cache need.

    Attributes:
        state: The source's generation.
        target: The target, loaded.
        options: Options of the switch.
        tokens: The conversation in the target's ids.
        own_cache: The target's cache of the first of them, or an empty list, which
            it becomes when it is used.
        packing: Bits and group size of the target's cache; ``None`` for floats.
    """

    state: GenerationState
    target: ModelHandle
    options: SwitchOptions
    tokens: list[int]
    own_cache: list[Any]
    packing: tuple[int, int] | None

    @property
    def last(self) -> int:
        """Tokens that the cache will hold: all but the last."""
        return len(self.tokens) - 1

    def map(self, mapper: Mapper) -> _Filled:
        """Native start, mapped middle, native end."""
        state, options = self.state, self.options
        start, end = mapper.quality.native_ends(options.native_start, options.native_end)
        stop = max(0, min(len(self.tokens) - end, state.n_cached))
        held = min(caches.n_tokens(self.own_cache), stop)
        again = self._prefill_up_to(held, stop)
        warnings = []
        if again > start:
            warnings.append(
                f"Tokens up to {again} were mapped before and are re-prefilled, so that errors "
                "do not add up."
            )
        start = max(start, held, again)
        # Before the target's own cache is touched: a re-prefill could still use it.
        split_prompt(self.last, start, end, available=state.n_cached)
        assert state.cache is not None  # or the decision would be another one
        bits, group_size = self.packing or (None, 64)
        mapped = map_prompt(
            state.cache,
            mapper,
            self.target.load(),
            self.tokens,
            n_tokens=self.last,
            native_start=start,
            native_end=end,
            start_cache=self._take_own(held) if start else None,
            step=options.prefill_step,
            on_start_step=lambda _: self._check("prefilling the native start"),
            target_geometry=self.target.geometry,
            consume=not options.source_cache_stays,
            on_layer=lambda layer: self._check(f"mapping layer {layer}"),
            kv_bits=bits,
            kv_group_size=group_size,
        )
        return _Filled(
            mapped.cache, mapped.native_start, mapped.mapped, mapped.reused, mapped.seconds,
            tuple(warnings),
        )  # fmt: skip

    def prefill(self) -> _Filled:
        """All tokens read by the target, on top of what it has computed itself before."""
        if not self.options.source_cache_stays and self.state.cache:
            self.state.cache.clear()
            mx.clear_cache()
        start = time.perf_counter()
        cache = self._take_own(min(self.last, _native_tokens(self.own_cache)))
        reused = caches.n_tokens(cache)
        unread = self.tokens[reused : self.last]
        extend_cache(self.target.load(), unread, cache, step=self.options.prefill_step)
        if self.packing is not None:
            _quantize(cache, *self.packing)
        seconds = {"prefill": time.perf_counter() - start}
        return _Filled(cache, reused=reused, seconds=seconds)

    def _prefill_up_to(self, held: int, stop: int) -> int:
        """Position up to which rows were mapped too often to be mapped again; 0 if none was."""
        limit = self.options.max_mapped
        if limit is None:
            return 0
        # The first ``held`` tokens are not mapped again: the target has its own rows.
        often = [r for r in self.state.mapped_ranges if r.times >= limit and held < r.stop]
        return max((min(r.stop, stop) for r in often if r.start < stop), default=0)

    def _take_own(self, length: int) -> list[Any]:
        """The target's own cache cut to ``length``; an empty one if that is not possible."""
        own = list(self.own_cache)
        self.own_cache.clear()
        if own and length > 0 and caches.trim(own, length):
            return own
        return list(make_prompt_cache(self.target.load(), self.state.max_kv_size))

    def _check(self, doing: str) -> None:
        if self.options.memory_limit is not None:
            self.options.memory_limit.check(doing)


def _quantize(cache: list[Any], bits: int, group_size: int) -> None:
    """Quantize a cache that the target has just filled, where that is possible."""
    if not all(type(entry).__name__ == "KVCache" for entry in cache):
        return
    for i, entry in enumerate(cache):
        if entry.offset:
            cache[i] = entry.to_quantized(group_size=group_size, bits=bits)
            mx.eval(cache[i].keys, cache[i].values)


def _native_tokens(cache: Sequence[Any]) -> int:
    """Tokens of a cache before the first one that was mapped."""
    ranges = caches.mapped_ranges(cache)
    return ranges[0].start if ranges else caches.n_tokens(cache)
