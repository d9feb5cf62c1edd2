"""Facts as lines that fit a terminal."""

from __future__ import annotations

import re

from kvgraft.cli.pretty import format_tree


def test_outline():
    facts = {
        "short": {"a": 1, "b": None},
        "long": {"words": "word " * 30, "number": 0.123456789},
        "items": [{"n": i, "text": "x" * 40} for i in range(3)],
        "numbers": list(range(100, 140)),
        "digest": "0f" * 32,
    }
    lines = format_tree(facts, 0)
    assert lines[0] == "short: a 1, b None"
    assert lines[1] == "long:" and lines[2].startswith("  words: word word")
    assert "  number: 0.1235" in lines
    at = lines.index("items:")
    assert lines[at + 1] == f"  - n 0, text {'x' * 40}"
    assert lines[-1] == "digest: 0f0f0f0f0f0f…"
    numbers = " ".join(lines[at + 4 : -1])
    assert re.findall(r"\d+", numbers) == [str(n) for n in facts["numbers"]]
    assert max(map(len, lines)) <= 88
