import os
from pathlib import Path

import pytest


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "metal_harness: runs the Metal kernels on the CPU; needs clang 19"
    )


def pytest_collection_modifyitems(items):
    import emulator

    missing = emulator.missing_tools()
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.metal_harness)
        # Where the harness is demanded, as in CI, its tests fail without tools.
        if missing and not os.environ.get("KVGRAFT_CI"):
            item.add_marker(
                pytest.mark.skip(reason=f"the Metal harness needs {', '.join(missing)}")
            )
