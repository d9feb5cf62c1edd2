"""How many tokens at the start and the end the target should read itself.

In the plane of time and loss, mapping everything and re-prefilling everything are two
points. We recommend the native start and end whose loss lies farthest below the straight
line between the two. If no gain is significant, we recommend none but the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraft.evaluate.arms import PLAIN
from kvgraft.evaluate.metrics import Interval, bootstrap

__all__ = ["Candidate", "choose_native_ends", "search"]


@dataclass(frozen=True)
class Candidate:
    """One pair of lengths, as measured.

    Attributes:
        native_start: Native tokens at the start.
        native_end: Native tokens at the end, the last one (which always is) included.
        nll: Mean loss, nats per token.
        gap: Loss minus that of the target's own cache.
        gain: Loss of mapping alone minus this one's.
        seconds: Time that the native tokens take.
        value: Gain beyond that of the straight line for the same time, nats per token;
            ``None`` where the gain is not significant.
    """

    native_start: int
    native_end: int
    nll: float
    gap: Interval
    gain: Interval
    seconds: float
    value: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "head": self.native_start,
            "tail": self.native_end,
            "nll": round(self.nll, 5),
            "gap": self.gap.to_list(),
            "gain": self.gain.to_list(),
            "seconds": round(self.seconds, 5),
            "value": None if self.value is None else round(self.value, 5),
        }


def search(
    losses: Mapping[tuple[int, int], Sequence[float]],
    native: Sequence[float],
    seconds: Mapping[tuple[int, int], float],
    map_seconds: float,
    prefill_seconds: float,
) -> list[Candidate]:
    """Compare the measured candidates.

    Args:
        losses: Loss per document, by ``(native start, native end)``; ``(0, 1)`` is required.
        native: Loss per document of the target's own cache.
        seconds: Time that the native tokens take, by the same.
        map_seconds: Time to map the prefix.
        prefill_seconds: Time of the target's prefill of the prefix.
    """
    plain = np.asarray(losses[PLAIN], dtype=np.float64)
    own = np.asarray(native, dtype=np.float64)
    saved = prefill_seconds - map_seconds
    whole = max(float((plain - own).mean()), 0.0)
    out = []
    for ends, found in sorted(losses.items()):
        x = np.asarray(found, dtype=np.float64)
        gain = bootstrap(plain - x)
        took = seconds[ends]
        value: float | None = None
        if ends == PLAIN:
            value = 0.0
        elif gain.low > 0 and saved > 0:
            value = gain.mean - whole * took / saved
        out.append(Candidate(*ends, float(x.mean()), bootstrap(x - own), gain, took, value))
    return out


def choose_native_ends(candidates: Sequence[Candidate]) -> Candidate:
    """The best candidate; of equal ones that with the fewest native tokens."""
    usable = [c for c in candidates if c.value is not None and np.isfinite(c.value)]
    if not usable:
        return min(candidates, key=lambda c: (c.native_start, c.native_end))
    return min(usable, key=lambda c: (-(c.value or 0.0), c.seconds, c.native_start + c.native_end))
