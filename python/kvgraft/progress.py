"""Progress of long operations: callbacks that report it, a step counter, times, a bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["Notify", "Progress", "StepCounter", "bar", "ignore", "timed"]

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

Notify = Callable[[str], None]
"""Called with a line that a user should see."""


def ignore(line: str) -> None:
    """A :data:`Notify` that shows nothing."""


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Put the wall time of the block into ``seconds[part]``, if the block ends well."""
    started = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - started


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
