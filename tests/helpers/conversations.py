"""One short conversation, and models to generate it with."""

from __future__ import annotations

import mlx.core as mx
import zoo
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvgraft.handoff import MemoryLimit, SwitchOptions
from kvgraft.models.handle import ModelHandle

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 26, 43, 38]
ARCH = "qwen3"


def model(seed: int = 1):
    return zoo.make(ARCH, seed=seed)


def handle(seed: int = 1) -> ModelHandle:
    return ModelHandle(lambda: model(seed), name=f"seed {seed}")


def plain(model, n: int, *, seed: int | None = None, **options) -> list[int]:
    """What mlx_lm generates when nobody interrupts it."""
    if seed is not None:
        mx.random.seed(seed)
    if zoo.MLX_LM < (0, 32):  # its processors see only the last token of a prompt
        options["logits_processors"] = [
            lambda seen, logits, p=p: p(mx.array(PROMPT[:-1] + seen.tolist()), logits)
            for p in options.get("logits_processors", ())
        ]
    steps = generate_step(mx.array(PROMPT), model, max_tokens=n, **options)
    return [int(token) for token, _ in steps]


def logprobs(logits: mx.array) -> mx.array:
    return logits[0, -1] - mx.logsumexp(logits[0, -1])


def sampling(kind: str) -> dict:
    """Arguments of ``generate_step`` by name."""
    return {
        "greedy": {},
        "sampled": {"sampler": make_sampler(temp=1.0)},
        "top-p and penalty": {
            "sampler": make_sampler(temp=1.2, top_p=0.95),
            "logits_processors": make_logits_processors(
                repetition_penalty=1.7, repetition_context_size=12
            ),
        },
    }[kind]


def ends(start: int | None = None, end: int | None = None) -> SwitchOptions:
    return SwitchOptions(native_start=start, native_end=end)


def within(limit: int, **options) -> SwitchOptions:
    return SwitchOptions(memory_limit=MemoryLimit(limit), **options)
