"""Calibration text: files in, equal-length token sequences out.

The paper fits on 500 sequences of 1,024 tokens (Heo et al., arXiv:2608.03893,
section 3.1). Its authors found only the text's domain to affect quality, so a mix of
files from several domains, each with a weight, is better than one large file.

Some sequences are held out: nothing is fitted on them, and every score that
chooses anything is measured on them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.option_names import named
from kvgraft.text.fingerprints import encode, fingerprints
from kvgraft.text.sources import TextLike, TextSource, as_sources, documents
from kvgraft.text.special_tokens import special_prefix

__all__ = ["CalibrationText", "read_text"]


@dataclass(frozen=True)
class CalibrationText:
    """Token sequences of one length, some of them held out.

    Attributes:
        tokens: ``[n, seq_len]`` int32.
        heldout: ``[n]`` bool: sequences that must not be fitted on.
        sources: What was read: name, SHA-256 and number of tokens and sequences
            of each source.
        notes: Lines that a user should see, such as of less text than asked for.
    """

    tokens: NDArray[np.int32]
    heldout: NDArray[np.bool_]
    sources: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.heldout.shape != (len(self.tokens),):
            raise FitError("CalibrationText: tokens must be [n, seq_len], heldout [n].")
        if self.heldout.all() or not self.heldout.any():
            raise FitError(
                "CalibrationText needs at least one sequence to fit on and one held out; got "
                f"{len(self.tokens)} of which {int(self.heldout.sum())} are held out."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return int(self.tokens.shape[1])

    @property
    def digest(self) -> str:
        """SHA-256 over the token ids, their layout, and what is held out."""
        h = hashlib.sha256(repr(self.tokens.shape).encode())
        h.update(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        h.update(np.packbits(self.heldout).tobytes())
        return h.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What goes into the artifact, JSON-ready."""
        n_heldout = int(self.heldout.sum())
        return {
            "sha256": self.digest,
            "seq_len": self.seq_len,
            "sequences": len(self) - n_heldout,
            "heldout_sequences": n_heldout,
            "tokens": (len(self) - n_heldout) * self.seq_len,
            "heldout_tokens": n_heldout * self.seq_len,
            "sources": [dict(s) for s in self.sources],
            # So that an evaluation can prove that its text is different.
            "fingerprints": encode(fingerprints(self.tokens)),
        }


def read_text(
    sources: TextLike | Sequence[TextLike],
    tokenizer: Any,
    *,
    sequences: int = 500,
    seq_len: int = 1024,
    heldout: float = 0.1,
    chat: bool = False,
) -> CalibrationText:
    """Tokenise text into equal-length sequences and hold some out.

    Documents are laid end to end, two newlines between them, and cut; each
    sequence begins with the special tokens that the tokenizer itself puts
    before a text (BOS, for the models that have one), because a prompt in use
    begins with them too. Only as much is read as is needed. A sequence that
    occurred before is dropped, so that none is both fitted and held out.

    Args:
        sources: Files or :class:`TextSource`, one or several.
        tokenizer: mlx-lm's tokenizer wrapper or a transformers tokenizer.
        sequences: How many sequences to take.
        seq_len: Tokens per sequence.
        heldout: Share of the sequences that is held out, from the end of each
            source; at least one.
        chat: Render JSONL objects that have ``messages`` with the tokenizer's
            chat template. Otherwise the contents are joined by blank lines.

    Raises:
        TextError: If a file cannot be read.
        FitError: If there is not enough text for two sequences. Text for fewer than
            ``sequences`` is used, with a note.
    """
    if sequences < 2:
        raise FitError(
            f"A fit needs at least 2 sequences (one is held out), got {named('sequences')} "
            f"{sequences}."
        )
    if not 0 < heldout < 1:
        raise FitError(f"{named('heldout')} must lie between 0 and 1, got {heldout}.")
    prefix = special_prefix(tokenizer)
    if seq_len < len(prefix) + 2:
        raise FitError(f"{named('seq_len')} {seq_len} is too short to hold any text.")
    given = as_sources(sources)
    if not given:
        raise FitError("No calibration text given.")
    readers = [_SequenceReader(s, tokenizer, prefix, seq_len, chat) for s in given]
    rows, origins, repeated = _take(readers, sequences)
    if len(rows) < 2:
        raise FitError(
            f"The calibration text has {sum(r.tokens_read for r in readers):,} tokens, less than "
            f"the two sequences of {seq_len:,} that a fit needs (one is held out)."
            f"{f' {repeated} repeated sequences were dropped.' if repeated else ''} Give more "
            f"text, or shorter sequences ({named('seq_len')})."
        )
    notes = []
    if len(rows) < sequences:
        notes.append(
            f"The text is enough for {len(rows)} sequences of {seq_len} tokens, not the "
            f"{sequences} asked for; all of it is used."
        )
    if repeated:
        notes.append(f"{repeated} repeated sequences were dropped.")
    held = _hold_out(origins, heldout)
    return CalibrationText(np.stack(rows), held, tuple(r.describe() for r in readers), tuple(notes))


