"""Names and links in the documentation exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/experiments/*.md")])
SOURCES = sorted(ROOT.glob("python/kvgraft/**/*.py"))
_NAME = re.compile(r"(?<![\w./-])kvgraft(?:\.[A-Za-z_]\w*)+")


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute (or field) of one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if part in getattr(found, "__dataclass_fields__", {}):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda p: str(p.relative_to(ROOT)))
def test_names_exist(path):
    names = {m.group() for m in _NAME.finditer(path.read_text(encoding="utf-8"))}
    assert [n for n in sorted(names) if not exists(n)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_examples_import_what_is_there(path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    for node in (n for block in blocks for n in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvgraft"):
            assert [a.name for a in node.names if not exists(f"{node.module}.{a.name}")] == []
