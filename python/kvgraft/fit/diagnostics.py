"""Warnings about a mapper that was just fitted.

A fit always returns a map. Whether the map is useful shows on held-out text; where it
does not, the user is warned before the mapper is used. :mod:`kvgraft.evaluate.verdict`
judges in more detail, after ``kvgraft eval``.
"""

from __future__ import annotations

from kvgraft.mapper.mapper import Mapper
from kvgraft.option_names import named

__all__ = ["LITTLE", "quality_warnings"]

LITTLE = 0.1
"""Mean held-out R² below which a map explains almost nothing of a target; far below that
of any pair in ``docs/fit.md``."""


def quality_warnings(mapper: Mapper) -> list[str]:
    """Why a fitted mapper should not be used as it is; empty if no reason shows.

    * Held-out R² of keys or values below :data:`LITTLE` on average, or below zero in
      some layer, where the target's mean would do better. Not checked for tuned maps,
      which give up R² on purpose.
    * Where a loss was measured to choose k or head mapping: the target predicts no
      better with the mapped cache than without any context.

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
                f"The map explains almost nothing of the target's {kind} on held-out text (mean R2 "
                f"{mean:.3f})."
            )
        elif negative:
            found.append(
                f"On held-out text R2 of the {kind} is negative for layer"
                f"{'s' * (len(negative) > 1)} {', '.join(map(str, negative))}: the map is worse "
                "than predicting the mean."
            )
    loss = _no_better_than_no_context(mapper)
    if loss is not None:
        found.append(loss)
    if found:
        found.append(_advice(mapper))
    return found


def _no_better_than_no_context(mapper: Mapper) -> str | None:
    choice = mapper.fit.get("choice") or {}
    without = choice.get("nll_without_context")
    won = next((t for t in choice.get("trials", ()) if t["chosen"]), None)
    if without is None or won is None or won["nll"] < without:
        return None
    if won["nll"] - won["gap"] >= without:
        return None  # the native cache does not help either: the text decides nothing
    return (
        f"On held-out text the mapped cache (loss {won['nll']:.3f}) does not improve on no context "
        f"at all ({without:.3f})."
    )


def _advice(mapper: Mapper) -> str:
    smaller = []
    if mapper.fit.get("k") != 1 and "choice" not in mapper.fit:
        smaller.append(f"a smaller {named('k')}")
    if mapper.fit.get("plan") == "full" and "choice" not in mapper.fit:
        smaller.append(named("head_mapping", "local"))
    return (
        f"Fit on {' or '.join(['more text', *smaller])}, or re-prefill with the target instead of "
        "mapping."
    )
