"""Ship, ship with warning, do not ship: the rules of ``docs/quality.md``, in code."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.mapper.quality import DO_NOT_SHIP, LEVELS, SHIP, WARN

__all__ = ["Facts", "Verdict", "judge"]


AGREEMENT_FLOOR, AGREEMENT_GOOD = 0.5, 0.75
KEPT_FLOOR, KEPT_GOOD = 0.5, 0.8
COSINE_GOOD = 0.8
NEEDLE_NATIVE, NEEDLE_SHARE = 0.5, 0.5
ENOUGH_DOCUMENTS, ENOUGH_TOKENS = 8, 1000

Span = tuple[float, float, float]
"""Mean, lower and upper end of a 95 % interval."""


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        finite: No NaN and no infinity in any mapped cache or its loss.
        documents: Documents scored.
        scored_tokens: Tokens scored in all.
        native: Loss of the target with its own cache.
        mapped: Loss with the mapped cache.
        alone: Loss of the source going on by itself.
        context: Loss without context minus native: what the context is worth.
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
        disjoint: Whether the text is proved not to be fitted on.
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
    """The verdict with what led to it.

    Attributes:
        level: One of :data:`LEVELS`.
        reasons: Why it is not better; for ``"ship"``, what speaks for it.
        notes: What a user should know whatever the verdict.
    """

    level: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def below(self, level: str) -> bool:
        """Whether this verdict is worse than ``level``."""
        return LEVELS.index(self.level) < LEVELS.index(level)


def judge(facts: Facts) -> Verdict:
    """Apply the rules. Every one that speaks against the mapper is named."""
    if not facts.finite:
        return Verdict(
            DO_NOT_SHIP,
            ("The mapped cache, or the loss that it leads to, holds NaN or infinity.",),
            (),
        )
    against: list[str] = []
    doubts: list[str] = []
    notes: list[str] = []

    if facts.context[1] <= 0:
        against.append(
            "The context does not surely help the target on this text "
            f"({facts.context[0]:+.3f} nats), so nothing can be concluded from it. Evaluate on "
            "longer or other text."
        )
    for name, span in (
        ("no context", facts.over_none),
        ("another document's cache", facts.over_wrong),
        ("a random map", facts.over_random),
    ):
        if span[0] <= 0:
            against.append(f"It is no better than {name} ({-span[0]:+.3f} nats).")
        elif span[1] <= 0:
            doubts.append(
                f"It is not surely better than {name} (by {span[0]:.3f} nats, 95 % interval "
                f"{span[1]:.3f} to {span[2]:.3f})."
            )
    if facts.context[0] > 0:
        kept = facts.over_none[0] / facts.context[0]
        line = f"The mapped cache keeps {100 * kept:.0f} % of what the context is worth"
        if kept < KEPT_FLOOR:
            against.append(f"{line}; {100 * KEPT_FLOOR:.0f} % is the least.")
        elif kept < KEPT_GOOD:
            doubts.append(f"{line}; {100 * KEPT_GOOD:.0f} % would be good.")
        else:
            notes.append(f"{line}.")
    line = f"The next token agrees with the native one {100 * facts.agreement:.0f} % of the time"
    if facts.agreement < AGREEMENT_FLOOR or facts.agreement <= facts.agreement_none:
        against.append(
            f"{line} (without context {100 * facts.agreement_none:.0f} %); "
            f"{100 * AGREEMENT_FLOOR:.0f} % and more than without context is the least."
        )
    elif facts.agreement < AGREEMENT_GOOD:
        doubts.append(f"{line}; {100 * AGREEMENT_GOOD:.0f} % would be good.")
    else:
        notes.append(f"{line}.")
    if facts.cosine is not None and facts.cosine < COSINE_GOOD:
        doubts.append(
            f"The mean attention-output cosine is {facts.cosine:.2f}; {COSINE_GOOD} would be good."
        )
    _source_alone(facts, doubts, notes)
    if facts.needle is not None:
        native, mapped = facts.needle
        if native >= NEEDLE_NATIVE and mapped < NEEDLE_SHARE * native:
            doubts.append(
                f"Exact recall is lost: {100 * mapped:.0f} % of the needles against "
                f"{100 * native:.0f} % with the target's own cache. Where exact words matter, "
                "read the text again."
            )
        elif native < NEEDLE_NATIVE:
            notes.append(
                f"The target itself finds only {100 * native:.0f} % of the needles, so they tell "
                "little about the mapper."
            )
    if facts.break_even is False:
        doubts.append(
            "On the machine of the evaluation the hand-off is never faster than reading again."
        )
    if facts.documents < ENOUGH_DOCUMENTS or facts.scored_tokens < ENOUGH_TOKENS:
        doubts.append(
            f"The sample is small: {facts.documents} documents, {facts.scored_tokens} scored "
            f"tokens; {ENOUGH_DOCUMENTS} and {ENOUGH_TOKENS} are the least for more."
        )
    if not facts.disjoint:
        doubts.append(
            "The artifact does not tell what it was fitted on, so the text is not proved to be "
            "held out. Name the calibration text (`kvgraft eval --calibration`)."
        )
    if against:
        return Verdict(DO_NOT_SHIP, (*against, *doubts), tuple(notes))
    if doubts:
        return Verdict(WARN, tuple(doubts), tuple(notes))
    return Verdict(SHIP, ("Every rule is met.",), tuple(notes))


def _source_alone(facts: Facts, doubts: list[str], notes: list[str]) -> None:
    difference = facts.over_alone[0]
    if difference > 0:
        notes.append(
            f"The target with the mapped cache beats the source alone by {difference:.3f} nats."
        )
    elif facts.native < facts.alone:
        # Switching up is for better text; there a loss takes the purpose away.
        doubts.append(
            f"The source alone predicts this text better (by {-difference:.3f} nats), though the "
            "target with its own cache would beat it: stay with the source, or read again."
        )
    else:
        notes.append(
            f"The source alone predicts this text better (by {-difference:.3f} nats), as it does "
            "than the target with its own cache: switch to save memory or time."
        )
