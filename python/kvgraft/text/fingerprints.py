"""Proof that text is held out: fingerprints of the tokens that were fitted on.

A digest of a whole file only detects that the same file is used again. Here the
digests are of short runs of tokens, sampled by winnowing (Schleimer, Wilkerson
and Aiken, SIGMOD 2003): of any :data:`WINDOW` neighbouring runs the one with the
smallest hash is kept. Two texts that share :data:`GUARANTEE` tokens in a row,
anywhere, therefore keep a common hash, and the list stays short: about one number
per hundred tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import EvaluationError
from kvgraft.option_names import named

__all__ = ["GUARANTEE", "RUN", "WINDOW", "decode", "encode", "fingerprints", "shared"]

RUN = 64
"""Tokens in one hashed run. Shorter repetitions, such as a licence's header, don't count."""

WINDOW = 193
"""Neighbouring runs of which one is kept."""

GUARANTEE = RUN + WINDOW - 1
"""Shared tokens in a row that are always found."""

_FORM = "winnow-1"
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def fingerprints(sequences: Iterable[Sequence[int] | NDArray[Any]]) -> NDArray[np.uint32]:
    """Sampled hashes of token sequences, sorted, without repetitions.

    Args:
        sequences: Token ids; no run crosses the end of a sequence. One
            shorter than :data:`RUN` gives one hash of all of it.
    """
    found = [_winnow(np.asarray(s, dtype=np.int64)) for s in sequences if len(s)]
    if not found:
        return np.zeros(0, np.uint32)
    return np.unique(np.concatenate(found))


def shared(tokens: Sequence[int], known: NDArray[np.uint32]) -> float:
    """Share of a document's fingerprints that are among ``known``, 0 to 1."""
    mine = fingerprints([tokens])
    if not len(mine) or not len(known):
        return 0.0
    return float(np.isin(mine, known).mean())


def encode(prints: NDArray[np.uint32]) -> dict[str, Any]:
    """What goes into an artifact, JSON-ready: about 5.3 characters per fingerprint."""
    data = np.ascontiguousarray(prints, dtype="<u4").tobytes()
    return {
        "form": _FORM,
        "run": RUN,
        "window": WINDOW,
        "data": base64.b64encode(data).decode("ascii"),
    }


def decode(stored: Any) -> NDArray[np.uint32] | None:
    """Inverse of :func:`encode`; ``None`` if nothing comparable is stored.

    Raises:
        EvaluationError: If the entry is damaged.
    """
    if not isinstance(stored, dict) or stored.get("form") != _FORM:
        return None
    if (stored.get("run"), stored.get("window")) != (RUN, WINDOW):
        return None
    try:
        data = base64.b64decode(str(stored["data"]), validate=True)
        return np.frombuffer(data, "<u4").astype(np.uint32)
    except (KeyError, ValueError, binascii.Error) as error:
        raise EvaluationError(
            "The mapper's fingerprints of its calibration text are damaged. Get the artifact "
            f"again, or name the calibration text with {named('calibration')}."
        ) from error


def _winnow(tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    hashes = _run_hashes(tokens)
    if len(hashes) <= WINDOW:
        return np.array([hashes.min()], np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(hashes, WINDOW)
    return np.unique(windows.min(axis=1))


def _run_hashes(tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Hash of every run, by differences of one cumulative sum modulo 2^64."""
    n, run = len(tokens), min(RUN, len(tokens))
    with np.errstate(over="ignore"):
        powers = np.multiply.accumulate(np.full(n, _BASE, np.uint64))
        back = np.multiply.accumulate(np.full(n - run + 1, _INVERSE, np.uint64))
        sums = np.concatenate(
            [np.zeros(1, np.uint64), np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)]
        )
        # The sum of the run at i carries a factor BASE^(i+1), whatever its tokens.
        x = (sums[run:] - sums[:-run]) * back
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
    return np.asarray(x >> np.uint64(32), np.uint32)
