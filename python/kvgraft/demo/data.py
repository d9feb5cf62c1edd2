"""The data of the demo: two small models, their mapper and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraft.errors import KvgraftError

__all__ = ["Conversation", "bundled", "documents", "windows"]

END_OF_TEXT = "<|endoftext|>"
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Conversation:
    """A text whose cache is mapped, and questions about it.

    Attributes:
        context: The text that the source reads.
        questions: ``(question, expected answer or None)``; each is asked on its
            own, right after the context.
    """

    context: str
    questions: tuple[tuple[str, str | None], ...]

    @classmethod
    def bundled(cls) -> Conversation:
        """The conversation that ships with the demo pair."""
        data = json.loads((_FOLDER / "text" / "conversation.json").read_text(encoding="utf-8"))
        questions = tuple((q["question"], q["answer"]) for q in data["questions"])
        return cls(data["context"], questions)


def bundled(name: str) -> Path:
    """Path of a bundled part, such as ``models/large``, ``mapper`` or ``text/…``.

    Raises:
        KvgraftError: If this installation lacks it.
    """
    path = _FOLDER / name
    if not path.exists():
        raise KvgraftError(
            f"This installation lacks the demo's {name}. Reinstall kvgraft, or give your own "
            "models with --source and --target."
        )
    return path


def documents(part: str) -> list[str]:
    """The documents of one text file, such as ``heldout_stories``."""
    text = bundled(f"text/{part}.txt").read_text(encoding="utf-8")
    return [d.strip() for d in text.split(END_OF_TEXT) if d.strip()]


def windows(texts: Sequence[str], tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """Up to ``count`` token sequences of ``length`` tokens, one from each text that is long enough.

    If too few texts are long enough, the shorter ones are joined and cut.
    """
    out: list[list[int]] = []
    left_over: list[int] = []
    for text in texts:
        ids = list(tokenizer.encode(text))
        if len(ids) >= length:
            out.append(ids[:length])
        else:
            left_over += ids
        if len(out) == count:
            return out
    for start in range(0, len(left_over) - length + 1, length):
        if len(out) == count:
            break
        out.append(left_over[start : start + length])
    return out
