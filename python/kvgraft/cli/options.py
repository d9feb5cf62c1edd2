"""Options made from the dataclass that holds their defaults, and what commands share."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvgraft.option_names import option_name

__all__ = [
    "DTYPE",
    "FORCE",
    "NATIVE",
    "RESUME",
    "add_fields",
    "add_pair",
    "config_of",
    "describe",
    "memory_size",
]

Config = TypeVar("Config")

RESUME: Mapping[str, Any] = {
    "dest": "work",
    "metavar": "FOLDER",
    "help": "keep the state in this folder; after an interruption, the same command continues "
    "from it",
}
DTYPE: Mapping[str, Any] = {
    "choices": ["float32", "float16", "bfloat16"],
    "help": "run the models in this dtype (default: float32 without a GPU, as stored with one)",
}
FORCE = 'use a mapper whose verdict is "do not ship"'
_ADVICE = " (default: what the mapper's evaluation recommends)"
NATIVE = {
    "native_start": "first tokens that the target reads itself" + _ADVICE,
    "native_end": "last tokens that the target reads itself, with the one to continue from"
    + _ADVICE,
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_fields(parser: Any, defaults: Any, table: Mapping[str, str | Mapping[str, Any]]) -> None:
    """Add an option for each field in a table.

    Args:
        parser: A parser, or a group of one.
        defaults: Instance of the dataclass, from whose fields come types, choices and
            defaults.
        table: The help of each field's option, or arguments of ``add_argument`` that go
            before those made from the field.
    """
    hints = get_type_hints(type(defaults))
    facts = {f.name: f.metadata for f in fields(defaults)}
    for name, entry in table.items():
        given = {"help": entry} if isinstance(entry, str) else dict(entry)
        default = getattr(defaults, name)
        if default is not None and default is not False and default != ():
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            given["help"] += f" (default: {shown})"
        made = _arguments(hints[name], facts[name])
        if "choices" in given:  # choices are their own metavar
            made.pop("metavar", None)
        parser.add_argument(option_name(name), dest=name, default=default, **{**made, **given})


def _arguments(hint: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a field's type and metadata say of its option."""
    if hint is bool:
        return {"action": "store_true"}
    if "choices" in facts:
        return {"choices": facts["choices"]}
    kind = next(t for t in get_args(hint) or (hint,) if t is not NoneType)
    if get_origin(hint) is tuple:
        return {"type": kind, "metavar": _METAVARS[kind], "nargs": "+"}
    if "words" in facts:
        words = facts["words"]
        return {"type": _number_or(kind, words), "metavar": "|".join((_METAVARS[kind], *words))}
    return {"type": kind, "metavar": _METAVARS.get(kind)}


def _number_or(kind: type, words: tuple[str, ...]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text in words:
            return text
        try:
            return kind(text)
        except ValueError:
            allowed = " or ".join(map(repr, words))
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number nor {allowed}"
            ) from None

    return parse


def config_of(kind: type[Config], args: argparse.Namespace, **more: Any) -> Config:
    """The dataclass that options of :func:`add_fields` stand for.

    Args:
        kind: The dataclass.
        args: The parsed options; fields without one keep their defaults.
        **more: Fields that are no options, or are not taken as they were parsed.
    """
    values = {f.name: getattr(args, f.name) for f in fields(kind) if hasattr(args, f.name)}  # type: ignore[arg-type]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**{**values, **more})


def add_pair(parser: Any, *, required: bool = True) -> None:
    """Add ``--source`` and ``--target``."""
    parser.add_argument(
        "--source", required=required, metavar="MODEL", help="source model (folder or repository)"
    )
    parser.add_argument(
        "--target",
        required=required,
        metavar="MODEL",
        help="target model, which receives the mapped cache (folder or repository)",
    )


def describe(parser: argparse.ArgumentParser, text: str, *examples: str) -> None:
    """Set the text before the options, and commands to paste after them."""
    parser.description = textwrap.fill(text, 80, break_on_hyphens=False)
    if examples:
        parser.epilog = "\n".join(["examples:", *examples])


_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES_FROM = 10**6


def memory_size(text: str) -> int:
    """Bytes of ``12G``, ``800M``, ``1.5 GB``, or of a number of GB such as ``12``.

    Numbers of a million and above are bytes. An ``argparse`` type.

    Raises:
        argparse.ArgumentTypeError: If it is none of these, or 0.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = 0
    if found is not None:
        number, unit = float(found[1]), found[2].upper()
        if not unit:
            unit = "G" if number < _BYTES_FROM else ""
        size = int(number * _UNITS.get(unit, 1))
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size above 0; write it as 12G or 800M, or as a number of GB"
        )
    return size