def _take(
    readers: Sequence[_SequenceReader], count: int
) -> tuple[list[NDArray[np.int32]], list[int], int]:
    """Different sequences in proportion to the sources' weights.

    Returns:
        At most ``count`` sequences, the index of the reader that each is from, and how
        many were dropped because they had occurred before.
    """
    rows: list[NDArray[np.int32]] = []
    origins: list[int] = []
    seen: set[bytes] = set()
    repeated = 0
    unfinished = list(range(len(readers)))
    while unfinished and len(rows) < count:
        # The source that is furthest behind its share comes next.
        i = min(unfinished, key=lambda j: ((readers[j].taken + 1) / readers[j].source.weight, j))
        row = readers[i].next_sequence()
        if row is None:
            unfinished.remove(i)
            continue
        key = hashlib.sha256(row.tobytes()).digest()
        if key in seen:
            repeated += 1
            continue
        seen.add(key)
        readers[i].taken += 1
        rows.append(row)
        origins.append(i)
    return rows, origins, repeated


def _hold_out(origins: Sequence[int], share: float) -> NDArray[np.bool_]:
    """Mark a share of each source's sequences, from its end; at least one, and not all."""
    held = np.zeros(len(origins), dtype=np.bool_)
    for i in set(origins):
        mine = [r for r, origin in enumerate(origins) if origin == i]
        n_held = round(share * len(mine))
        if n_held:
            held[mine[-n_held:]] = True
    if not held.any():
        held[-1] = True
    if held.all():
        held[0] = False
    return held


class _SequenceReader:
    """Turns one source into sequences, reading no further than it has to."""

    def __init__(
        self, source: TextSource, tokenizer: Any, prefix: list[int], seq_len: int, chat: bool
    ) -> None:
        self.source = source
        self.taken = 0
        self.tokens_read = 0
        self._hash = hashlib.sha256()
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._body = seq_len - len(prefix)
        self._pieces = documents(source, tokenizer, chat=chat)
        self._ids: list[int] = []

    def next_sequence(self) -> NDArray[np.int32] | None:
        """The next sequence, or ``None`` at the end."""
        while len(self._ids) < self._body:
            piece = next(self._pieces, None)
            if piece is None:
                return None
            self._hash.update(piece.encode("utf-8", "surrogatepass"))
            with _no_length_warning():
                ids = [int(i) for i in self._tokenizer.encode(piece, add_special_tokens=False)]
            self.tokens_read += len(ids)
            self._ids += ids
        row = [*self._prefix, *self._ids[: self._body]]
        del self._ids[: self._body]
        return np.array(row, dtype=np.int32)

    def describe(self) -> dict[str, Any]:
        """Identity of what was read; the digest is of the text that was used."""
        return {
            "name": self.source.name,
            "sha256": self._hash.hexdigest(),
            "tokens_read": self.tokens_read,
            "sequences": self.taken,
            "weight": self.source.weight,
        }


@contextmanager
def _no_length_warning() -> Iterator[None]:
    """Transformers warns of texts longer than the model's context; these are cut later."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
