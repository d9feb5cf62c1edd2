"""Calibration text: files in, equal-length token sequences out.

The paper fits on 500 sequences of 1,024 tokens (Heo et al., arXiv:2608.03893,
section 3.1). Domain is the one thing its authors found to cost quality, so a
mix of files, each with a weight, is worth more than one large file.

Some sequences are held out: nothing is fitted on them, and every score that
chooses anything is measured on them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.option_names import named
from kvgraft.text.fingerprints import encode, fingerprints

__all__ = [
    "CalibrationText",
    "TextLike",
    "TextSource",
    "as_list",
    "check_sources",
    "documents",
    "parse_source",
    "read_text",
]

_PIECE = 1 << 18
"""Characters of a plain-text file that are tokenised at a time."""

_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Attributes:
        path: A plain-text file; or JSONL (``.jsonl``, ``.ndjson``): one document
            per line, as a string, or an object with the text under ``field`` or
            a chat under ``messages``; or Parquet (``.parquet``, needs pyarrow)
            with such columns. ``None`` when ``documents`` or ``dataset`` are
            given.
        weight: Share of the sequences, relative to the other sources.
        field: Name of the text in JSONL objects and Parquet files.
        documents: Texts in memory.
        dataset: A Hugging Face dataset, ``owner/name`` or ``owner/name:config``;
            its ``train`` split is streamed (needs ``datasets``).
    """

    path: Path | None
    weight: float = 1.0
    field: str = "text"
    documents: tuple[str, ...] = ()
    dataset: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise FitError(
                f"The weight of {self.name} must be a positive number, got {self.weight}."
            )

    @property
    def name(self) -> str:
        """The file's name, for messages and the artifact."""
        if self.path is not None:
            return self.path.name
        return "texts in memory" if self.dataset is None else self.dataset


def parse_source(argument: str) -> TextSource:
    """Read ``TEXT`` or ``TEXT=WEIGHT``, as the command line gives it.

    ``TEXT`` is a file, or ``hf:`` and the name of a Hugging Face dataset.

    Raises:
        FitError: If the weight is no positive number.
    """
    head, separator, tail = argument.rpartition("=")
    weight = 1.0
    if separator and not Path(argument).expanduser().exists():
        try:
            weight, argument = float(tail), head
        except ValueError:
            # A file of such a name may be missing; one of the name before the sign is there.
            if head.startswith("hf:") or Path(head).expanduser().exists():
                raise FitError(
                    f"The weight of {head} must be a number, as in {head}=0.5; got {tail!r}."
                ) from None
    if argument.startswith("hf:"):
        return TextSource(None, weight, dataset=argument[3:])
    return TextSource(Path(argument).expanduser(), weight)


def check_sources(sources: Sequence[TextLike]) -> None:
    """Refuse files that cannot be read, before anything else is done.

    Raises:
        FitError: If one is missing, is a folder, or may not be read.
    """
    for source in map(_as_source, sources):
        if source.path is None:
            continue
        try:
            source.path.open("rb").close()
        except OSError as error:
            raise _unreadable(source.path, error) from error


def _unreadable(path: Path, error: OSError) -> FitError:
    return FitError(f"Cannot read the calibration text {path}: {error.strerror}.")


