"""Needle tasks and their scoring."""

from __future__ import annotations

import re

import pytest
from fit_problems import prose, tokenizer

from kvgraft.errors import EvaluationError
from kvgraft.evaluate.needle import DISTRACTORS, NeedleTask, is_right, make_tasks

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
