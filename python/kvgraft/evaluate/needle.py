"""Needle tasks: one fact among look-alikes, hidden in text, asked for at the end.

A mapped cache can predict text well and still have lost exact words.
Each task states one fact ("The code of Helen's safe is 5039.", or "Helen's kite
is silver.") somewhere in held-out text, and look-alikes (Helen's gate, Walter's
safe) elsewhere, and asks for the first. Guessing among the values is right at
most one time in :data:`DISTRACTORS` + 1, so a score near that is no recall.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx

from kvgraft.errors import EvaluationError
from kvgraft.option_names import named
from kvgraft.text.special_tokens import special_prefix

__all__ = ["DISTRACTORS", "SWITCHES", "NeedleTask", "answer", "is_right", "make_tasks"]

SWITCHES = ("before the answer", "mid-context")
"""Where the target takes over from the source."""

DISTRACTORS = 4
"""Look-alikes per task."""

FIRST_WORDS = 8
"""The answer counts if it is among this many words of the reply."""

_MAX_TOKENS = 24

_PEOPLE = ("Helen", "Walter", "Anna", "Otto", "Ruth", "Simon", "Clara", "Felix", "Nora", "Hugo")


@dataclass(frozen=True)
class _Kind:
    """One kind of fact; ``p`` is a person, ``t`` a thing, ``v`` the value."""

    name: str
    things: tuple[str, ...]
    values: tuple[str, ...]
    fact: str
    question: str


_KINDS = (
    _Kind(
        "codes",
        ("gate", "safe", "locker"),
        tuple(map(str, range(1000, 10000))),
        "The code of {p}'s {t} is {v}.",
        "User: What is the code of {p}'s {t}?\nAssistant: The code of {p}'s {t} is",
    ),
    _Kind(
        "colours",
        ("coat", "boat", "hat"),
        ("red", "blue", "green", "yellow", "black", "white", "brown", "purple", "silver"),
        "{p}'s {t} is {v}.",
        "User: What is the colour of {p}'s {t}?\nAssistant: {p}'s {t} is",
    ),
)


@dataclass(frozen=True)
class NeedleTask:
    """A text with a hidden fact, and the question.

    Attributes:
        tokens: Context and question, up to the answer.
        n_context: Tokens before the question.
        at: Position of the fact's first token.
        depth: Requested position of the fact, 0 (start) to 1 (end).
        answer: What the reply must contain.
        kind: ``"codes"`` or ``"colours"``.
    """

    tokens: tuple[int, ...]
    n_context: int
    at: int
    depth: float
    answer: str
    kind: str


def make_tasks(
    tokenizer: Any,
    filler: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int,
) -> list[NeedleTask]:
    """Tasks for every length and depth, the same for the same arguments.

    Args:
        tokenizer: Of the models.
        filler: Text to hide facts in; should be held out.
        lengths: Tokens of the context.
        depths: Positions of the fact in the context, 0 to 1.
        samples: Tasks per length and depth, codes and colours alternating.
        seed: Of the random choices.

    Raises:
        EvaluationError: If the filler is too short, or a length leaves no room.
    """
    if not lengths:
        return []
    bare = list(tokenizer.encode(filler, add_special_tokens=False))
    start = special_prefix(tokenizer)
    if len(bare) < max(lengths):
        raise EvaluationError(
            f"The text has {len(bare)} tokens; hiding a needle in {max(lengths)} needs as many. "
            f"Give more text or shorter {named('needle_lengths')}."
        )
    return [
        _task(
            tokenizer,
            start,
            bare,
            length,
            depth,
            _KINDS[i % len(_KINDS)],
            Random(f"{seed}/{length}/{depth}/{i}"),
        )
        for length in lengths
        for depth in depths
        for i in range(samples)
    ]


def _task(
    tokenizer: Any,
    start: list[int],
    filler: list[int],
    length: int,
    depth: float,
    kind: _Kind,
    rng: Random,
) -> NeedleTask:
    person, other_person = rng.sample(_PEOPLE, 2)
    thing, other_thing = rng.sample(kind.things, 2)
    owners = [
        (person, other_thing),
        (other_person, thing),
        (other_person, other_thing),
        *((p, thing) for p in rng.sample(_PEOPLE, len(_PEOPLE)) if p not in (person, other_person)),
    ][:DISTRACTORS]
    values = rng.sample(kind.values, DISTRACTORS + 1)

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    def fact(p: str, t: str, v: str) -> list[int]:
        return encode("\n" + kind.fact.format(p=p, t=t, v=v) + "\n")

    needle = fact(person, thing, values[0])
    others = [fact(p, t, v) for (p, t), v in zip(owners, values[1:])]
    question = encode("\n" + kind.question.format(p=person, t=thing))
    room = length - len(start) - len(needle) - sum(map(len, others))
    if room < 8:
        raise EvaluationError(
            f"A context of {length} tokens has no room for a needle and {DISTRACTORS} "
            f"look-alikes. Use longer {named('needle_lengths')}."
        )
    first = rng.randrange(len(filler) - room + 1)
    text = filler[first : first + room]
    # (place in the filler, tokens); the needle after a look-alike at the same place.
    parts = sorted(
        [(rng.randrange(room), 0, o) for o in others] + [(round(depth * (room - 1)), 1, needle)],
        key=lambda part: part[:2],
    )
    tokens = list(start)
    last, at = 0, 0
    for place, is_needle, ids in parts:
        tokens += text[last:place]
        if is_needle:
            at = len(tokens)
        tokens += ids
        last = place
    tokens += text[last:]
    n_context = len(tokens)
    return NeedleTask((*tokens, *question), n_context, at, depth, values[0], kind.name)


def answer(model: Any, tokenizer: Any, cache: list[Any] | None, last: Sequence[int]) -> str:
    """Greedy reply, cut after the words that count.

    Args:
        model: mlx-lm model.
        tokenizer: Of the model.
        cache: Prompt cache of everything before ``last``; advanced.
        last: Tokens to read before replying, at least one.
    """
    stops = {int(i) for i in getattr(tokenizer, "eos_token_ids", ())}
    out: list[int] = []
    unread = list(last)
    text = ""
    for _ in range(_MAX_TOKENS):
        logits = model(mx.array([unread]), cache=cache)[0, -1]
        token = int(mx.argmax(logits).item())  # type: ignore[arg-type]
        if token in stops:
            break
        out.append(token)
        unread = [token]
        text = str(tokenizer.decode(out))
        # A word is over when another begins; a line is over with its end.
        if len(text.split()) > FIRST_WORDS or "\n" in text.strip():
            break
        if re.search(r"\w[.,;!?]", text):  # a clause is over
            break
    return text


def is_right(reply: str, task: NeedleTask) -> bool:
    """Whether the value itself is among the first words of the first line of a reply."""
    lines = reply.strip().splitlines()
    words = lines[0].split()[:FIRST_WORDS] if lines else []
    return any(re.sub(r"\W", "", word) == task.answer for word in words)