@dataclass(frozen=True)
class CalibrationText:
    """Token sequences of one length, some of them held out.

    Attributes:
        tokens: ``[n, seq_len]`` int32.
        heldout: ``[n]`` bool: sequences that must not be fitted on.
        sources: What was read: name, SHA-256 and number of tokens and sequences
            of each source.
        notes: What a user should be told, such as less text than asked for.
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
            # So that an evaluation can prove that its text is other text.
            "fingerprints": encode(fingerprints(self.tokens)),
        }


TextLike = str | os.PathLike[str] | TextSource


def read_text(
    sources: TextLike | Sequence[TextLike],
    tokenizer: Any,
    *,
    sequences: int = 500,
    seq_len: int = 1024,
    heldout: float = 0.1,
    chat: bool = False,
) -> CalibrationText:
    """Tokenise text into equal-length sequences and set some apart.

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
        FitError: If a file cannot be read, or there is not enough text for two
            sequences. Text for fewer than ``sequences`` is used, with a note.
    """
    if sequences < 2:
        raise FitError(
            f"A fit needs at least 2 sequences (one is held out), got {named('sequences')} "
            f"{sequences}."
        )
    if not 0 < heldout < 1:
        raise FitError(f"{named('heldout')} must lie between 0 and 1, got {heldout}.")
    prefix = _prefix(tokenizer)
    if seq_len < len(prefix) + 2:
        raise FitError(f"{named('seq_len')} {seq_len} is too short to hold any text.")
    given = as_list(sources)
    if not given:
        raise FitError("No calibration text given.")
    readers = [_Reader(_as_source(s), tokenizer, prefix, seq_len, chat) for s in given]

    rows: list[NDArray[np.int32]] = []
    origin: list[int] = []
    seen: set[bytes] = set()
    repeated = 0
    open_readers = list(range(len(readers)))
    while open_readers and len(rows) < sequences:
        # The source that is furthest behind its share comes next.
        i = min(open_readers, key=lambda j: ((readers[j].taken + 1) / readers[j].source.weight, j))
        row = readers[i].next_sequence()
        if row is None:
            open_readers.remove(i)
            continue
        key = hashlib.sha256(row.tobytes()).digest()
        if key in seen:
            repeated += 1
            continue
        seen.add(key)
        readers[i].taken += 1
        rows.append(row)
        origin.append(i)

    if len(rows) < 2:
        n_tokens = sum(r.read for r in readers)
        raise FitError(
            f"The calibration text has {n_tokens:,} tokens, less than the two sequences of "
            f"{seq_len:,} that a fit needs at the very least (one is held out)."
            f"{f' {repeated} repeated sequences were dropped.' if repeated else ''} Give more "
            "text, or shorter "
            f"sequences ({named('seq_len')})."
        )
    notes = []
    if len(rows) < sequences:
        notes.append(
            f"The text is enough for {len(rows)} sequences of {seq_len} tokens, not the "
            f"{sequences} asked for; all of it is used."
        )
    if repeated:
        notes.append(f"{repeated} repeated sequences were dropped.")
    held = np.zeros(len(rows), dtype=np.bool_)
    for i in range(len(readers)):
        mine = [r for r, o in enumerate(origin) if o == i]
        n_held = round(heldout * len(mine))
        if n_held:
            held[mine[-n_held:]] = True
    if not held.any():
        held[-1] = True
    if held.all():
        held[0] = False
    return CalibrationText(np.stack(rows), held, tuple(r.describe() for r in readers), tuple(notes))


def as_list(sources: TextLike | Sequence[TextLike]) -> list[TextLike]:
    """One source or several, as a list."""
    return [sources] if isinstance(sources, str | os.PathLike | TextSource) else list(sources)


def documents(source: TextSource, tokenizer: Any, *, chat: bool = False) -> Iterator[str]:
    """The texts of one source, one after the other; a plain-text file in pieces.

    Args:
        source: Where they come from.
        tokenizer: Renders chats.
        chat: See :func:`read_text`.

    Raises:
        FitError: If it cannot be read.
    """
    return _Reader(source, tokenizer, [], 1, chat).pieces


def _as_source(text: TextLike) -> TextSource:
    return text if isinstance(text, TextSource) else TextSource(Path(text))


def _prefix(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before every text."""
    full, bare = list(tokenizer.encode("a")), list(tokenizer.encode("a", add_special_tokens=False))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


