"""The text of the demo pair: Jane Austen's novels and made-up stories, as batches of tokens.

Run as a script it makes the working folder that the other scripts read: cleaned novels split by
chapter into training and held-out text, and the tokenizer.

    python -m demo_pair.corpus --novels Rdata.rdb --work WORK

`Rdata.rdb` is the data file of the R package "janeaustenr" (Debian: r-cran-janeaustenr), which
holds the six novels line by line; their copyright has expired.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .stories import WORDS, Document, Level, Split, StoryWriter

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
END_ID = 0
BATCH_TOKENS = 2048
STORY_SHARE = 0.62
DRILL_WEIGHT = 0.2
"""How much a token of a drill counts that nothing can tell."""
RECALL_WEIGHT = 4.0
"""How much more a token counts in the loss when only the context tells it."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'User: ' if message['role'] == 'user' else 'Assistant: ' }}"
    "{{ message['content'] | trim }}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


# Novels ----------------------------------------------------------


def read_rdb_strings(path: Path) -> Iterator[list[str]]:
    """The string vectors in an R lazy-load database: zlib blocks of serialised (XDR) objects."""
    data = path.read_bytes()
    at = 0
    string = b"\x00\x04\x00\x09"
    while at < len(data):
        block = zlib.decompressobj()
        raw = block.decompress(data[at + 4 :])  # the first four bytes are the length once unpacked
        at = len(data) - len(block.unused_data)
        cursor = raw.find(string)
        (count,) = struct.unpack(">I", raw[cursor - 4 : cursor])
        lines: list[str] = []
        for _ in range(count):
            _, length = struct.unpack(">Ii", raw[cursor : cursor + 8])
            cursor += 8
            lines.append(raw[cursor : cursor + max(length, 0)].decode("utf-8"))
            cursor += max(length, 0)
        yield lines


def chapters(lines: list[str]) -> list[str]:
    """Chapters as plain text, one paragraph a line, without title pages and editors' notes."""
    text = "\n".join(lines).split("A NOTE ON THE TEXT")[0]
    text = re.sub(r"(?m)^(VOLUME|FINIS|Finis|THE END).*$", "", text)
    parts = re.split(r"(?m)^\s*(?:CHAPTER|Chapter) [IVXL\d]+\.?\s*$", text)[1:]
    found = []
    for part in parts:
        paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", part))
        plain = "\n".join(p for p in paragraphs if p)
        plain = plain.replace("_", "").replace("--", " - ").encode("ascii", "ignore").decode()
        found.append(plain + "\n")
    return found


def split_novels(path: Path) -> dict[Split, list[str]]:
    """Every twelfth chapter is held out."""
    split: dict[Split, list[str]] = {"train": [], "heldout": []}
    for lines in read_rdb_strings(path):
        for index, chapter in enumerate(chapters(lines)):
            split["heldout" if index % 12 == 6 else "train"].append(chapter)
    return split


def passages(texts: list[str]) -> list[str]:
    """Paragraphs of a length that can be read aloud in a conversation."""
    return [line for text in texts for line in text.splitlines() if 160 <= len(line) <= 1100]


# Tokenizer ----------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; digits stay single so that codes are copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


# Batches ----------------------------------------------------------

