"""When to go down to a smaller model, and when up again.

A policy is a function from what was observed to the name of a model, or
``None`` to stay. :func:`memory_policy` makes the usual one; an application that
knows more (battery, heat, the user's wish) passes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Observation", "Policy", "ModelOption", "memory_policy"]


@dataclass(frozen=True)
class ModelOption:
    """One of the models to choose from.

    Attributes:
        name: Its name.
        nbytes: What would be in memory with this model running the conversation
            as it is now: weights and cache.
        peak: The most that would be in memory on the way there from the model
            that runs now.
    """

    name: str
    nbytes: int
    peak: int


@dataclass(frozen=True)
class Observation:
    """What a policy decides from.

    Attributes:
        used: Bytes in use now, everything that counts against the limit.
        limit: Bytes that may be in use.
        current: Name of the model that runs.
        model_options: The models, largest first, the current one included.
        pressures: ``used / limit`` after each recent token, oldest first, this
            one included, since the last switch.
        steps_since_switch: Tokens since the last switch, or since the start.
        has_switched: Whether there was one.
    """

    used: int
    limit: int
    current: str
    model_options: tuple[ModelOption, ...]
    pressures: Sequence[float]
    steps_since_switch: int
    has_switched: bool = False

    @property
    def pressure(self) -> float:
        """``used / limit``."""
        return self.used / self.limit


Policy = Callable[[Observation], "str | None"]
"""Decides from an observation which model to go to; ``None`` to stay."""


def memory_policy(
    *,
    down_at: float = 0.85,
    up_at: float = 0.55,
    hold: int = 24,
    cooldown: int = 8,
    critical: float = 0.95,
) -> Policy:
    """Go down under memory pressure, and up when there is room for long enough.

    Thresholds and order are those of the molt protocol.

    Args:
        down_at: Go to the next smaller model that fits at this part of the limit;
            if none fits, to the smallest.
        up_at: Go to the largest model that would stay below ``down_at``, its
            switch within the limit, when the pressure was at or below this for
            ``hold`` tokens.
        hold: Tokens that the pressure must stay low.
        cooldown: Tokens after a switch in which nothing is done.
        critical: At this part of the limit the cooldown is not waited for.

    Raises:
        ValueError: If the thresholds are not in order.
    """
    if not 0 < up_at < down_at <= critical:
        raise ValueError(
            f"Thresholds must rise: 0 < up_at ({up_at}) < down_at ({down_at}) <= critical "
            f"({critical})."
        )

    def decide(seen: Observation) -> str | None:
        names = [option.name for option in seen.model_options]
        here = names.index(seen.current)
        waiting = seen.has_switched and seen.steps_since_switch < cooldown
        if seen.pressure >= down_at:
            smaller = seen.model_options[here + 1 :]
            if not smaller or (waiting and seen.pressure < critical):
                return None
            fitting = [r for r in smaller if _fits(r, seen.limit, down_at)]
            return (fitting[0] if fitting else smaller[-1]).name
        calm = len(seen.pressures) >= hold and max(seen.pressures[-hold:]) <= up_at
        if waiting or not calm:
            return None
        larger = [r for r in seen.model_options[:here] if _fits(r, seen.limit, down_at)]
        return larger[0].name if larger else None

    return decide


def _fits(option: ModelOption, limit: int, down_at: float) -> bool:
    # Below down_at, or the next token would send it back.
    return option.peak <= limit and option.nbytes < down_at * limit
