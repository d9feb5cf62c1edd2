"""Hand a running conversation from one model to another.

:func:`map_cache` maps one prompt cache. :func:`switch` moves a running
generation with its sampling state, within a memory limit, and re-prefills the
conversation where mapping fails or is not advisable. :class:`Session` is a chat over
several models.
"""

from __future__ import annotations

from kvgraft.cache import MappedRange
from kvgraft.cache.map import map_cache
from kvgraft.handoff.generation import Generation
from kvgraft.handoff.memory import MemoryLimit, MemoryPlan, plan_memory
from kvgraft.handoff.options import SessionOptions, SwitchOptions
from kvgraft.handoff.policy import ModelOption, Observation, Policy, memory_policy
from kvgraft.handoff.repair import Repair
from kvgraft.handoff.report import SwitchReport
from kvgraft.handoff.session import Session, Turn
from kvgraft.handoff.state import GenerationState
from kvgraft.handoff.switch import Handoff, switch
from kvgraft.models.forward import prefill
from kvgraft.models.handle import ModelHandle

__all__ = [
    "Generation",
    "GenerationState",
    "Handoff",
    "MappedRange",
    "MemoryLimit",
    "MemoryPlan",
    "ModelHandle",
    "ModelOption",
    "Observation",
    "Policy",
    "Repair",
    "Session",
    "SessionOptions",
    "SwitchOptions",
    "SwitchReport",
    "Turn",
    "map_cache",
    "memory_policy",
    "plan_memory",
    "prefill",
    "switch",
]
