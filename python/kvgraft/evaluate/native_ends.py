"""How many tokens at the start and the end the target should read itself.

Reading everything again is one end of a line: it removes the whole gap and takes
the whole time. Mapping is the other end. Native tokens are worth their time where
they remove the gap faster than going along that line does, so the best pair
(head, tail) is the one farthest below it. On a tie with noise, nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraft.evaluate.arms import PLAIN
from kvgraft.evaluate.metrics import Interval, bootstrap

__all__ = ["Candidate", "choose_policy", "search"]


@dataclass(frozen=True)
class Candidate:
    """One pair of lengths, as measured.

    Attributes:
        head: Native tokens at the start.
        tail: Native tokens at the end, with the last one, which always is.
        nll: Mean loss, nats per token.
        gap: Loss minus that of the target's own cache.
        gain: Loss of mapping alone minus this one's.
        seconds: Time that the native tokens take.
        value: Gain beyond what reading everything again gives for that time;
            ``None`` where the gain may be noise.
    """

    head: int
    tail: int
    nll: float
    gap: Interval
    gain: Interval
    seconds: float
    value: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "head": self.head,
            "tail": self.tail,
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
    """Compare the candidates that were measured.

    Args:
        losses: Loss per document, by ``(head, tail)``; ``(0, 1)`` must be there.
        native: Loss per document of the target's own cache.
        seconds: Time that the native tokens take, by ``(head, tail)``.
        map_seconds: Time to map the prefix.
        prefill_seconds: Time in which the target reads the prefix itself.
    """
    plain = np.asarray(losses[PLAIN], dtype=np.float64)
    own = np.asarray(native, dtype=np.float64)
    saved = prefill_seconds - map_seconds
    whole = max(float((plain - own).mean()), 0.0)
    out = []
    for (head, tail), found in sorted(losses.items()):
        x = np.asarray(found, dtype=np.float64)
        gain = bootstrap(plain - x)
        took = seconds[head, tail]
        value: float | None = None
        if (head, tail) == PLAIN:
            value = 0.0
        elif gain.low > 0 and saved > 0:
            value = gain.mean - whole * took / saved
        out.append(Candidate(head, tail, float(x.mean()), bootstrap(x - own), gain, took, value))
    return out


def choose_policy(candidates: Sequence[Candidate]) -> Candidate:
    """The best candidate; of equal ones the one that reads least."""
    usable = [c for c in candidates if c.value is not None and np.isfinite(c.value)]
    if not usable:
        return min(candidates, key=lambda c: (c.head, c.tail))
    return min(usable, key=lambda c: (-(c.value or 0.0), c.seconds, c.head + c.tail))
