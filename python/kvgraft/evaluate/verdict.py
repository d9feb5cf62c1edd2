"""Ship, ship with warning, do not ship: the rules of ``docs/quality.md``, in code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvgraft.evaluate.metrics import share_kept
from kvgraft.mapper.quality import DO_NOT_SHIP, LEVELS, SHIP, WARN

__all__ = ["NOTE", "RULES", "Facts", "Rule", "Verdict", "judge"]

AGREEMENT_FLOOR, AGREEMENT_GOOD = 0.5, 0.75
KEPT_FLOOR, KEPT_GOOD = 0.5, 0.8
COSINE_GOOD = 0.8
NEEDLE_NATIVE, NEEDLE_SHARE = 0.5, 0.5
ENOUGH_DOCUMENTS, ENOUGH_TOKENS = 8, 1000

Span = tuple[float, float, float]
"""Mean, lower and upper end of a 95 % interval."""


@dataclass(frozen=True)
class Facts:
    """What the rules are applied to.

    Attributes:
        finite: No NaN and no infinity in any mapped cache or its loss.
        documents: Documents scored.
        scored_tokens: Tokens scored in all.
        native: Loss of the target with its own cache.
        mapped: Loss with the mapped cache.
        alone: Loss of the source alone.
        context: Loss without context minus native: the benefit of the context.
        over_none: Loss without context minus mapped.
        over_wrong: Loss with the wrong document's cache minus mapped.
        over_random: Loss with a random map minus mapped.
        over_alone: Loss of the source alone minus mapped.
        agreement: Share of tokens at which mapped and native predict the same.
        agreement_none: The same without context.
        cosine: Mean attention-output cosine, or ``None``.
        needle: Native and mapped recall, switched right before the answer.
        break_even: Whether the hand-off wins within the measured lengths;
            ``None`` if that was not measured.
        disjoint: Whether the text is proved to be held out.
    """

    finite: bool
    documents: int
    scored_tokens: int
    native: float
    mapped: float
    alone: float
    context: Span
    over_none: Span
    over_wrong: Span
    over_random: Span
    over_alone: Span
    agreement: float
    agreement_none: float
    cosine: float | None = None
    needle: tuple[float, float] | None = None
    break_even: bool | None = None
    disjoint: bool = True


@dataclass(frozen=True)
class Verdict:
    """The verdict and why.

    Attributes:
        level: One of :data:`LEVELS`.
        reasons: Why it is not better; for ``"ship"``, what speaks for it.
        notes: What to know whatever the verdict.
    """

    level: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def below(self, level: str) -> bool:
        """Whether this verdict is worse than ``level``."""
        return LEVELS.index(self.level) < LEVELS.index(level)


@dataclass(frozen=True)
class Rule:
    """One rule of ``docs/quality.md``.

    Attributes:
        level: What it leads to: :data:`DO_NOT_SHIP`, :data:`WARN`, or :data:`NOTE` for
            what is said whatever the verdict.
        applies: Whether it holds.
        message: What is said then.
    """

    level: str
    applies: Callable[[Facts], bool]
    message: Callable[[Facts], str]


NOTE = "note"


def _kept(facts: Facts) -> float | None:
    return share_kept(facts.over_none[0], facts.context[0])


def _keeps(facts: Facts, low: float, high: float) -> bool:
    kept = _kept(facts)
    return kept is not None and low <= kept < high


def _keeps_line(facts: Facts) -> str:
    return f"The mapped cache keeps {100 * (_kept(facts) or 0.0):.0f} % of the context's benefit"


def _disagrees(facts: Facts) -> bool:
    return facts.agreement < AGREEMENT_FLOOR or facts.agreement <= facts.agreement_none


def _agreement_line(facts: Facts) -> str:
    return f"The next token agrees with the native one {100 * facts.agreement:.0f} % of the time"


def _recall_lost(facts: Facts) -> bool:
    if facts.needle is None:
        return False
    native, mapped = facts.needle
    return native >= NEEDLE_NATIVE and mapped < NEEDLE_SHARE * native


def _recall_line(facts: Facts) -> str:
    native, mapped = facts.needle or (0.0, 0.0)
    return (
        f"Exact recall is lost: {100 * mapped:.0f} % of the needles against {100 * native:.0f} % "
        "with the target's own cache. Where exact words matter, re-prefill the text."
    )


def _no_better(name: str, over: Callable[[Facts], Span]) -> Rule:
    return Rule(
        DO_NOT_SHIP,
        lambda f: over(f)[0] <= 0,
        lambda f: f"It is no better than {name} ({-over(f)[0]:+.3f} nats).",
    )


def _not_significant(name: str, over: Callable[[Facts], Span]) -> Rule:
    return Rule(
        WARN,
        lambda f: over(f)[0] > 0 and over(f)[1] <= 0,
        lambda f: (
            f"It is not significantly better than {name} (by {over(f)[0]:.3f} nats, 95 % interval "
            f"{over(f)[1]:.3f} to {over(f)[2]:.3f})."
        ),
    )


_CONTROLS: tuple[tuple[str, Callable[[Facts], Span]], ...] = (
    ("no context", lambda f: f.over_none),
    ("another document's cache", lambda f: f.over_wrong),
    ("a random map", lambda f: f.over_random),
)

RULES = (
    # do not ship, 1: of a broken cache nothing else is said; see judge().
    # 2
    Rule(
        DO_NOT_SHIP,
        lambda f: f.context[1] <= 0,
        lambda f: (
            "The context does not significantly help the target on this text "
            f"({f.context[0]:+.3f} nats), so nothing can be concluded from it. Evaluate on longer "
            "or other text."
        ),
    ),
    # 3
    *(_no_better(name, over) for name, over in _CONTROLS),
    # 4
    Rule(
        DO_NOT_SHIP,
        lambda f: _keeps(f, -math.inf, KEPT_FLOOR),
        lambda f: f"{_keeps_line(f)}; {100 * KEPT_FLOOR:.0f} % is the minimum.",
    ),
    # 5
    Rule(
        DO_NOT_SHIP,
        _disagrees,
        lambda f: (
            f"{_agreement_line(f)} (without context {100 * f.agreement_none:.0f} %); "
            f"{100 * AGREEMENT_FLOOR:.0f} % and more than without context is the minimum."
        ),
    ),
    # ship with warning, 1
    *(_not_significant(name, over) for name, over in _CONTROLS),
    # 2
    Rule(
        WARN,
        lambda f: _keeps(f, KEPT_FLOOR, KEPT_GOOD),
        lambda f: f"{_keeps_line(f)}; {100 * KEPT_GOOD:.0f} % would be good.",
    ),
    # 3
    Rule(
        WARN,
        lambda f: not _disagrees(f) and f.agreement < AGREEMENT_GOOD,
        lambda f: f"{_agreement_line(f)}; {100 * AGREEMENT_GOOD:.0f} % would be good.",
    ),
    # 4
    Rule(
        WARN,
        lambda f: f.cosine is not None and f.cosine < COSINE_GOOD,
        lambda f: (
            f"The mean attention-output cosine is {f.cosine:.2f}; {COSINE_GOOD} would be good."
        ),
    ),
    # 5: switching up is for better text; there a loss defeats the purpose.
    Rule(
        WARN,
        lambda f: f.over_alone[0] <= 0 and f.native < f.alone,
        lambda f: (
            f"The source alone predicts this text better (by {-f.over_alone[0]:.3f} nats), though "
            "the target with its own cache would beat it: stay with the source, or re-prefill."
        ),
    ),
    # 6
    Rule(WARN, _recall_lost, _recall_line),
    # 7
    Rule(
        WARN,
        lambda f: f.break_even is False,
        lambda f: (
            "On the machine of the evaluation the hand-off is not faster than re-prefill at the "
            "longest measured length."
        ),
    ),
    # 8
    Rule(
        WARN,
        lambda f: f.documents < ENOUGH_DOCUMENTS or f.scored_tokens < ENOUGH_TOKENS,
        lambda f: (
            f"The sample is small: {f.documents} documents, {f.scored_tokens} scored tokens; "
            f"{ENOUGH_DOCUMENTS} and {ENOUGH_TOKENS} are the minimum for a better verdict."
        ),
    ),
    # 9
    Rule(
        WARN,
        lambda f: not f.disjoint,
        lambda f: (
            "The artifact has no fingerprints of its calibration text, so the text is not proved "
            "to be held out. Name the calibration text (`kvgraft eval --calibration`)."
        ),
    ),
    # Said whatever the verdict.
    Rule(NOTE, lambda f: _keeps(f, KEPT_GOOD, math.inf), lambda f: f"{_keeps_line(f)}."),
    Rule(
        NOTE,
        lambda f: not _disagrees(f) and f.agreement >= AGREEMENT_GOOD,
        lambda f: f"{_agreement_line(f)}.",
    ),
    Rule(
        NOTE,
        lambda f: f.over_alone[0] > 0,
        lambda f: (
            f"The target with the mapped cache beats the source alone by {f.over_alone[0]:.3f} "
            "nats."
        ),
    ),
    Rule(
        NOTE,
        lambda f: f.over_alone[0] <= 0 and f.native >= f.alone,
        lambda f: (
            f"The source alone predicts this text better (by {-f.over_alone[0]:.3f} nats), and "
            "better than the target with its own cache: switch to save memory or time."
        ),
    ),
    Rule(
        NOTE,
        lambda f: f.needle is not None and f.needle[0] < NEEDLE_NATIVE,
        lambda f: (
            f"The target itself finds only {100 * (f.needle or (0.0,))[0]:.0f} % of the needles, "
            "so they say little about the mapper."
        ),
    ),
)
"""The rules of ``docs/quality.md``, in its order."""


def judge(facts: Facts) -> Verdict:
    """Apply :data:`RULES`. Every one that holds against the mapper becomes a reason."""
    if not facts.finite:
        reason = "The mapped cache, or the loss that it leads to, holds NaN or infinity."
        return Verdict(DO_NOT_SHIP, (reason,), ())
    said: dict[str, list[str]] = {DO_NOT_SHIP: [], WARN: [], NOTE: []}
    for rule in RULES:
        if rule.applies(facts):
            said[rule.level].append(rule.message(facts))
    reasons = (*said[DO_NOT_SHIP], *said[WARN])
    level = next((level for level in (DO_NOT_SHIP, WARN) if said[level]), SHIP)
    return Verdict(level, reasons or ("Every rule is met.",), tuple(said[NOTE]))
