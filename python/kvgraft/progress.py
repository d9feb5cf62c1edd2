"""Progress on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["bar"]


@contextmanager
def bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, as a ``(done, total)`` callback.

    It goes to stderr if that is a terminal, and nothing of it stays behind there.
    """
    with tqdm(desc=title, unit=unit, leave=False, dynamic_ncols=True, disable=None) as shown:

        def update(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield update
