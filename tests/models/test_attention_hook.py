"""Capturing a model's attention calls."""

import mlx.core as mx
import numpy as np
import pytest
import zoo
from mlx_lm.models import base, qwen3

from kvgraft.models.attention_hook import attention_weights, can_capture, capture_attention
from kvgraft.models.forward import prefill


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_calls_give_the_outputs_of_the_model(name):
    """mlx-lm's function on captured arguments, and attention in the clear, agree."""
    model = zoo.make(name)
    tokens = np.random.default_rng(0).integers(1, 90, 12).tolist()
    cache = prefill(model, tokens[:7])
    calls = []
    original = base.scaled_dot_product_attention
    with capture_attention(model, cache, calls.append) as possible:
        model(mx.array([tokens[7:]]), cache=cache)
    assert possible and sorted(c.layer for c in calls) == list(range(len(cache)))
    for call in calls:
        n_kv, n = call.keys.shape[:2]
        mask = mx.array(np.triu(np.full((5, n), -np.inf), n - 5 + 1).astype(np.float32))
        theirs = original(
            call.queries[None], call.keys[None], call.values[None], cache[call.layer],
            call.scale, mask, **({"sinks": call.sinks} if call.sinks is not None else {}),
        )  # fmt: skip
        q = call.queries.reshape(n_kv, -1, 5, call.queries.shape[-1])
        logits = call.scale * (q @ call.keys[:, None].swapaxes(-1, -2)) + mask
        ours = attention_weights(logits, call.sinks) @ call.values[:, None]
        assert mx.allclose(ours.reshape(theirs.shape), theirs, atol=1e-4)
    assert base.scaled_dot_product_attention is original


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma2"])
def test_can_capture(name):
    assert can_capture(zoo.make(name)) == (name != "gemma2")


def test_the_models_own_function_is_restored_after_an_error():
    model = zoo.make("qwen3")
    before = qwen3.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="on purpose"):
        with capture_attention(model, [], lambda call: None):
            assert qwen3.scaled_dot_product_attention is not before
            raise RuntimeError("on purpose")
    assert qwen3.scaled_dot_product_attention is before


def test_calls_with_another_cache_are_left_out():
    model = zoo.make("qwen3")
    calls = []
    with capture_attention(model, [], calls.append):
        prefill(model, [1, 2, 3])
    assert not calls


def test_a_built_in_of_that_name_is_not_instrumented(monkeypatch):
    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    with capture_attention(zoo.make("qwen3"), [], lambda call: None) as possible:
        assert not possible
