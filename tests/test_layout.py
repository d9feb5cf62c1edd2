"""The package has one direction: folders import only those below them, and nothing in circles."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvgraft

ROOT = Path(kvgraft.__file__).parent
TESTS = Path(__file__).parent

# From the ground up. A module may import what is in its own folder or below.
FOLDERS = (
    ("errors", "_abi", "_build_info", "_ext", "option_names", "progress"),
    ("files",),
    ("models",),
    ("text",),
    ("ops",),
    ("mapper",),
    ("cache",),
    ("handoff",),
    ("fit",),
    ("evaluate",),
    ("serve",),
    ("demo",),
    ("compat",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {name: floor for floor, names in enumerate(FOLDERS) for name in names}
COMPILED = {"_ext", "_build_info"}
# `kvgraft.__version__`, of which every module may ask.
METADATA = {"__version__"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``kvgraft``."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found["__init__" if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, in functions and for typing too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "kvgraft"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvgraft":
            for alias in node.names:
                if node.module == "kvgraft" and alias.name in METADATA:
                    continue
                name = f"{node.module}.{alias.name}".removeprefix("kvgraft.")
                known = name in modules() or name in COMPILED
                found.add(f"kvgraft.{name}" if known else str(node.module))
    return {"__init__" if m == "kvgraft" else m.removeprefix("kvgraft.") for m in found}


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_what_is_below(name):
    floor = FLOOR[name.split(".")[0]]
    above = {m for m in imports(modules()[name]) if FLOOR[m.split(".")[0]] > floor}
    assert not above, f"{name} imports {sorted(above)}, which stand above it"


def test_nothing_imports_in_circles():
    graph = {name: imports(path) - {name} for name, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_reference_is_a_leaf():
    users = {name for name, path in modules().items() if "ops.reference" in imports(path)}
    assert users <= {"ops.selftest"}


def test_tests_mirror_the_package():
    for folder in (names[0] for names in FOLDERS if (ROOT / names[0]).is_dir()):
        assert list((TESTS / folder).glob("test_*.py")), f"tests/{folder} has no tests"
