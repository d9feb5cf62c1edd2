"""The demo's bundled data."""

import pytest

from kvgraft.demo.data import Conversation, bundled, documents, windows
from kvgraft.errors import KvgraftError


class Letters:
    """One token per character."""

    def encode(self, text):
        return [ord(c) for c in text]


def test_windows_are_cut_from_texts_that_are_long_enough():
    assert windows(["abcdef", "xy", "ghijkl"], Letters(), 4, 2) == [
        Letters().encode("abcd"),
        Letters().encode("ghij"),
    ]


def test_short_texts_are_joined():
    got = windows(["ab", "cd", "ef"], Letters(), 3, 5)
    assert got == [Letters().encode("abc"), Letters().encode("def")]


def test_bundled_parts():
    assert (bundled("mapper") / "mapper_config.json").exists()
    assert len(documents("heldout_novels")) >= 8
    conversation = Conversation.bundled()
    assert len(conversation.questions) == 3 and all(q for q, _ in conversation.questions)
    with pytest.raises(KvgraftError, match="lacks the demo's models/missing"):
        bundled("models/missing")
