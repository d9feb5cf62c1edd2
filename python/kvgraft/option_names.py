"""Names of settings in messages: the argument from Python, the option on the command line.

Most errors are raised far below the command line, in code that serves both callers. Someone
who called ``FitConfig(seq_len=1)`` should read ``seq_len``, someone who typed
``kvgraft fit --seq-len 1`` should read ``--seq-len``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["command_line", "named", "option_name"]

_EXCEPTIONS = {"ridge_lambda": "--lambda", "work": "--resume", "prompt": "--prompt-file"}
_on_command_line: ContextVar[bool] = ContextVar("kvgraft_on_command_line", default=False)


@contextmanager
def command_line() -> Iterator[None]:
    """Name settings by their options in the block."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option_name(setting: str) -> str:
    """The option of a setting: ``--seq-len`` of ``seq_len``."""
    return _EXCEPTIONS.get(setting, "--" + setting.replace("_", "-"))


def named(setting: str, value: object = None) -> str:
    """The name of a setting as the caller knows it, or a value of it as the caller writes it.

    Args:
        setting: Name of the argument, such as ``"k"``.
        value: ``named("k", 4)`` is ``k=4``, or ``--k 4``; ``named("sequential", True)`` is
            ``sequential=True``, or ``--sequential``.
    """
    if not _on_command_line.get():
        return setting if value is None else f"{setting}={value!r}"
    option = option_name(setting)
    return option if value is None or value is True else f"{option} {value}"
