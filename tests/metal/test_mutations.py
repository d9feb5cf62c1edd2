"""Faulty kernels are caught, and the tools around them work."""

from __future__ import annotations

import line_coverage
import pytest
from emulator import Library
from emulator.toolchain import INSTALL_LLVM, LLVM
from map_layer import DIRECTORY, FULL, SOURCE
from mutations import MUTATIONS, ROWS, TILE, catch, mutate

# A barrier, an edge, a sign, a rows fault: what a quick run looks at.
QUICK = {
    "barrier before the sums are stored removed",
    "tokens written one too far",
    "sign of the rotation flipped",
    "rows: a lane's sum lost",
}
CHOSEN = [m for m in MUTATIONS if FULL or m.name in QUICK]
assert FULL or len(CHOSEN) == len(QUICK)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_has_a_place_in_the_kernel(mutation):
    assert mutate(SOURCE.read_text(), mutation) != SOURCE.read_text()


@pytest.mark.parametrize("mutation", CHOSEN, ids=lambda m: m.name)
def test_is_caught(mutation):
    library = Library(mutate(SOURCE.read_text(), mutation), DIRECTORY, only=[mutation.kernel])
    assert catch(library, mutation.kernel) is not None


@pytest.mark.parametrize("kernel", [TILE, ROWS])
def test_the_kernel_itself_is_not(kernel):
    assert catch(Library(SOURCE.read_text(), DIRECTORY, only=[kernel]), kernel) is None


@pytest.mark.tools(*LLVM, install=INSTALL_LLVM)
def test_every_line_runs():
    found = line_coverage.counts()
    assert len(found) > 300
    assert [line for line, count in sorted(found.items()) if not count] == []
