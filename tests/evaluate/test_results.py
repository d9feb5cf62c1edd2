"""Settings of an evaluation, and their keys in eval.json."""

from __future__ import annotations

import json
from pathlib import Path

from kvgraft.evaluate import EvalConfig

REPORT = Path(__file__).parents[2] / "docs" / "reports" / "demo" / "eval.json"


def test_stored_keys_are_those_of_every_release():
    stored = EvalConfig(native_starts=(0, 2), native_ends=(1, 3)).to_dict()
    assert (stored["heads"], stored["tails"]) == ([0, 2], [1, 3])
    # Written before the fields had their present names.
    assert stored.keys() == json.loads(REPORT.read_text(encoding="utf-8"))["settings"].keys()
