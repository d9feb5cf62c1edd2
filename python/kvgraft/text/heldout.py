"""Held-out text: files in, documents of one length out, shown not to be fitted on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import EvaluationError
from kvgraft.option_names import named
from kvgraft.text import fingerprints as overlap
from kvgraft.text.corpus import read_text
from kvgraft.text.sources import TextSource, documents
from kvgraft.text.special_tokens import special_prefix

__all__ = ["HeldoutText", "read_heldout"]

END_OF_TEXT = "<|endoftext|>"
"""Stands before each document in a plain-text file that holds several."""

_MOST_SEQUENCES = 20_000
"""Calibration text is compared up to this many sequences: forty times the paper's."""


@dataclass(frozen=True)
class HeldoutText:
    """Documents to evaluate on.

    Attributes:
        tokens: ``[n, length]`` int32, one document per row.
        sources: Name and SHA-256 of each file.
        filler: Text of the files, for tasks that hide something in it.
        disjoint: How it is known that none of it was fitted on; ``None`` if it
            is not known.
        notes: Lines that a user should see, such as of repeated documents.
    """

    tokens: NDArray[np.int32]
    sources: tuple[dict[str, Any], ...]
    filler: str
    disjoint: str | None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> str:
        """SHA-256 over the token ids and their layout."""
        h = hashlib.sha256(repr(self.tokens.shape).encode())
        h.update(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        return h.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What goes into results and the artifact, JSON-ready."""
        return {
            "sha256": self.digest,
            "documents": len(self),
            "tokens_each": int(self.tokens.shape[1]),
            "sources": [dict(s) for s in self.sources],
            "disjoint": self.disjoint,
        }


def read_heldout(
    paths: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    fit: Mapping[str, Any],
    *,
    count: int,
    length: int,
    calibration: Sequence[str | os.PathLike[str]] = (),
    chat: bool = False,
) -> HeldoutText:
    """Take documents from files, in turn, and refuse any that was fitted on.

    Each document begins with the tokens that the tokenizer itself puts before a
    text. One stretch is taken from each text that is long enough; where that
    does not give enough, more stretches of the long ones. Of documents with the
    same tokens one is taken: more would make confidence intervals too narrow.

    Args:
        paths: Plain text (with a marker, ``<|endoftext|>``, between documents), JSONL
            or Parquet.
        tokenizer: Of the models.
        fit: ``Mapper.fit``; holds fingerprints of the calibration text.
        count: Documents to take.
        length: Tokens of each.
        calibration: The calibration text itself, for mappers that carry no
            fingerprints of it.
        chat: Render chats with the tokenizer's template.

    Raises:
        TextError: If a file cannot be read.
        EvaluationError: If the text is too short, or overlaps with text that
            the mapper was fitted on.
    """
    if not paths:
        raise EvaluationError("Give held-out text to evaluate on.")
    per_file = []
    sources, filler = [], []
    for given in paths:
        path = Path(given)
        source = TextSource(path)
        pieces = list(documents(source, tokenizer, chat=chat))
        texts = _texts(source, pieces)
        digest = hashlib.sha256("\n\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
        sources.append({"name": path.name, "sha256": digest, "texts": len(texts)})
        _check_not_fitted(path.name, digest, pieces, fit)
        filler += texts
        per_file.append(_stretches(texts, tokenizer, length))
    offered = (row for group in zip_longest(*per_file) for row in group if row is not None)
    rows, repeated = _distinct(offered, count)
    if len(rows) < 2:
        raise EvaluationError(
            f"The text has {len(rows)} documents of {length} tokens; at least 2 are needed (one "
            "serves as the other's wrong document). Give more text, or a shorter "
            f"{named('prefix')}."
        )
    tokens = np.array(rows, dtype=np.int32)
    disjoint = _check_disjoint(tokens, tokenizer, fit, calibration)
    notes = (f"{repeated} repeated documents were dropped.",) if repeated else ()
    return HeldoutText(tokens, tuple(sources), "\n".join(filler), disjoint, notes)


def _distinct(offered: Iterable[list[int]], count: int) -> tuple[list[list[int]], int]:
    """The first ``count`` rows that differ, and how many repetitions came between."""
    rows: dict[tuple[int, ...], list[int]] = {}
    repeated = 0
    for row in offered:
        if len(rows) == count:
            break
        repeated += tuple(row) in rows
        rows.setdefault(tuple(row), row)
    return list(rows.values()), repeated


def _texts(source: TextSource, pieces: Sequence[str]) -> list[str]:
    """The documents of a file; those of plain text are separated by a marker."""
    if source.is_plain:
        return [text for part in "".join(pieces).split(END_OF_TEXT) if (text := part.strip())]
    return [text.strip() for text in pieces]


def _stretches(texts: Sequence[str], tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Stretches of ``length`` tokens: the start of each long text, then what follows it.

    Texts that are too short come last, joined.
    """
    bare = [list(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
    start = special_prefix(tokenizer)
    body = length - len(start)
    long = [ids for ids in bare if len(ids) >= body]
    for at in range(0, max(map(len, long), default=0), body):
        for ids in long:
            if len(ids) >= at + body:
                yield start + ids[at : at + body]
    rest = [i for ids in bare if len(ids) < body for i in ids]
    for at in range(0, len(rest) - body + 1, body):
        yield start + rest[at : at + body]


def _fit_text(fit: Mapping[str, Any]) -> Mapping[str, Any]:
    facts = fit.get("text")
    return facts if isinstance(facts, Mapping) else {}


def _check_not_fitted(
    name: str, digest: str, pieces: Sequence[str], fit: Mapping[str, Any]
) -> None:
    """Refuse a file that the fit names by its digest.

    That digest is of the file as the fit read it, piece by piece, and only as far
    as it read. So it is compared with the digest of each beginning of the file.
    """
    fitted = {
        str(s["sha256"]): str(s.get("name", "a file"))
        for s in _fit_text(fit).get("sources", ())
        if isinstance(s, Mapping) and "sha256" in s and s.get("tokens_read") != 0
    }
    if not fitted:
        return
    found = fitted.get(digest)
    beginning = hashlib.sha256()
    for piece in pieces:
        if found is not None:
            break
        beginning.update(piece.encode("utf-8", "surrogatepass"))
        found = fitted.get(beginning.hexdigest())
    if found is not None:
        raise EvaluationError(
            f"{name} is the text that the mapper was fitted on ({found}, the same SHA-256). "
            "Evaluate on other text."
        )


def _check_disjoint(
    tokens: NDArray[np.int32],
    tokenizer: Any,
    fit: Mapping[str, Any],
    calibration: Sequence[str | os.PathLike[str]],
) -> str | None:
    text = _fit_text(fit)
    known = overlap.decode(text.get("fingerprints"))
    how = "fingerprints in the artifact"
    if known is None and calibration:
        # All of it, not only what the fit says that it used: tuning may have read more.
        seq_len = int(text.get("seq_len", 1024))
        read = read_text(list(calibration), tokenizer, sequences=_MOST_SEQUENCES, seq_len=seq_len)
        known = overlap.fingerprints(read.tokens)
        how = "fingerprints of the calibration text given"
    if known is None:
        return None
    shares = [overlap.shared(row, known) for row in tokens.tolist()]
    wrong = [i for i, share in enumerate(shares) if share > 0]
    if wrong:
        worst = max(wrong, key=lambda i: shares[i])
        begins = tokenizer.decode(tokens[worst][:24].tolist())
        raise EvaluationError(
            f"{len(wrong)} of {len(tokens)} documents share {overlap.RUN} or more tokens in a row "
            f"with the text that the mapper was fitted on (most the one that begins "
            f"{begins!r}: {100 * shares[worst]:.0f} % of its fingerprints). Scores on it would "
            "be too good. Evaluate on other text."
        )
    return (
        f"no document shares {overlap.GUARANTEE} tokens in a row with a calibration sequence "
        f"({how})"
    )
