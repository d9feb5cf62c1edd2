"""Where text comes from: plain-text, JSONL and Parquet files, texts in memory, datasets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraft.errors import TextError

__all__ = ["TextLike", "TextSource", "as_sources", "check_sources", "documents", "parse_source"]

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
            raise TextError(
                f"The weight of {self.name} must be a positive number, got {self.weight}."
            )

    @property
    def name(self) -> str:
        """The file's name, for messages and the artifact."""
        if self.path is not None:
            return self.path.name
        return "texts in memory" if self.dataset is None else self.dataset

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain-text file, which has no documents of its own."""
        if self.path is None:
            return False
        return self.path.suffix.lower() not in {*_JSON_SUFFIXES, ".parquet"}


def parse_source(argument: str) -> TextSource:
    """Read ``TEXT`` or ``TEXT=WEIGHT``, as the command line gives it.

    ``TEXT`` is a file, or ``hf:`` and the name of a Hugging Face dataset.

    Raises:
        TextError: If the weight is not a positive number.
    """
    head, separator, tail = argument.rpartition("=")
    weight = 1.0
    if separator and not Path(argument).expanduser().exists():
        try:
            weight, argument = float(tail), head
        except ValueError:
            # A file of such a name may be missing; one of the name before the sign is there.
            if head.startswith("hf:") or Path(head).expanduser().exists():
                raise TextError(
                    f"The weight of {head} must be a number, as in {head}=0.5; got {tail!r}."
                ) from None
    if argument.startswith("hf:"):
        return TextSource(None, weight, dataset=argument[3:])
    return TextSource(Path(argument).expanduser(), weight)


TextLike = str | os.PathLike[str] | TextSource
"""A file, or a :class:`TextSource`."""


def as_sources(text: TextLike | Sequence[TextLike]) -> list[TextSource]:
    """One source or several, as a list of :class:`TextSource`."""
    given = [text] if isinstance(text, str | os.PathLike | TextSource) else text
    return [t if isinstance(t, TextSource) else TextSource(Path(t)) for t in given]


def check_sources(text: TextLike | Sequence[TextLike]) -> None:
    """Refuse files that cannot be read, before anything else is done.

    They are opened, and opened again when they are read: models are loaded in between,
    whose tokenizer reading needs.

    Raises:
        TextError: If one is missing, is a folder, or may not be read.
    """
    for source in as_sources(text):
        if source.path is None:
            continue
        try:
            source.path.open("rb").close()
        except OSError as error:
            raise _unreadable(source.path, error) from error


def documents(source: TextSource, tokenizer: Any, *, chat: bool = False) -> Iterator[str]:
    """The texts of one source, one after the other; a plain-text file in pieces.

    Args:
        source: Where they come from.
        tokenizer: Renders chats.
        chat: Render ``messages`` with the tokenizer's chat template. Otherwise the
            contents are joined by blank lines.

    Yields:
        Texts, each followed by two newlines; or pieces of whole lines of a plain-text
        file, which give the file when they are joined.

    Raises:
        TextError: If it cannot be read.
    """
    return iter(_Documents(source, tokenizer, chat))


def _unreadable(path: Path, error: OSError) -> TextError:
    return TextError(f"Cannot read {path}: {error.strerror}.")


class _Documents:
    """Iterates over the texts of one source."""

    def __init__(self, source: TextSource, tokenizer: Any, chat: bool) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._chat = chat

    def __iter__(self) -> Iterator[str]:
        path = self._source.path
        if path is None:
            if self._source.dataset is not None:
                yield from _separated(self._dataset(self._source.dataset))
            else:
                yield from _separated(self._source.documents)
            return
        if path.suffix.lower() == ".parquet":
            yield from _separated(self._parquet(path))
            return
        try:
            with path.open(encoding="utf-8-sig") as lines:
                if path.suffix.lower() in _JSON_SUFFIXES:
                    yield from _separated(self._json_lines(lines, path))
                else:
                    yield from _pieces(lines)
        except UnicodeDecodeError as error:
            raise TextError(f"{path} is not UTF-8 text: {error}. Convert it first.") from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def _json_lines(self, lines: Iterable[str], path: Path) -> Iterator[str]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TextError(
                    f"{where} is not JSON ({error}); give one object a line."
                ) from error
            yield self._text_of(item, where)

    def _parquet(self, path: Path) -> Iterator[str]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise TextError(
                f"Reading {path} needs pyarrow: pip install 'kvgraft[data]'. Or give JSONL."
            ) from error
        wanted = {self._source.field, "messages"}
        try:
            file = parquet.ParquetFile(path)
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(64, columns=columns):
                for row in batch.to_pylist():
                    yield self._text_of(row, str(path))
        except (OSError, ArrowException) as error:
            raise TextError(f"Cannot read {path}: {error}.") from error

    def _dataset(self, name: str) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise TextError(
                f"Reading the dataset {name} needs the datasets package: pip install "
                "'kvgraft[data]'. Or download it and give a file."
            ) from error
        repo, _, config = name.partition(":")
        try:
            rows = load_dataset(repo, config or None, split="train", streaming=True)
            for row in rows:
                yield self._text_of(row, f"The dataset {name}")
        except TextError:
            raise
        except Exception as error:  # its error classes differ between releases
            raise TextError(
                f"Cannot read the dataset {name} ({type(error).__name__}: {error}). Check the name "
                "and the network, or download it and give a file."
            ) from error

    def _text_of(self, item: Any, where: str) -> str:
        # JSON can hold lone surrogates, which no tokenizer accepts.
        return self._found_text(item, where).encode("utf-8", "replace").decode("utf-8")

    def _found_text(self, item: Any, where: str) -> str:
        if isinstance(item, str):
            return item
        if isinstance(item, dict):
            text = item.get(self._source.field)
            if isinstance(text, str):
                return text
            messages = item.get("messages")
            if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
                if self._chat:
                    return self._templated(messages, where)
                return "\n\n".join(str(m.get("content", "")) for m in messages)
        raise TextError(
            f"{where} has no text under {self._source.field!r}, and no list of messages (objects "
            "with a 'content') under 'messages'. Rename the field, or from Python name it: "
            "TextSource(path, field=…)."
        )

    def _templated(self, messages: list[Any], where: str) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates can raise anything
            raise TextError(
                f"{where}: the chat template does not take these messages ({error})."
            ) from error


def _separated(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if document:
            yield document + "\n\n"


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines, joined to pieces of a size that is tokenised at once."""
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
