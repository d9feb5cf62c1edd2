"""Facts of an artifact, as lines that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["format_tree"]

_WIDTH = 88
_DIGEST = 64
"""Hexadecimal digits of a SHA-256, of which twelve tell one from another."""


def format_tree(facts: Mapping[str, Any], indent: int = 2) -> list[str]:
    """One line per fact, or several where one would be long: mappings indented, lists itemised.

    Numbers are shown with four digits and digests with twelve; the artifact has
    all of them.

    Args:
        facts: JSON-like facts by name.
        indent: Spaces before each line.
    """
    return [line for key, value in facts.items() for line in _lines(key, value, indent)]


def _lines(key: str, value: Any, indent: int) -> Iterator[str]:
    margin = " " * indent
    line = f"{margin}{key}: {_inline(value)}"
    if len(line) <= _WIDTH:
        yield line
    elif isinstance(value, Mapping):
        yield f"{margin}{key}:"
        yield from format_tree(value, indent + 2)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(item, (str, list, tuple, Mapping)) for item in value
    ):
        yield f"{margin}{key}:"
        for item in value:
            yield from _wrapped(f"{margin}  - {_inline(item)}", indent + 4)
    else:
        yield from _wrapped(line, indent + 2)


def _wrapped(line: str, hanging: int) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=" " * hanging, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _inline(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        digest = len(value) == _DIGEST and set(value) <= set("0123456789abcdef")
        return f"{value[:12]}…" if digest else value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(
            f"({_inline(item)})" if isinstance(item, (Mapping, list, tuple)) else _inline(item)
            for item in value
        )
    return str(value)
