"""Whether a hand-off maps the cache or re-prefills the conversation.

:func:`decide` answers before anything is released, :func:`confirm` once the target
is loaded. Both return a :class:`Decision`, on which :func:`kvgraft.handoff.switch` acts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import mlx.core as mx

from kvgraft import cache as caches
from kvgraft.errors import CacheError, HandoffError, KvgraftError, MemoryLimitError
from kvgraft.handoff.memory import MemoryPlan, cache_bytes, plan_memory
from kvgraft.handoff.options import SwitchOptions
from kvgraft.handoff.state import GenerationState
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.handle import ModelHandle
from kvgraft.models.loading import ModelIdentity

__all__ = ["Decision", "confirm", "decide", "same_tokenizer"]


@dataclass(frozen=True)
class Decision:
    """Map, or re-prefill and why.

    Attributes:
        mapper: The mapper to map with; ``None`` to re-prefill.
        reason: Why the conversation is re-prefilled; ``None`` if it is mapped.
        warnings: What the user should know.
        plan: Memory of the hand-off.
        target_geometry: Geometry of the target's cache, if it is known.
    """

    mapper: Mapper | None
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    plan: MemoryPlan | None = None
    target_geometry: ModelGeometry | None = None

    def reprefill(self, reason: str) -> Decision:
        """The decision not to map after all."""
        return replace(self, mapper=None, reason=reason)


def decide(
    state: GenerationState,
    target: ModelHandle,
    mapper: Mapper | str | os.PathLike[str] | None,
    options: SwitchOptions,
) -> Decision:
    """Decide what can be decided before the source is released.

    Mapping needs a mapper of this pair whose verdict allows it, a source cache that
    can be read, and memory.

    Args:
        state: The conversation; it is not changed.
        target: The model to continue with; it is not loaded.
        mapper: Mapper from the source to the target, or its path; ``None`` to re-prefill.
        options: Options of the switch.

    Raises:
        MemoryLimitError: If not even a re-prefill fits the memory limit.
    """
    decision = _assess(state, target, mapper, options)
    plan = _plan(state, target, decision, options)
    limit = options.memory_limit
    if limit is not None and decision.mapper is not None and not limit.fits(plan):
        instead = decision.reprefill(
            f"mapping would take {plan.peak / 1e6:.1f} MB, the limit leaves "
            f"{limit.usable / 1e6:.1f} MB"
        )
        decision, plan = instead, _plan(state, target, instead, options)
    if limit is not None and not limit.fits(plan):
        raise MemoryLimitError(
            f"{target.name} does not fit: {plan.peak / 1e6:.1f} MB are needed, the limit "
            f"leaves {limit.usable / 1e6:.1f} MB. Step by step:\n{plan.describe()}"
        )
    return replace(decision, plan=plan)


def confirm(
    decision: Decision, state: GenerationState, target: ModelHandle, options: SwitchOptions
) -> Decision:
    """Decide again, with all that the loaded target shows.

    Args:
        decision: What was decided before.
        state: The conversation.
        target: The model to continue with, loaded.
        options: Options of the switch.

    Raises:
        MemoryLimitError: If the size of the target's cache was not known before, and
            does not fit the memory limit.
    """
    decision = _check_target(decision, state, target)
    limit = options.memory_limit
    if limit is None or decision.target_geometry is not None:
        return decision
    geometry = _known_geometry(target)
    if geometry is None:
        return decision  # a cache of another kind, whose size cannot be counted
    decision = replace(decision, target_geometry=geometry)
    plan = _plan(state, target, decision, options)
    if not limit.fits(plan):
        raise MemoryLimitError(
            f"{target.name} does not fit with a cache of {len(state.tokens)} tokens: "
            f"{plan.peak / 1e6:.1f} MB are needed, the limit leaves {limit.usable / 1e6:.1f} MB. "
            "The conversation is unchanged."
        )
    return replace(decision, plan=plan)


def _assess(
    state: GenerationState,
    target: ModelHandle,
    mapper: Mapper | str | os.PathLike[str] | None,
    options: SwitchOptions,
) -> Decision:
    """The decision without memory."""
    geometry = _known_geometry(target)
    if mapper is None:
        return Decision(None, "there is no mapper for this pair", target_geometry=geometry)
    try:
        opened = mapper if isinstance(mapper, Mapper) else open_mapper(mapper)
        geometry = geometry or opened.target
        warnings = _check_mapper(opened, state, target, geometry, options.force)
    except KvgraftError as error:
        return Decision(None, str(error), target_geometry=geometry)
    return Decision(opened, warnings=tuple(warnings), target_geometry=geometry)


def _check_mapper(
    mapper: Mapper,
    state: GenerationState,
    target: ModelHandle,
    target_geometry: ModelGeometry,
    force: bool,
) -> list[str]:
    """Check a mapper for a conversation.

    Returns:
        What the user should know.

    Raises:
        KvgraftError: If it is not to be used.
    """
    if not state.n_cached:
        raise CacheError("the source has no cache to map")
    for layer in mapper.layers:
        for part in (layer.keys, layer.values):
            part.storage  # noqa: B018 - raises where weights are missing
    quality = mapper.quality
    refusal = quality.refusal()
    if refusal and not force:
        raise HandoffError(f"the mapper should not be used: {refusal}")
    source = state.handle
    differences = check_pair(
        mapper,
        # A bare model has no identity, only a geometry.
        source=source.geometry if source.identity is None and source.is_loaded else None,
        source_model=source.identity,
        target=target_geometry,
        target_model=target.identity,
    )
    caches.read_cache(state.cache or (), mapper.source)
    return [*(quality.warnings() if quality.evaluated else ()), *differences]


def _check_target(decision: Decision, state: GenerationState, target: ModelHandle) -> Decision:
    if not same_tokenizer(state.handle.identity, target.identity):
        return decision.reprefill(
            "the two models have different tokenizers, so the text was encoded again"
        )
    if decision.mapper is None:
        return decision
    try:
        # Not every model can be mapped to: reading its geometry is a part of the check.
        found = check_pair(decision.mapper, target=target.geometry, target_model=target.identity)
    except KvgraftError as error:
        return decision.reprefill(str(error))
    new = [line for line in found if line not in decision.warnings]
    return replace(decision, warnings=(*decision.warnings, *new))


def _plan(
    state: GenerationState, target: ModelHandle, decision: Decision, options: SwitchOptions
) -> MemoryPlan:
    """The memory of a hand-off, step by step."""
    source = state.handle
    weights = (source.nbytes or 0) if source.is_loaded else 0
    cached = cache_bytes(state.cache)
    # Other models, parked caches: what MLX holds beside these two.
    counted = weights + cached + ((target.nbytes or 0) if target.is_loaded else 0)
    limited = options.memory_limit is not None
    plan = plan_memory(
        source_weights=weights,
        source_cache=cached,
        target_weights=target.nbytes or 0,
        n_tokens=len(state.tokens),
        target=decision.target_geometry,
        mapper=decision.mapper,
        keep_source=options.keep_source,
        keep_cache=options.source_cache_stays,
        other=max(0, mx.get_active_memory() - counted) if limited else 0,
    )
    if options.keep_source or not source.is_loaded:
        return plan
    # The first step, the source running, is the present state and needs no room.
    return MemoryPlan(plan.stages[1:])


def _known_geometry(model: ModelHandle) -> ModelGeometry | None:
    try:
        return model.known_geometry
    except KvgraftError:
        return None  # loaded, but its cache cannot be mapped


def same_tokenizer(a: ModelIdentity | None, b: ModelIdentity | None) -> bool:
    """Whether token ids of one model are those of the other, as far as is known."""
    return a is None or b is None or a.tokenizer_sha256 == b.tokenizer_sha256
