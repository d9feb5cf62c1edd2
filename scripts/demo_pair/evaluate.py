"""Measures the exported pair on held-out text: loss against n-grams, and recall in context.

    python -m demo_pair.evaluate nll --work WORK --package ../python/kvgraft/demo
    python -m demo_pair.evaluate recall --work WORK --package ../python/kvgraft/demo

Both print a Markdown table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from .corpus import STAGES, Corpus, Tokens
from .model import SHAPES, LanguageModel, Name
from .ngram import Floats, KneserNey
from .stories import KINDS, Document, Fact, StoryWriter, fill

CONTEXT = 1024


def load(package: Path, name: Name) -> LanguageModel:
    """The exported weights, so that what ships is what is measured."""
    model = LanguageModel(SHAPES[name])
    tensors = load_file(str(package / "models" / name / "model.safetensors"))
    model.load_state_dict(
        {key.removeprefix("model."): value.float() for key, value in tensors.items()}
    )
    return model.eval()


# Loss ----------------------------------------------------------


@torch.no_grad()
def model_nll(model: LanguageModel, tokens: Tokens) -> Floats:
    """Nats of every token after the first, in windows of CONTEXT tokens that do not overlap."""
    parts = []
    for start in range(0, len(tokens) - 1, CONTEXT):
        ids = torch.from_numpy(tokens[start : start + CONTEXT + 1])
        logits = model(ids[None, :-1])[0]
        parts.append(functional.cross_entropy(logits, ids[1:], reduction="none").numpy())
    return np.concatenate(parts)


def training_tokens(corpus: Corpus, seen: int) -> tuple[Tokens, Tokens]:
    """What the pair was trained on: the novels, once, and as many tokens of stories."""
    novels = corpus.novel_tokens["train"]
    stories = []
    rng = Random("n-gram stories")
    wanted = seen
    while wanted > 0:
        # Writer and mixture are those of training; in long windows few documents are cut.
        window = corpus.story_window(rng, "train", CONTEXT, STAGES[-1].levels)
        stories.append(window.ids)
        wanted -= CONTEXT
    return novels, np.concatenate(stories)


def report_nll(corpus: Corpus, package: Path, story_tokens: int) -> None:
    vocabulary = corpus.tokenizer.get_vocab_size()
    novels, stories = training_tokens(corpus, story_tokens)
    both = KneserNey(np.concatenate((novels, stories)), vocabulary)
    alone = {"novels": KneserNey(novels, vocabulary), "stories": KneserNey(stories, vocabulary)}
    models: dict[str, LanguageModel] = {name: load(package, name) for name in SHAPES}
    print("| held-out text | tokens | large | small | KN-5 | KN-5, this kind only | KN-3 |")
    print("|---|---|---|---|---|---|---|")
    three = KneserNey(np.concatenate((novels, stories)), vocabulary, order=3)
    for kind in ("novels", "stories"):
        text = (package / "text" / f"heldout_{kind}.txt").read_text()
        tokens = np.array(corpus.tokenizer.encode(text).ids, dtype=np.int64)
        nll = {name: model_nll(model, tokens) for name, model in models.items()}
        columns = [
            nll["large"],
            nll["small"],
            both.nll(tokens),
            alone[kind].nll(tokens),
            three.nll(tokens),
        ]
        cells = " | ".join(f"{column.mean():.3f}" for column in columns)
        print(f"| {kind} | {len(tokens) - 1:,} | {cells} |", flush=True)
        gap = nll["small"] - nll["large"]
        error = gap.std() / math.sqrt(len(gap))
        print(f"<!-- {kind}: small less large {gap.mean():.3f} +- {error:.3f} nats per token -->")


# Recall ----------------------------------------------------------


def recall_prompt(
    writer: StoryWriter, corpus: Corpus, rng: Random, count: int, length: int
) -> tuple[str, Fact]:
    """About `length` tokens of conversation: `count` facts of one kind, other talk, a question."""
    facts: list[Fact] = []
    while len(facts) < count:  # some kinds have too few held-out pairs for many facts
        facts = writer.facts(rng, count, [rng.choice(KINDS)])
    fact = rng.choice(facts)
    asked = ask(rng, fact)
    room = length - len(corpus.tokenizer.encode(asked).ids)
    return conversation(writer, corpus, rng, facts, room) + asked, fact


def ask(rng: Random, fact: Fact) -> str:
    """A question for the fact's value, up to where the answer begins."""
    return f"User: {fill(rng.choice(fact.kind.questions), fact)}\nAssistant:"


def conversation(
    writer: StoryWriter, corpus: Corpus, rng: Random, facts: Sequence[Fact], length: int
) -> str:
    """The facts are told, then other things are talked about until `length` tokens are full."""
    doc = Document()
    writer.tell(doc, rng, facts)
    while True:
        longer = Document()
        longer.extend(doc)
        writer.small_talk(longer, rng, reading=0.5)
        if len(corpus.tokenizer.encode(longer.text).ids) > length:
            return doc.text
        doc = longer


@torch.no_grad()
def recalls(model: LanguageModel, corpus: Corpus, prompt: str, fact: Fact) -> bool:
    """Whether each token of the value is the most likely one, given the answer's earlier words."""
    answer = " " + fill(fact.kind.answers[0], fact)
    value_at = len(prompt) + answer.rindex(fact.value)
    encoding = corpus.tokenizer.encode(prompt + answer)
    ids = torch.tensor([encoding.ids])
    guesses = model(ids[:, :-1])[0].argmax(-1)
    marked = [
        index
        for index, (start, end) in enumerate(encoding.offsets)
        if end > value_at and start < value_at + len(fact.value)
    ]
    return all(guesses[index - 1] == ids[0, index] for index in marked)


def report_recall(corpus: Corpus, package: Path, repeats: int) -> None:
    models: dict[str, LanguageModel] = {name: load(package, name) for name in SHAPES}
    writer = corpus.writer("heldout")
    print("| facts | prompt tokens | n | large | small | guessing among the facts |")
    print("|---|---|---|---|---|---|")
    for count in (4, 8, 12):
        for length in (256, 512, 1000):
            rng = Random(f"recall {count} {length}")
            hits = dict.fromkeys(models, 0)
            tokens = 0
            for _ in range(repeats):
                prompt, fact = recall_prompt(writer, corpus, rng, count, length)
                tokens += len(corpus.tokenizer.encode(prompt).ids)
                for name, model in models.items():
                    hits[name] += recalls(model, corpus, prompt, fact)
            shares = " | ".join(f"{hits[name] / repeats:.2f}" for name in ("large", "small"))
            print(
                f"| {count} | {tokens // repeats} | {repeats} | {shares} | {1 / count:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("nll", "recall"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True, help="the package's demo folder")
    parser.add_argument(
        "--story-tokens", type=int, default=7_000_000, help="for training the n-gram models"
    )
    parser.add_argument(
        "--repeats", type=int, default=100, help="questions per cell of the recall table"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = Corpus(arguments.work)
    if arguments.what == "nll":
        report_nll(corpus, arguments.package, arguments.story_tokens)
    else:
        report_recall(corpus, arguments.package, arguments.repeats)


if __name__ == "__main__":
    main()
