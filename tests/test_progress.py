"""Steps that are counted over the stages of an operation."""

from __future__ import annotations

from kvgraft.progress import StepCounter


def test_steps_of_all_stages_are_counted():
    reported = []
    counter = StepCounter(lambda done, total: reported.append((done, total)), 6)
    counter.step()
    counter.step(2)
    stage = counter.stage()
    assert stage is not None
    for done in (1, 2, 3):
        stage(done, 3)
    assert reported == [(1, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


def test_nobody_has_to_listen():
    counter = StepCounter(None, 2)
    counter.step(2)
    assert counter.stage() is None
