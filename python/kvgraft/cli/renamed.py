"""Options of release 0.1 under their names of today. To be removed in 0.3."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

__all__ = ["RENAMED", "current_names"]

_FIT = {
    "--plan": "--head-mapping",
    "--selection": "--layer-ranking",
    "--layers": "--source-layers",
    "--weights": "--weight-format",
}
_NATIVE = {"--head": "--native-start", "--tail": "--native-end"}
RENAMED = {
    "demo": {"--model": "--source"},
    "fit": _FIT,
    "plan": _FIT,
    "eval": {"--heads": "--native-starts", "--tails": "--native-ends"},
    "generate": {"--from": "--source", "--to": "--target", **_NATIVE},
    "transfer": _NATIVE,
    "convert": {"--weights": "--weight-format"},
}


def _one_more(text: str) -> str:
    return str(int(text) + 1) if text.isdecimal() else text


_CONVERTED: dict[tuple[str, str], Callable[[str], str]] = {("transfer", "--tail"): _one_more}
"""Values that count otherwise today: the native end includes the token to continue from."""

_SELECT = {"nll": [], "fixed": ["--k", "8", "--head-mapping", "full"]}


def current_names(argv: Sequence[str]) -> list[str]:
    """Replace old options of a command line, with a warning on stderr for each.

    Args:
        argv: Arguments, the command first.
    """
    if not argv or argv[0] not in RENAMED:
        return list(argv)
    command, out = argv[0], [argv[0]]
    rest = iter(argv[1:])
    for arg in rest:
        if arg == "--":
            return [*out, arg, *rest]
        old, equals, value = arg.partition("=")
        if old == "--select" and command in ("fit", "plan"):
            choice = value if equals else next(rest, "")
            chosen = _SELECT.get(choice)
            if chosen is None:  # never a value: the parser refuses the option
                out += [arg] if equals else [arg, choice]
                continue
            # First, so that a --k or --head-mapping that is given counts.
            out[1:1] = chosen
            _warn(old, " ".join(chosen) or "the default")
            continue
        new = RENAMED[command].get(old)
        if new is None:
            out.append(arg)
            continue
        convert = _CONVERTED.get((command, old), str)
        if convert is str:
            _warn(old, new)
            out.append(f"{new}={value}" if equals else new)
            continue
        given = value if equals else next(rest, None)
        if given is None:
            _warn(old, new)
            out.append(new)
            continue
        # With the value, which would mean something else under the new name.
        _warn(f"{old} {given}", f"{new} {convert(given)}")
        out += [f"{new}={convert(given)}"] if equals else [new, convert(given)]
    return out


def _warn(old: str, new: str) -> None:
    print(f"kvgraft: warning: {old} is now {new}; the old name will go in 0.3", file=sys.stderr)