LEVELS: tuple[Level, ...] = (
    Level(facts=(2, 4), filler=(0, 0)),
    Level(facts=(2, 6), filler=(0, 2)),
    Level(facts=(3, 9), filler=(0, 4), reading=0.25),
    Level(facts=(4, 14), filler=(1, 6), reading=0.45),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """What is trained on from a number of tokens on."""

    start: int
    lengths: tuple[tuple[int, float], ...]
    """Window lengths and how often each is used."""
    levels: tuple[float, ...]
    """How often each of `LEVELS` is used."""
    drills: float
    """Share of windows that only teach copying: `Corpus.copy_drill`, `Corpus.lookup_drill`."""


STAGES: tuple[Stage, ...] = (
    Stage(0, ((256, 1.0),), (0.9, 0.1, 0.0, 0.0), 0.5),
    Stage(2_000_000, ((256, 0.6), (512, 0.4)), (0.4, 0.5, 0.1, 0.0), 0.2),
    Stage(2_700_000, ((256, 0.3), (512, 0.5), (1024, 0.2)), (0.2, 0.4, 0.3, 0.1), 0.1),
    Stage(3_500_000, ((256, 0.2), (512, 0.4), (1024, 0.4)), (0.1, 0.25, 0.35, 0.3), 0.05),
)

Tokens = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids, and for each its weight in the loss (more than 1 marks a recalled answer)."""

    ids: Tokens
    weights: Weights


def _window(ids: list[int], weights: list[float], length: int) -> Window:
    return Window(
        np.array(ids[:length], dtype=np.int64), np.array(weights[:length], dtype=np.float32)
    )


class Corpus:
    """The working folder, read back."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.novels: dict[Split, list[str]] = json.loads((work / "novels.json").read_text())
        self._writers = {split: self._writer(split) for split in self.novels}

    def _writer(self, split: Split) -> StoryWriter:
        choices = passages(self.novels[split])
        return StoryWriter(split, lambda rng: rng.choice(choices))

    def writer(self, split: Split) -> StoryWriter:
        return self._writers[split]

    @cached_property
    def novel_tokens(self) -> dict[Split, Tokens]:
        """Each split's chapters as one stream, with the end-of-text token before every chapter."""
        streams: dict[Split, Tokens] = {}
        for split, texts in self.novels.items():
            ids: list[int] = []
            for encoding in self.tokenizer.encode_batch(texts):
                ids += [END_ID, *encoding.ids]
            streams[split] = np.array(ids, dtype=np.int64)
        return streams

    def encode(self, doc: Document) -> Window:
        encoding = self.tokenizer.encode(doc.text)
        weights = np.ones(len(encoding.ids), dtype=np.float32)
        spans = iter(sorted(doc.recalls))
        span = next(spans, None)
        for index, (start, end) in enumerate(encoding.offsets):
            while span is not None and start >= span[1]:
                span = next(spans, None)
            if span is not None and end > span[0]:
                weights[index] = RECALL_WEIGHT
        return Window(np.array(encoding.ids, dtype=np.int64), weights)

    def novel_window(self, rng: Random, split: Split, length: int) -> Window:
        stream = self.novel_tokens[split]
        start = rng.randrange(len(stream) - length)
        return Window(stream[start : start + length], np.ones(length, dtype=np.float32))

    def story_window(
        self, rng: Random, split: Split, length: int, levels: tuple[float, ...]
    ) -> Window:
        """Whole documents from the window's start on; only the last is cut."""
        ids: list[Tokens] = []
        weights: list[Weights] = []
        filled = 0
        # Half of the windows begin without the end-of-text token, as a conversation in use does.
        separator = rng.random() < 0.5
        while filled < length:
            level = rng.choices(LEVELS, weights=levels)[0]
            doc = self.encode(self.writer(split).write(rng, level))
            if separator:
                ids.append(np.array([END_ID], dtype=np.int64))
                weights.append(np.ones(1, dtype=np.float32))
                filled += 1
            separator = True
            ids.append(doc.ids)
            weights.append(doc.weights)
            filled += len(doc.ids)
        return Window(np.concatenate(ids)[:length], np.concatenate(weights)[:length])

    @cached_property
    def fact_words(self) -> list[int]:
        """The words of facts that are one token each."""
        encodings = self.tokenizer.encode_batch([f" {word}" for word in WORDS])
        return [encoding.ids[0] for encoding in encodings if len(encoding.ids) == 1]

    def copy_drill(self, rng: Random, length: int) -> Window:
        """Random tokens, said again and again: only copying predicts the repetition.

        Without such drills neither model had learned to look anything up in its context after
        several million tokens of stories; with them it takes one or two.
        """
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            size = rng.randint(8, 60)
            words = [
                rng.choice(self.fact_words) if rng.random() < 0.7 else rng.randrange(2, VOCABULARY)
                for _ in range(size)
            ]
            ids += [END_ID, *words]
            weights += [DRILL_WEIGHT] * (size + 1)
            for _ in range(rng.randint(1, 3)):
                ids += words
                weights += [DRILL_WEIGHT, *([2.0] * (size - 1))]
        return _window(ids, weights, length)

    def lookup_drill(self, rng: Random, length: int) -> Window:
        """Lists of "word is word." in which every pair comes back: the shortest kind of fact."""
        link, stop = self.tokenizer.encode(" is").ids[0], self.tokenizer.encode(".").ids[0]
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            keys = rng.sample(self.fact_words, rng.randint(2, 8))
            values = [rng.choice(self.fact_words) for _ in keys]
            said: set[int] = set()
            ids.append(END_ID)
            weights.append(DRILL_WEIGHT)
            for _ in range(4 * len(keys)):
                i = rng.randrange(len(keys))
                ids += [keys[i], link, values[i], stop]
                recalled = RECALL_WEIGHT if i in said else DRILL_WEIGHT
                weights += [DRILL_WEIGHT, DRILL_WEIGHT, recalled, DRILL_WEIGHT]
                said.add(i)
        return _window(ids, weights, length)

    def _training_window(self, rng: Random, stage: Stage, length: int) -> Window:
        if rng.random() < stage.drills:
            return rng.choice((self.copy_drill, self.lookup_drill))(rng, length)
        if rng.random() < STORY_SHARE:
            return self.story_window(rng, "train", length, stage.levels)
        return self.novel_window(rng, "train", length)

    def batch(self, step: int) -> Window:
        """Training batch number `step`, [windows, length + 1] each; the same for every model."""
        rng = Random(f"batch {step}")
        seen = step * BATCH_TOKENS
        stage = next(stage for stage in reversed(STAGES) if stage.start <= seen)
        lengths, shares = zip(*stage.lengths, strict=True)
        length = rng.choices(lengths, weights=shares)[0]
        windows = [
            self._training_window(rng, stage, length + 1) for _ in range(BATCH_TOKENS // length)
        ]
        return Window(np.stack([w.ids for w in windows]), np.stack([w.weights for w in windows]))


def build(novels: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    split = split_novels(novels)
    (work / "novels.json").write_text(json.dumps(split))
    choices = passages(split["train"])
    writer = StoryWriter("train", lambda rng: rng.choice(choices))
    rng = Random("tokenizer")
    wanted = sum(map(len, split["train"]))
    stories: list[str] = []
    while wanted > 0:
        stories.append(writer.write(rng, rng.choice(LEVELS[:3])).text)
        wanted -= len(stories[-1])
    # So many copies of the facts' words that each becomes one token: copied in one step.
    tokenizer = train_tokenizer([*split["train"], *stories, *(f" {word}" * 800 for word in WORDS)])
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=1) + "\n")
    for name, texts in split.items():
        print(f"{name}: {len(texts)} chapters, {sum(map(len, texts)):,} characters")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--novels", type=Path, required=True, help="data file of the R package janeaustenr"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    build(arguments.novels, arguments.work)


if __name__ == "__main__":
    main()
