"""Native ends, break-even and needles: the rules on made-up numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fit_problems import prose, tokenizer

from kvgraft.errors import EvaluationError
from kvgraft.evaluate.native_ends import choose_native_ends, search
from kvgraft.evaluate.needle import DISTRACTORS, NeedleTask, is_right, make_tasks
from kvgraft.evaluate.timing import break_even

NATIVE = np.linspace(2.0, 2.4, 12)


def chosen(losses, seconds, map_seconds=1.0, prefill_seconds=11.0):
    found = {ends: NATIVE + gap for ends, gap in losses.items()}
    best = choose_native_ends(search(found, NATIVE, seconds, map_seconds, prefill_seconds))
    return best.native_start, best.native_end


def test_tokens_that_pay_more_than_reading_everything_are_taken():
    # Reading all removes 0.2 nats in 10 s. A tail that removes 0.1 in 1 s pays.
    losses = {(0, 1): 0.2, (0, 32): 0.1, (0, 128): 0.09}
    seconds = {(0, 1): 0.0, (0, 32): 1.0, (0, 128): 4.0}
    assert chosen(losses, seconds) == (0, 32)
    # If the longer one took no longer, it would be taken.
    assert chosen(losses, {**seconds, (0, 128): 1.01}) == (0, 128)


def test_tokens_that_pay_less_are_not_read():
    losses, seconds = {(0, 1): 0.2, (4, 1): 0.19}, {(0, 1): 0.0, (4, 1): 1.0}
    assert chosen(losses, seconds) == (0, 1)


def test_a_gain_that_may_be_noise_is_not_bought():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 12)
    noisy = noise - noise.mean() - 0.05
    assert chosen({(0, 1): 0.2, (0, 8): 0.2 + noisy}, {(0, 1): 0.0, (0, 8): 0.0}) == (0, 1)


def test_nothing_is_read_where_mapping_saves_nothing():
    losses, seconds = {(0, 1): 0.2, (0, 8): 0.0}, {(0, 1): 0.0, (0, 8): 0.1}
    assert chosen(losses, seconds, map_seconds=12.0) == (0, 1)
    assert chosen({(0, 1): 0.0, (0, 8): 0.0}, seconds) == (0, 1)


def test_broken_candidates_are_not_chosen():
    losses = {(0, 1): 0.2, (0, 8): float("nan")}
    assert chosen(losses, {(0, 1): 0.0, (0, 8): 0.0}) == (0, 1)
    assert chosen({(0, 1): float("nan")}, {(0, 1): 0.0}) == (0, 1)


def rows(*triples):
    names = ("tokens", "prefill_seconds", "handoff_warm_seconds")
    return [dict(zip(names, triple)) for triple in triples]


def test_break_even_lies_where_the_lines_cross():
    got = break_even(rows((100, 1.0, 2.0), (200, 2.0, 2.0), (300, 3.0, 2.0)), "warm")
    assert got == {"tokens": 200, "is": "about"}
    got = break_even(rows((100, 1.0, 2.0), (300, 4.0, 2.0)), "warm")
    assert got == {"tokens": 167, "is": "about"}
    assert break_even(rows((64, 2.0, 1.0), (128, 4.0, 1.0)), "warm") == {
        "tokens": 64,
        "is": "at most",
    }
    assert break_even(rows((64, 2.0, 3.0), (128, 4.0, 4.0)), "warm") == {"tokens": None}
    assert break_even(rows((64, 2.0, 3.0)), "cold") is None and break_even([], "warm") is None


# ------------------------------------------------------------------ needles

TOKENIZER = tokenizer(bos=True)
FILLER = prose(800)


def tasks(**options):
    options = {"lengths": (512, 700), "depths": (0.0, 0.5, 1.0), "samples": 4, **options}
    return make_tasks(TOKENIZER, FILLER, **{"seed": 0, **options})


def test_tasks_have_the_length_and_the_fact_at_its_depth():
    found = tasks()
    assert len(found) == 2 * 3 * 4
    for task in found:
        assert task.n_context in (512, 700)
        text = TOKENIZER.decode(task.tokens[: task.n_context])
        assert text.startswith("<s>")
        facts = [f for f in re.findall(r"\n([^\n]*)\n", text) if " is " in f and f.endswith(".")]
        assert len(facts) == DISTRACTORS + 1
        right = [f for f in facts if f.endswith(f" is {task.answer}.")]
        assert len(right) == 1, "no look-alike has the same value"
        question = TOKENIZER.decode(task.tokens[task.n_context :])
        assert question.endswith(right[0].removesuffix(f" {task.answer}."))
        assert "\nUser: What is the" in question and task.answer not in question
        # Facts take room of their own; the rest is filler up to the asked depth.
        assert TOKENIZER.decode(task.tokens[task.at :]).startswith("\n" + right[0])
        slack = sum(len(f) + 2 for f in facts)
        assert abs(task.at - task.depth * task.n_context) <= slack


def test_tasks_come_from_the_seed():
    assert tasks() == tasks() and tasks() != tasks(seed=1)
    assert {t.kind for t in tasks()} == {"codes", "colours"}
    assert tasks(lengths=()) == []


def test_a_context_without_room_is_refused():
    with pytest.raises(EvaluationError, match="no room"):
        tasks(lengths=(120,))
    with pytest.raises(EvaluationError, match="tokens; hiding a needle"):
        tasks(lengths=(10**6,))


@pytest.mark.parametrize(
    "reply, right",
    [
        (" 5039.", True),
        ("5039", True),
        ("\n\n5039, of course", True),
        (" as I said, 5039.", True),
        (" 15039.", False),
        (" 50391", False),
        ("", False),
        (" 1111.\n5039", False),
        (" one two three four five six seven eight 5039", False),
    ],
)
def test_only_the_value_itself_in_the_first_words_counts(reply, right):
    assert is_right(reply, NeedleTask((1,), 1, 0, 0.5, "5039", "codes")) is right
