"""The arms: controls, and losses against one forward pass over the whole document."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import zoo
from eval_problems import identity
from fit_problems import save_model

from kvgraft.errors import EvaluationError
from kvgraft.evaluate import arms
from kvgraft.evaluate.arms import ArmResult, run_arms
from kvgraft.models.forward import continuation_nll, prefill
from kvgraft.models.probe import read_geometry

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


def test_random_maps_have_the_shape_and_size_of_the_fitted(tmp_path):
    mapper = identity(save_model(tmp_path / "model"))
    noise = arms.random_mapper(mapper, 0)
    for m in mapper.layers:
        got, again = noise.read_layer(m.target_layer), noise.read_layer(m.target_layer)
        other = arms.random_mapper(mapper, 1).read_layer(m.target_layer)
        assert got.keys.weight.shape == m.keys.weight.shape
        rms = [float(mx.sqrt((x.keys.weight**2).mean()).item()) for x in (got, m)]
        assert rms[0] == pytest.approx(rms[1], rel=0.1)
        assert mx.array_equal(got.keys.weight, again.keys.weight)
        assert not mx.array_equal(got.keys.weight, other.keys.weight)
        assert not mx.array_equal(got.keys.weight, got.values.weight)
    assert m.keys.weight is not None, "the fitted weights stay"


def test_shapes_that_differ_have_no_raw_arm():
    a = read_geometry(zoo.make("qwen3"))
    a, b = (replace(a, layers=a.layers[:1] * n) for n in (2, 3))
    assert arms.raw_layers(a, b) == [0, 0, 1] and arms.raw_layers(b, a) == [0, 2]
    wide = replace(a, layers=(replace(a.layers[0], key_dim=64),) * 2)
    assert arms.raw_layers(wide, a) is None
