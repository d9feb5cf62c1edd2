"""What was measured of a mapper, and the warning that follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kvgraft.errors import QualityWarning

__all__ = ["DO_NOT_SHIP", "LEVELS", "SHIP", "WARN", "warn_if_doubtful"]

SHIP, WARN, DO_NOT_SHIP = "ship", "ship with warning", "do not ship"


LEVELS = (DO_NOT_SHIP, WARN, SHIP)
"""From worst to best."""


_warned: set[str] = set()


def warn_if_doubtful(quality: Mapping[str, Any], name: str, key: str) -> None:
    """Warn once per artifact if it was never evaluated, or is not recommended.

    Args:
        quality: ``Mapper.quality``.
        name: The mapper, for the message.
        key: What tells this artifact from others.
    """
    level = quality.get("verdict")
    if level == SHIP:
        return
    if key in _warned:
        return
    _warned.add(key)
    if level not in LEVELS:
        message = (
            f"{name} was never evaluated: nothing is known of what its caches are worth. Run "
            "`kvgraft eval`."
        )
    else:
        reasons = quality.get("reasons")
        why = " ".join(str(r) for r in reasons) if isinstance(reasons, (list, tuple)) else ""
        message = f"{name}: {level}. {why}".rstrip()
    warnings.warn(message, QualityWarning, stacklevel=3)