class _Reader:
    """Turns one source into sequences, reading no further than it has to."""

    def __init__(
        self, source: TextSource, tokenizer: Any, prefix: list[int], seq_len: int, chat: bool
    ) -> None:
        self.source = source
        self.taken = 0
        self.read = 0
        self._hash = hashlib.sha256()
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._body = seq_len - len(prefix)
        self.pieces = self._documents(chat)
        self._ids: list[int] = []

    def next_sequence(self) -> NDArray[np.int32] | None:
        """The next sequence, or ``None`` at the end."""
        while len(self._ids) < self._body:
            piece = next(self.pieces, None)
            if piece is None:
                return None
            self._hash.update(piece.encode("utf-8", "surrogatepass"))
            with _no_length_warning():
                ids = [int(i) for i in self._tokenizer.encode(piece, add_special_tokens=False)]
            self.read += len(ids)
            self._ids += ids
        row = [*self._prefix, *self._ids[: self._body]]
        del self._ids[: self._body]
        return np.array(row, dtype=np.int32)

    def describe(self) -> dict[str, Any]:
        """Identity of what was read; the digest is of the text that was used."""
        return {
            "name": self.source.name,
            "sha256": self._hash.hexdigest(),
            "tokens_read": self.read,
            "sequences": self.taken,
            "weight": self.source.weight,
        }

    def _documents(self, chat: bool) -> Iterator[str]:
        path = self.source.path
        if path is None:
            if self.source.dataset is not None:
                yield from _separated(self._dataset(self.source.dataset, chat))
            else:
                yield from _separated(self.source.documents)
            return
        if path.suffix.lower() == ".parquet":
            yield from _separated(self._parquet(path, chat))
            return
        try:
            with path.open(encoding="utf-8-sig") as lines:
                if path.suffix.lower() in _JSON_SUFFIXES:
                    yield from _separated(self._json_lines(lines, path, chat))
                else:
                    yield from _pieces(lines)
        except UnicodeDecodeError as error:
            raise FitError(f"{path} is not UTF-8 text: {error}. Convert it first.") from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def _json_lines(self, lines: Iterable[str], path: Path, chat: bool) -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise FitError(f"{where} is not JSON ({error}); give one object a line.") from error
            yield self._text_of(item, where, chat)

    def _parquet(self, path: Path, chat: bool) -> Iterator[str]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise FitError(
                f"Reading {path} needs pyarrow: pip install 'kvgraft[data]'. Or give JSONL."
            ) from error
        wanted = {self.source.field, "messages"}
        try:
            file = parquet.ParquetFile(path)
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(64, columns=columns):
                for row in batch.to_pylist():
                    yield self._text_of(row, str(path), chat)
        except (OSError, ArrowException) as error:
            raise FitError(f"Cannot read the calibration text {path}: {error}.") from error

    def _dataset(self, name: str, chat: bool) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise FitError(
                f"Reading the dataset {name} needs the datasets package: pip install "
                "'kvgraft[data]'. Or download it and give a file."
            ) from error
        repo, _, config = name.partition(":")
        try:
            rows = load_dataset(repo, config or None, split="train", streaming=True)
            for row in rows:
                yield self._text_of(row, f"The dataset {name}", chat)
        except FitError:
            raise
        except Exception as error:  # its error classes differ from release to release
            raise FitError(
                f"Cannot read the dataset {name} ({type(error).__name__}: {error}). Check the name "
                "and the network, or download it and give a file."
            ) from error

    def _text_of(self, item: Any, where: str, chat: bool) -> str:
        # JSON can hold halves of a character, which no tokenizer takes.
        return self._found_text(item, where, chat).encode("utf-8", "replace").decode("utf-8")

    def _found_text(self, item: Any, where: str, chat: bool) -> str:
        if isinstance(item, str):
            return item
        if isinstance(item, dict):
            text = item.get(self.source.field)
            if isinstance(text, str):
                return text
            messages = item.get("messages")
            if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
                if chat:
                    return self._templated(messages, where)
                return "\n\n".join(str(m.get("content", "")) for m in messages)
        raise FitError(
            f"{where} has no text under {self.source.field!r}, and no list of messages (objects "
            "with a 'content') under 'messages'. Rename the field, or from Python name it: "
            "TextSource(path, field=…)."
        )

    def _templated(self, messages: list[Any], where: str) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates raise what they like
            raise FitError(
                f"{where}: the chat template does not take these messages ({error})."
            ) from error


@contextmanager
def _no_length_warning() -> Iterator[None]:
    """Transformers warns of texts longer than the model's context; these get cut."""
    logger = logging.getLogger("transformers.tokenization_utils_base")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _separated(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if document:
            yield document + "\n\n"


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines, joined to pieces that a tokenizer takes in one go."""
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _PIECE:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)
