"""What the demo concludes from its losses."""

import pytest

from kvgraft.demo.run import conclusions
from kvgraft.evaluate.arms import ALONE, MAPPED, NATIVE, NONE, ArmResult


@pytest.mark.parametrize(
    "mapped, none, alone, words",
    [
        (2.1, 2.5, 2.3, ["keeps 80 %", "approximation"]),
        (2.1, 2.5, 2.0, ["keeps 80 %", "source alone", "approximation"]),
        (2.6, 2.5, 2.7, ["keeps -20 %", "worse than no context", "approximation"]),
        (2.1, 1.9, 2.3, ["does not help", "approximation"]),
    ],
)
def test_conclusions(mapped, none, alone, words):
    losses = {NATIVE: 2.0, MAPPED: mapped, NONE: none, ALONE: alone}
    got = conclusions({name: ArmResult(name, (loss,), 1) for name, loss in losses.items()})
    assert len(got) == len(words)
    assert all(word in line for word, line in zip(words, got)), got
