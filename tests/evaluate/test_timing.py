"""The break-even length, on made-up times."""

from __future__ import annotations

from kvgraft.evaluate.timing import break_even


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
