"""Loss after a prefix, against one forward pass over the whole document."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import zoo

from kvgraft.errors import EvaluationError
from kvgraft.evaluate.arms import ArmResult, run_arms
from kvgraft.models.forward import continuation_nll, prefill

PREFIX = 20


@pytest.fixture(scope="module")
def model():
    return zoo.make("qwen3")


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 90, 50).tolist() for _ in range(3)]


def whole_document_nll(model, tokens):
    logits = np.array(model(mx.array([tokens]))[0].astype(mx.float32)).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]]


def test_a_native_prefix_gives_the_loss_of_the_whole_document(model, documents):
    for tokens in documents:
        cache = prefill(model, tokens[: PREFIX - 1], step=7)
        got = continuation_nll(model, cache, tokens[PREFIX - 1 :])
        assert got.shape == (len(tokens) - PREFIX,)
        np.testing.assert_allclose(got, whole_document_nll(model, tokens)[PREFIX - 1 :], atol=1e-4)


def test_without_a_cache_the_text_starts_at_the_last_prefix_token(model, documents):
    tokens = documents[0]
    got = continuation_nll(model, None, tokens[PREFIX - 1 :])
    np.testing.assert_allclose(got, whole_document_nll(model, tokens[PREFIX - 1 :]), atol=1e-4)


def test_arms_see_the_same_tokens(model, documents):
    seen = []

    def native(tokens):
        seen.append(list(tokens))
        return prefill(model, tokens)

    done = []
    arms = run_arms(
        {"native": (model, native), "none": (model, lambda t: None)},
        documents,
        PREFIX,
        lambda *step: done.append(step),
    )
    assert seen == [d[: PREFIX - 1] for d in documents]
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert arms["native"].n_tokens == arms["none"].n_tokens == 3 * (50 - PREFIX)
    want = [whole_document_nll(model, d)[PREFIX - 1 :].mean() for d in documents]
    assert arms["native"].nll == pytest.approx(np.mean(want), abs=1e-4)


def test_gaps_are_paired_by_document():
    a, b = ArmResult("a", (1.0, 3.0), 2), ArmResult("b", (0.5, 2.5), 2)
    assert a.gap(b) == (0.5, 0.0)
    assert a.perplexity == pytest.approx(np.exp(2.0))
    mean, error = a.gap(ArmResult("c", (1.0, 2.0), 2))
    assert (mean, error) == (0.5, pytest.approx(0.5))


def test_documents_that_are_too_short_are_refused(model, documents):
    arms = {"none": (model, lambda t: None)}
    with pytest.raises(EvaluationError, match="50 tokens"):
        run_arms(arms, documents, 50)
    with pytest.raises(EvaluationError, match="at least one document"):
        run_arms(arms, [], PREFIX)


def test_half_precision_models_are_scored_in_float32(documents):
    model = zoo.make("qwen3", mx.bfloat16)
    assert continuation_nll(model, None, documents[0]).dtype == np.float32
