"""Hand a running conversation from one model to another.

:func:`graft_cache` maps one prompt cache. :func:`switch` moves a running
generation with all that belongs to it, within a memory limit, and reads the
conversation again where mapping fails or is not worth it. :class:`Session` is a
chat over several models.
"""

from __future__ import annotations

from kvgraft.cache.map import graft_cache
from kvgraft.handoff.generation import Generation
from kvgraft.handoff.memory import MemoryBudget, MemoryPlan, plan_memory
from kvgraft.handoff.policy import Observation, Policy, Rung, memory_policy
from kvgraft.handoff.repair import Repair
from kvgraft.handoff.session import Session, Turn
from kvgraft.handoff.state import GenerationState, Span
from kvgraft.handoff.switch import Handoff, SwitchReport, switch
from kvgraft.models.forward import prefill
from kvgraft.models.handle import ModelSlot

__all__ = [
    "Generation",
    "GenerationState",
    "Handoff",
    "MemoryBudget",
    "MemoryPlan",
    "ModelSlot",
    "Observation",
    "Policy",
    "Repair",
    "Rung",
    "Session",
    "Span",
    "SwitchReport",
    "Turn",
    "graft_cache",
    "memory_policy",
    "plan_memory",
    "prefill",
    "switch",
]
