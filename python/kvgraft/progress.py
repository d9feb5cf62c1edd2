"""Progress of long operations: the callback that reports it, a step counter, a terminal bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["Progress", "StepCounter", "bar"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


class StepCounter:
    """Counts steps over the stages of an operation and reports each.

    Args:
        progress: Called with (steps done, steps in all) after each step, if given.
        total: Steps in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def step(self, n: int = 1) -> None:
        """Count ``n`` steps."""
        self._done += n
        if self._progress is not None:
            self._progress(self._done, self._total)

    def stage(self) -> Progress | None:
        """A callback for one stage; each call of it counts one step. ``None`` if nobody listens."""
        if self._progress is None:
            return None
        return lambda done, total: self.step()


@contextmanager
def bar(title: str, unit: str) -> Iterator[Progress]:
    """A progress bar with the time left, as a ``(done, total)`` callback.

    It is drawn on stderr if that is a terminal, and erased at the end.
    """
    with tqdm(desc=title, unit=unit, leave=False, dynamic_ncols=True, disable=None) as shown:

        def update(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield update
