"""Each rule of docs/quality.md, on made-up facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvgraft.evaluate.verdict import NOTE, RULES, Facts, judge
from kvgraft.mapper.quality import DO_NOT_SHIP, SHIP, WARN

GOOD = Facts(
    finite=True,
    documents=16,
    scored_tokens=4096,
    native=2.0,
    mapped=2.05,
    alone=2.2,
    context=(0.5, 0.4, 0.6),
    over_none=(0.45, 0.35, 0.55),
    over_wrong=(0.6, 0.5, 0.7),
    over_random=(5.0, 4.0, 6.0),
    over_alone=(0.15, 0.1, 0.2),
    agreement=0.9,
    agreement_none=0.6,
    cosine=0.95,
    needle=(1.0, 0.9),
    break_even=True,
)


def test_a_good_mapper_ships():
    got = judge(GOOD)
    assert got.level == SHIP and any("beats the source alone" in n for n in got.notes)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"finite": False}, "NaN or infinity"),
        ({"over_none": (-0.01, -0.1, 0.1)}, "no better than no context"),
        ({"over_wrong": (0.0, -0.1, 0.1)}, "no better than another document"),
        ({"over_random": (-1.0, -2.0, 0.0)}, "no better than a random map"),
        ({"over_none": (0.2, 0.1, 0.3)}, "keeps 40 %"),
        ({"agreement": 0.49, "agreement_none": 0.1}, "49 % of the time"),
        ({"agreement": 0.6, "agreement_none": 0.6}, "without context 60 %"),
        ({"context": (0.1, -0.1, 0.3), "over_none": (0.09, 0.01, 0.2)}, "nothing can be concluded"),
        ({"context": (-0.1, -0.2, -0.05)}, "nothing can be concluded"),
    ],
)
def test_what_forbids_shipping(change, words):
    got = judge(replace(GOOD, **change))
    assert got.level == DO_NOT_SHIP
    assert any(words in reason for reason in got.reasons), got.reasons


@pytest.mark.parametrize(
    "change, words",
    [
        ({"over_none": (0.45, -0.1, 0.9)}, "not significantly better than no context"),
        ({"over_wrong": (0.4, -0.1, 0.9)}, "not significantly better than another"),
        ({"over_none": (0.35, 0.3, 0.4)}, "keeps 70 %"),
        ({"agreement": 0.7}, "70 % of the time"),
        ({"cosine": 0.5}, "cosine is 0.50"),
        ({"over_alone": (-0.1, -0.2, 0.0)}, "The source alone predicts this text better"),
        ({"needle": (1.0, 0.4)}, "Exact recall is lost"),
        ({"break_even": False}, "not faster than re-prefill"),
        ({"documents": 7}, "sample is small"),
        ({"scored_tokens": 999}, "sample is small"),
        ({"disjoint": False}, "not proved to be held out"),
    ],
)
def test_what_asks_for_a_warning(change, words):
    got = judge(replace(GOOD, **change))
    assert got.level == WARN
    assert len(got.reasons) == 1 and words in got.reasons[0], got.reasons


def test_switching_down_is_not_blamed_for_the_smaller_model():
    facts = replace(GOOD, alone=1.8, native=2.0, mapped=2.05, over_alone=(-0.25, -0.3, -0.2))
    got = judge(facts)
    assert got.level == SHIP
    assert any("The source alone predicts this text better (by 0.250" in n for n in got.notes)


def test_needles_that_the_target_cannot_find_tell_nothing():
    got = judge(replace(GOOD, needle=(0.2, 0.0)))
    assert got.level == SHIP and any("say little" in n for n in got.notes)
    assert judge(replace(GOOD, needle=None, break_even=None, cosine=None)).level == SHIP


def test_every_reason_is_named():
    bad = replace(GOOD, over_none=(-1.0, -2.0, -0.5), agreement=0.1, documents=2, break_even=False)
    got = judge(bad)
    assert got.level == DO_NOT_SHIP and len(got.reasons) == 5


def test_reasons_come_in_the_order_of_the_table():
    worst = replace(
        GOOD, context=(0.1, -0.1, 0.3), over_none=(-0.1, -0.2, 0.1), over_wrong=(0.1, -0.1, 0.2),
        over_random=(-1.0, -2.0, -0.5), agreement=0.1, cosine=0.1, over_alone=(-0.1, -0.2, 0.0),
        needle=(1.0, 0.0), break_even=False, documents=2, disjoint=False,
    )  # fmt: skip
    got = judge(worst)
    words = [
        "does not significantly help", "no better than no context", "no better than a random map",
        "keeps -100 %", "agrees with", "not significantly better than another", "cosine",
        "The source alone", "Exact recall", "not faster", "sample is small", "fingerprints",
    ]  # fmt: skip
    assert len(got.reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, got.reasons)), got.reasons
    assert got.notes == ()


def test_rules_are_grouped_by_level():
    levels = [rule.level for rule in RULES]
    assert levels == sorted(levels, key=[DO_NOT_SHIP, WARN, NOTE].index)


def test_the_gate():
    ship, warn, no = judge(GOOD), judge(replace(GOOD, documents=2)), judge(replace(GOOD, finite=0))
    assert [v.below(SHIP) for v in (ship, warn, no)] == [False, True, True]
    assert [v.below(WARN) for v in (ship, warn, no)] == [False, False, True]
