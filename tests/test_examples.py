"""The examples in the docstrings of the public functions run as they stand."""

from __future__ import annotations

import doctest

import pytest

import kvgraft

NAMES = [name for name in kvgraft.__all__ if name != "KvgraftError"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::kvgraft.errors.QualityWarning")
def test_example(name):
    found = doctest.DocTestFinder(recurse=False).find(getattr(kvgraft, name), name, globs={})
    examples = [test for test in found if test.examples]
    assert examples, f"{name} has no example"
    for test in examples:
        said: list[str] = []
        failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
        assert failed == 0, "".join(said)
