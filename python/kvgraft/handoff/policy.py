"""When to switch to a smaller model, and when back to a larger one.

A policy is a function from an :class:`Observation` to the name of a model, or
``None`` to stay. :func:`memory_policy` makes one for memory pressure; an application
that knows more (battery, temperature, the user's choice) passes its own.
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
        nbytes: Bytes in memory with this model running the present conversation:
            weights and cache.
        peak: Most bytes in memory during the switch from the current model.
    """

    name: str
    nbytes: int
    peak: int


@dataclass(frozen=True)
class Observation:
    """What a policy bases its decision on.

    Attributes:
        used: Bytes in use, of all that counts against the limit.
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
"""Returns the model to switch to; ``None`` to stay."""


def memory_policy(
    *,
    down_at: float = 0.85,
    up_at: float = 0.55,
    hold: int = 24,
    cooldown: int = 8,
    critical: float = 0.95,
) -> Policy:
    """Switch to a smaller model under memory pressure, and back once there is room again.

    Thresholds and order are those of the molt protocol.

    Args:
        down_at: At this fraction of the limit, switch to the next smaller model that
            fits; if none fits, to the smallest.
        up_at: When the pressure was at or below this for ``hold`` tokens, switch to
            the largest model that stays below ``down_at`` and whose switch stays
            within the limit.
        hold: Tokens for which the pressure must stay low.
        cooldown: Tokens after a switch without another one.
        critical: From this fraction of the limit on, the cooldown does not apply.

    Raises:
        ValueError: If the thresholds are not in order.
    """
    if not 0 < up_at < down_at <= critical:
        raise ValueError(
            f"Thresholds must rise: 0 < up_at ({up_at}) < down_at ({down_at}) <= critical "
            f"({critical})."
        )

    def policy(seen: Observation) -> str | None:
        names = [option.name for option in seen.model_options]
        here = names.index(seen.current)
        cooling = seen.has_switched and seen.steps_since_switch < cooldown
        if seen.pressure >= down_at:
            smaller = seen.model_options[here + 1 :]
            if not smaller or (cooling and seen.pressure < critical):
                return None
            fitting = [option for option in smaller if _fits(option, seen.limit, down_at)]
            return (fitting[0] if fitting else smaller[-1]).name
        calm = len(seen.pressures) >= hold and max(seen.pressures[-hold:]) <= up_at
        if cooling or not calm:
            return None
        larger = seen.model_options[:here]
        fitting = [option for option in larger if _fits(option, seen.limit, down_at)]
        return fitting[0].name if fitting else None

    return policy


def _fits(option: ModelOption, limit: int, down_at: float) -> bool:
    # Below down_at, or the next token would switch back.
    return option.peak <= limit and option.nbytes < down_at * limit
