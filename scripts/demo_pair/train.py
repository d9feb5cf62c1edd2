"""Trains one model of the demo pair on one CPU core.

    python -m demo_pair.train large --work WORK --minutes 90
    python -m demo_pair.train small --work WORK --minutes 60 --max-tokens 10000000

Both models see the same batches in the same order.  The learning rate falls to zero as the
wall-clock budget or the token budget runs out, whichever is nearer.  A checkpoint is written every
few minutes, and a run that was stopped goes on from it.  What is kept for use is a moving average
of the weights, so that a checkpoint from the middle of the run is good as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from .corpus import BATCH_TOKENS, RECALL_WEIGHT, Corpus, Window
from .model import SHAPES, LanguageModel

MATRIX_RATE = 0.02
OTHER_RATE = 0.004
WARM_UP_STEPS = 100
DECAY_FROM = 0.4
"""Share of the budget after which the learning rate begins to fall."""
AVERAGE_STEPS = 200


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz steps that drive the singular values towards one (Muon, Jordan 2024)."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    orthogonal: Tensor = x.T if tall else x
    return orthogonal


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates.

    PyTorch has one, but it works in bfloat16, which is slow on most CPUs.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.02,
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                update = orthogonalise(parameter.grad + group["momentum"] * momentum)
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(
                    update, alpha=-group["lr"] * scale
                )


def weighted_loss(logits: Tensor, window: Window) -> Tensor:
    """Cross entropy in which recalled tokens count more."""
    targets = torch.from_numpy(window.ids[:, 1:]).reshape(-1)
    weights = torch.from_numpy(window.weights[:, 1:]).reshape(-1)
    losses = functional.cross_entropy(logits.reshape(len(targets), -1), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def quick_check(model: nn.Module, corpus: Corpus, windows: int = 10, length: int = 512) -> str:
    """Held-out loss of novels and stories, and how often a recalled token is the likeliest."""
    rng = Random("quick check")
    novel, story = torch.zeros(2), torch.zeros(2)
    recall = torch.zeros(2)
    for _ in range(windows):
        ids = torch.from_numpy(corpus.novel_window(rng, "heldout", length + 1).ids)[None]
        loss = functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        novel += torch.tensor([loss.item(), 1])
        window = corpus.story_window(rng, "heldout", length + 1, (0.1, 0.2, 0.35, 0.35))
        ids = torch.from_numpy(window.ids)[None]
        logits = model(ids[:, :-1])[0]
        story += torch.tensor([functional.cross_entropy(logits, ids[0, 1:]).item(), 1])
        marked = torch.from_numpy(window.weights[1:] == RECALL_WEIGHT)
        hits = logits.argmax(-1)[marked] == ids[0, 1:][marked]
        recall += torch.tensor([hits.sum().item(), len(hits)])
    means = [total[0] / total[1] for total in (novel, story, recall)]
    return "novels {:.3f} stories {:.3f} recall {:.3f}".format(*means)


def save(path: Path, content: dict[str, object]) -> None:
    """Write beside the old file, then replace it: a reader never sees half a checkpoint."""
    fresh = path.with_suffix(".tmp")
    torch.save(content, fresh)
    fresh.replace(path)


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = Corpus(arguments.work)
    model = LanguageModel(SHAPES[arguments.name])
    average = LanguageModel(SHAPES[arguments.name])
    average.load_state_dict(model.state_dict())
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and not name.startswith("embed")]
    others = [p for name, p in named.items() if p.ndim != 2 or name.startswith("embed")]
    muon = Muon(matrices, lr=MATRIX_RATE)
    adam = torch.optim.AdamW(
        others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adam)
    step, spent = 0, 0.0

    path = arguments.work / f"{arguments.name}.pt"
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, spent = saved["step"], saved["spent"]

    def checkpoint() -> None:
        save(
            path,
            {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "tokens": step * BATCH_TOKENS,
                "spent": spent,
            },
        )

    forward = torch.compile(model) if arguments.compile else model
    size = sum(p.numel() for p in named.values())
    print(f"{arguments.name}: {size:,} parameters, from step {step}", flush=True)
    clock = time.monotonic()
    saved_at = checked_at = spent
    running = 0.0
    while True:
        used = max(spent / (60 * arguments.minutes), step * BATCH_TOKENS / arguments.max_tokens)
        if used >= 1:
            break
        factor = min(1.0, (step + 1) / WARM_UP_STEPS, (1 - used) / (1 - DECAY_FROM))
        muon.param_groups[0]["lr"] = MATRIX_RATE * factor
        adam.param_groups[0]["lr"] = OTHER_RATE * factor
        window = corpus.batch(step)
        loss = weighted_loss(forward(torch.from_numpy(window.ids[:, :-1])), window)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        step += 1
        # A short memory while everything still moves.
        blend = max(1 / AVERAGE_STEPS, 1 / (step / 4 + 1))
        with torch.no_grad():
            for kept, fresh in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(fresh, blend)
        now = time.monotonic()
        spent, clock = spent + now - clock, now
        running = loss.item() if running == 0.0 else running + 0.05 * (loss.item() - running)
        if step % 50 == 0:
            tokens = step * BATCH_TOKENS
            speed = f"{tokens / spent:.0f} tok/s, {spent / 60:.1f} min"
            print(f"step {step} {tokens / 1e6:.2f}M loss {running:.3f}, {speed}", flush=True)
        if spent - checked_at > 60 * arguments.check_minutes:
            checked_at = spent
            print(f"  held out: {quick_check(average, corpus)}", flush=True)
        if spent - saved_at > 60 * arguments.save_minutes:
            saved_at = spent
            checkpoint()
    checkpoint()
    print(f"done: step {step}, {step * BATCH_TOKENS:,} tokens, {spent / 60:.1f} min")
    print(f"  held out: {quick_check(average, corpus, 40)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument(
        "--work", type=Path, required=True, help="folder made by corpus.py; checkpoints go there"
    )
    parser.add_argument(
        "--minutes", type=float, required=True, help="wall-clock budget, resumed runs included"
    )
    parser.add_argument("--max-tokens", type=float, default=1e12, help="token budget")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--check-minutes", type=float, default=4)
    parser.add_argument(
        "--compile", action="store_true", help="compile the model (needs a C++ compiler)"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
