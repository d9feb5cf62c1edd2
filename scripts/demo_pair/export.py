"""Writes the package's demo data: both models as mlx-lm folders, and the texts.

    python -m demo_pair.export models --work WORK --package ../python/kvgraft/demo
    python -m demo_pair.export texts --work WORK --package ../python/kvgraft/demo
    python -m demo_pair.export conversation --work WORK --package ../python/kvgraft/demo

Files are replaced one by one, each in one step, so a reader never meets half a file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from .corpus import END_OF_TEXT, LEVELS, Corpus
from .evaluate import ask, conversation, load, recalls
from .model import SHAPES, hugging_face_config
from .stories import KINDS, Split

CONVERSATION_TOKENS = 600
CONVERSATIONS_TRIED = 200
QUESTIONS = 3
HELD_OUT_CHARACTERS = 160_000
CALIBRATION_CHARACTERS = 600_000
"""Of each kind of text, novels and stories."""


def replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(content)
    fresh.replace(path)


def as_json(content: object) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def export_models(work: Path, package: Path) -> None:
    for name, shape in SHAPES.items():
        checkpoint = work / f"{name}.pt"
        if not checkpoint.exists():
            print(f"{name}: no checkpoint yet")
            continue
        saved = torch.load(checkpoint, map_location="cpu")
        tensors = {
            f"model.{key}": value.half().contiguous() for key, value in saved["average"].items()
        }
        folder = package / "models" / name
        replace(folder / "config.json", as_json(hugging_face_config(shape)))
        # Compact: the readable form of the tokenizer is twice as large.
        tokenizer = json.loads((work / "tokenizer.json").read_text())
        compact = json.dumps(tokenizer, separators=(",", ":"), ensure_ascii=False)
        replace(folder / "tokenizer.json", compact.encode())
        replace(folder / "tokenizer_config.json", (work / "tokenizer_config.json").read_bytes())
        replace(folder / "model.safetensors", save(tensors, metadata={"format": "mlx"}))
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {saved['tokens']:,} tokens seen, {size:,} bytes")


def novels(corpus: Corpus, split: Split, characters: int) -> list[str]:
    """The openings of all chapters of the split, each cut after a paragraph."""
    texts = corpus.novels[split]
    share = characters / sum(map(len, texts))
    if share >= 1:
        return texts
    return [
        text[: text.index("\n", min(len(text) - 1, int(len(text) * share))) + 1] for text in texts
    ]


def stories(corpus: Corpus, split: Split, characters: int, seed: str) -> list[str]:
    rng = Random(seed)
    texts: list[str] = []
    while sum(map(len, texts)) < characters:
        level = rng.choices(LEVELS, weights=(0.1, 0.2, 0.35, 0.35))[0]
        texts.append(corpus.writer(split).write(rng, level).text)
    return texts


def export_texts(work: Path, package: Path) -> None:
    corpus = Corpus(work)
    texts = {
        "heldout_novels.txt": novels(corpus, "heldout", HELD_OUT_CHARACTERS),
        "heldout_stories.txt": stories(corpus, "heldout", HELD_OUT_CHARACTERS, "held-out stories"),
        "calibration_novels.txt": novels(corpus, "train", CALIBRATION_CHARACTERS),
        "calibration_stories.txt": stories(
            corpus, "train", CALIBRATION_CHARACTERS, "calibration stories"
        ),
    }
    for name, documents in texts.items():
        content = "".join(END_OF_TEXT + document for document in documents)
        replace(package / "text" / name, content.encode())
        print(f"{name}: {len(documents)} documents, {len(content):,} characters")


def export_conversation(work: Path, package: Path) -> None:
    """The demo's conversation: the first of a series in which both models know every answer.

    What the demo shows is what a cache loses on its way from one model to the other; a question
    that a model cannot even answer from its own cache would say nothing about that.
    """
    corpus = Corpus(work)
    writer = corpus.writer("heldout")
    models = [load(package, name) for name in SHAPES]
    for number in range(CONVERSATIONS_TRIED):
        rng = Random(f"conversation {number}")
        facts = [fact for kind in rng.sample(KINDS, 3) for fact in writer.facts(rng, 3, [kind])]
        rng.shuffle(facts)
        context = conversation(writer, corpus, rng, facts, CONVERSATION_TOKENS)
        asked = [(ask(rng, fact), fact) for fact in rng.sample(facts, QUESTIONS)]
        if all(recalls(model, corpus, context + q, f) for q, f in asked for model in models):
            break
    else:
        raise SystemExit(f"no conversation of {CONVERSATIONS_TRIED} suits both models")
    questions = [{"question": question, "answer": fact.value} for question, fact in asked]
    replace(
        package / "text" / "conversation.json",
        as_json({"context": context, "questions": questions}),
    )
    print(f"conversation {number}:\n{context}")
    for question, fact in asked:
        print(f"{question} {fact.value}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("models", "texts", "conversation"))
    parser.add_argument(
        "--work", type=Path, required=True, help="folder made by corpus.py and filled by train.py"
    )
    parser.add_argument("--package", type=Path, required=True, help="the package's demo folder")
    arguments = parser.parse_args()
    commands = {
        "models": export_models,
        "texts": export_texts,
        "conversation": export_conversation,
    }
    commands[arguments.what](arguments.work, arguments.package)


if __name__ == "__main__":
    main()
