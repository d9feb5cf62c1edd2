"""What speaks against a mapper that was just fitted.

A fit always gives a map. Whether it is worth anything shows on held-out text,
and where it does not, the user should hear of it before the mapper is used.
:mod:`kvgraft.evaluate.verdict` judges far more closely, after `kvgraft eval`.
"""

from __future__ import annotations

from kvgraft.mapper.mapper import Mapper
from kvgraft.option_names import named

__all__ = ["LITTLE", "doubts"]

LITTLE = 0.1
"""Held-out R² below which a map explains next to nothing of a target; far below that of
any pair in ``docs/fit.md``."""


def doubts(mapper: Mapper) -> list[str]:
    """Why a fitted mapper should not be used as it is; nothing if no reason shows.

    * Held-out R² of keys or values below :data:`LITTLE` on average, or below zero in
      some layer, where the target's mean would do better. Not of tuned maps, which
      give up R² on purpose.
    * Where a loss was measured to choose k or plan: the target predicts no better
      with the mapped cache than without any context.

    Returns:
        One sentence or two for each, and last what to do about it.
    """
    found: list[str] = []
    tuned = (mapper.fit.get("tuning") or {}).get("steps", 0) > 0
    for kind in () if tuned else ("keys", "values"):
        scores = {m.target_layer: m.scores.get(f"r2_{kind}") for m in mapper.layers}
        known = {layer: float(score) for layer, score in scores.items() if score is not None}
        if not known:
            continue
        mean = sum(known.values()) / len(known)
        negative = sorted(layer for layer, score in known.items() if not score >= 0)
        if not mean >= LITTLE:
            found.append(
                f"The map explains next to nothing of the target's {kind} on held-out text (R2 "
                f"{mean:.3f} on average)."
            )
        elif negative:
            found.append(
                f"On held-out text the {kind} of layer{'s' * (len(negative) > 1)} "
                f"{', '.join(map(str, negative))} are met worse than by their mean (R2 below 0)."
            )
    loss = _worthless(mapper)
    if loss is not None:
        found.append(loss)
    if found:
        found.append(_advice(mapper))
    return found


def _worthless(mapper: Mapper) -> str | None:
    choice = mapper.fit.get("choice") or {}
    without = choice.get("nll_without_context")
    won = next((t for t in choice.get("trials", ()) if t["chosen"]), None)
    if without is None or won is None or won["nll"] < without:
        return None
    if won["nll"] - won["gap"] >= without:
        return None  # the target's own cache helps no more: the text does not tell
    return (
        f"With the mapped cache the target's loss on held-out text is {won['nll']:.3f}, without "
        f"any context {without:.3f}: the map is worth nothing to it."
    )


def _advice(mapper: Mapper) -> str:
    smaller = []
    if mapper.fit.get("k") != 1 and "choice" not in mapper.fit:
        smaller.append(f"a smaller {named('k')}")
    if mapper.fit.get("plan") == "full" and "choice" not in mapper.fit:
        smaller.append(named("head_mapping", "local"))
    return (
        f"Fit on {' or '.join(['more text', *smaller])}, or let the target read the text again "
        "instead of mapping (re-prefill)."
    )
