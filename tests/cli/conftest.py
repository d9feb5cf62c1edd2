"""A fitted mapper for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundled_pair import FIT, LITTLE

from kvgraft.cli.main import main


@pytest.fixture(scope="session")
def mapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "mapper"
    assert main([*FIT, *LITTLE, "--out", str(out)]) == 0
    return out
