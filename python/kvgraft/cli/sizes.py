"""Sizes of memory on the command line."""

from __future__ import annotations

import argparse
import re

__all__ = ["memory_size"]

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES_FROM = 10**6


def memory_size(text: str) -> int:
    """Bytes of ``12G``, ``800M``, ``1.5 GB``, or of a number of GB such as ``12``.

    A number from a million on is one of bytes. An ``argparse`` type.

    Raises:
        argparse.ArgumentTypeError: If it is none of these, or nothing is left.
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
            f"{text!r} is no size above 0; write it as 12G or 800M, or as a number of GB"
        )
    return size
