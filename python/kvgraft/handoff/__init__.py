"""Hand a running conversation from one model to another.

:func:`map_cache` maps one prompt cache. :func:`switch` moves a running
generation with all that belongs to it, within a memory limit, and reads the
conversation again where mapping fails or is not worth it. :class:`Session` is a
chat over several models.
"""

from __future__ import annotations

from kvgraft.cache.map import map_cache
from kvgraft.handoff.generation import Generation
from kvgraft.handoff.memory import MemoryLimit, MemoryPlan, plan_memory
from kvgraft.handoff.policy import ModelOption, Observation, Policy, memory_policy
from kvgraft.handoff.repair import Repair
from kvgraft.handoff.session import Session, Turn
from kvgraft.handoff.state import GenerationState, Span
from kvgraft.handoff.switch import Handoff, SwitchReport, switch
from kvgraft.models.forward import prefill
from kvgraft.models.handle import ModelHandle

__all__ = [
    "Generation",
    "GenerationState",
    "Handoff",
    "MemoryLimit",
    "MemoryPlan",
    "ModelHandle",
    "Observation",
    "Policy",
    "Repair",
    "ModelOption",
    "Session",
    "Span",
    "SwitchReport",
    "Turn",
    "map_cache",
    "memory_policy",
    "plan_memory",
    "prefill",
    "switch",
]
