"""When to switch, and to which model."""

from __future__ import annotations

import pytest

from kvgraft.handoff.policy import ModelOption, Observation, memory_policy

MODELS = (
    ModelOption("large", 800, 820),
    ModelOption("medium", 500, 900),
    ModelOption("small", 200, 600),
)


def seen(used: int, current: str = "medium", *, calm: int = 0, since: int = 100, **more):
    return Observation(
        used, 1000, current, MODELS, [0.9] + [used / 1000] * calm, since, more.get("switched", True)
    )


@pytest.mark.parametrize(
    ("observation", "want"),
    [
        (seen(700), None),
        (seen(850), "small"),
        (seen(900, "large"), "medium"),
        (seen(900, "small"), None),
        (seen(900, since=3), None),  # cooling down
        (seen(960, since=3), "small"),  # but this is critical
        (seen(900, since=3, switched=False), "small"),  # nothing to cool down from
        (seen(500, calm=23), None),
        (seen(500, calm=24), "large"),
        (seen(560, calm=24), None),
        (seen(300, "small", calm=24), "large"),
        (seen(500, calm=24, since=7), None),
        (seen(500, "large", calm=24), None),
    ],
)
def test_the_usual_policy(observation, want):
    assert memory_policy()(observation) == want


def test_it_goes_to_the_smallest_where_nothing_fits_and_up_only_where_it_fits():
    tight = (
        ModelOption("large", 800, 1001),
        ModelOption("medium", 990, 900),
        ModelOption("small", 900, 900),
    )
    decide = memory_policy()
    assert decide(Observation(990, 1000, "large", tight, [0.99], 50)) == "small"
    assert decide(Observation(100, 1000, "small", tight, [0.1] * 30, 50)) is None


def test_thresholds_must_be_in_order():
    with pytest.raises(ValueError, match="rise"):
        memory_policy(down_at=0.5, up_at=0.6)
