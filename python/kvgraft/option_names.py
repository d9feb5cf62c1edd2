"""What a message calls a setting: the argument of a call, or the option of a command.

The same code serves both. Whoever called it from Python knows the argument
``seq_len``; whoever typed a command knows ``--seq-len``. The command line says
which options it has while it runs a command, and messages ask here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["named", "options"]

_NO_OPTIONS: Mapping[str, str] = {}
_options: ContextVar[Mapping[str, str]] = ContextVar("kvgraft_options", default=_NO_OPTIONS)


@contextmanager
def options(names: Mapping[str, str]) -> Iterator[None]:
    """Call settings by their options in the block.

    Args:
        names: Option of each setting, such as ``{"seq_len": "--seq-len"}``. Settings
            that are not in it keep their Python names.
    """
    token = _options.set(names)
    try:
        yield
    finally:
        _options.reset(token)


def named(setting: str, value: object = None) -> str:
    """What the caller knows a setting as, and a value of it as the caller writes it.

    Args:
        setting: Name of the argument, such as ``"plan"``.
        value: ``named("plan", "local")`` is ``plan='local'``, or ``--plan local``;
            ``named("sequential", True)`` is ``sequential=True``, or ``--sequential``.
    """
    option = _options.get().get(setting)
    if option is None:
        return setting if value is None else f"{setting}={value!r}"
    return option if value is None or value is True else f"{option} {value}"
