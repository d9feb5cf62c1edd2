"""The benchmark of speculative decoding: every draft cache gives the target's text."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from kvgraft.demo.data import Conversation, bundled
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import prefill
from kvgraft.models.loading import load_model

ROOT = Path(__file__).parents[2]
CONTEXT = Conversation.bundled().context[:560].rpartition("\n")[0]
QUESTION = "\nUser: What animal belongs to Vera?\nAssistant:"
MAX_TOKENS = 24


def test_every_draft_cache_gives_the_targets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.speculative import measure

    large, small = (load_model(bundled(f"models/{name}")) for name in ("large", "small"))
    for model in (large, small):
        model.model.set_dtype(mx.float32)  # where no two tokens tie
    context = large.tokenizer.encode(CONTEXT)
    question = large.tokenizer.encode(QUESTION, add_special_tokens=False)
    measured = measure(
        context, question, large.model, small.model, Mapper.load(bundled("mapper")),
        max_tokens=MAX_TOKENS,
    )  # fmt: skip
    plain = measured.arms["plain"]
    steps = generate_step(
        mx.array(question), large.model, max_tokens=MAX_TOKENS,
        prompt_cache=prefill(large.model, context),
    )  # fmt: skip
    assert plain.tokens == tuple(token for token, _ in steps)
    for name in ("prefilled", "mapped", "garbage"):
        arm = measured.arms[name]
        assert arm.tokens == plain.tokens and arm.parted_at is None
        assert 0 < arm.prepare < arm.seconds
    # Otherwise the map would not carry the context across.
    assert measured.arms["mapped"].acceptance > measured.arms["garbage"].acceptance
    assert measured.n_context == len(context) and measured.n_prompt == len(question)
