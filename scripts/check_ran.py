"""Fail unless a test run really ran: enough tests, all passed, none skipped.

python scripts/check_ran.py junit.xml [at least, default 1]
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def verdict(path: str, least: int) -> str:
    """What is wrong; empty if nothing is."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    tests, skipped, failed = (
        sum(int(s.get(key, 0)) for s in suites for key in keys)
        for keys in (("tests",), ("skipped",), ("failures", "errors"))
    )
    if failed:
        return f"{failed} of {tests} tests failed"
    if skipped:
        return f"{skipped} of {tests} tests were skipped; here every one has to run"
    if tests < least:
        return f"only {tests} tests ran, at least {least} have to"
    return ""


if __name__ == "__main__":
    wrong = verdict(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    sys.exit(wrong or 0)
