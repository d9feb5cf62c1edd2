"""What all tests share: single-threaded BLAS, and tests that need tools of the system."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict

import pytest

# The matrices in tests are small: threads would wait for each other longer than
# they work, most of all where the machine has other things to do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

NEEDS = "needs "


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run real models first, and skip tests marked ``tools(…)`` where a program is missing.

    Real models take minutes: begun last, they would keep one core busy alone. Where
    everything is demanded, as in CI, tests without their tools fail instead.
    """
    items.sort(key=lambda item: item.get_closest_marker("real") is None)
    if os.environ.get("KVGRAFT_CI"):
        return
    for item in items:
        for mark in item.iter_markers("tools"):
            missing = [tool for tool in mark.args if shutil.which(tool) is None]
            if missing:
                reason = f"{NEEDS}{', '.join(missing)}; to run it: {mark.kwargs['install']}"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out for want of tools, and the command that brings them."""
    left_out: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(NEEDS):
            left_out[reason].append(report.nodeid)
    for reason, tests in left_out.items():
        what = reason.removeprefix(NEEDS).replace("to run it:", "to run them:")
        terminalreporter.write_line(f"NOT RUN: {len(tests)} tests for want of {what}", yellow=True)
