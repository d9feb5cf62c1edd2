"""Scores against plain float64 computations."""

from __future__ import annotations

import json
import warnings

import mlx.core as mx
import numpy as np
import pytest
import zoo
from scipy.special import log_softmax, softmax

from kvgraft.cache import read_cache
from kvgraft.evaluate.metrics import (
    TokenScores,
    Variance,
    attention_cosines,
    bootstrap,
    distance_bins,
    score_tokens,
    share_kept,
)
from kvgraft.models.attention_hook import capture_attention
from kvgraft.models.forward import prefill
from kvgraft.models.probe import read_geometry


def test_scores_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    logits, other = rng.normal(size=(2, 6, 11)) * 3
    tokens = rng.integers(0, 11, 6).tolist()
    native, native_log_p = score_tokens(mx.array(other.astype(np.float32)), tokens)
    got, _ = score_tokens(mx.array(logits.astype(np.float32)), tokens, native_log_p)
    p, log_p, log_q = softmax(other, -1), log_softmax(other, -1), log_softmax(logits, -1)
    np.testing.assert_allclose(got.nll, -log_q[np.arange(6), tokens], rtol=1e-5)
    np.testing.assert_allclose(got.kl, (p * (log_p - log_q)).sum(-1), rtol=1e-4, atol=1e-6)
    assert got.top.tolist() == logits.argmax(-1).tolist()
    assert len(native.kl) == 0
    again = TokenScores.from_dict(json.loads(json.dumps(got.to_dict())))
    np.testing.assert_allclose(again.nll, got.nll, atol=1e-5)
    assert again.top.tolist() == got.top.tolist()


def test_impossible_tokens_do_not_spoil_the_divergence():
    native = mx.array([[0.0, -200.0, 0.0]])
    _, log_p = score_tokens(native, [0])
    got, _ = score_tokens(mx.array([[0.0, 0.0, -300.0]]), [0], log_p)
    assert np.isfinite(got.kl).all() and got.kl[0] > 100


def test_a_broken_arm_stays_broken_through_json():
    broken = TokenScores.from_dict(json.loads(json.dumps(TokenScores.broken(3).to_dict())))
    assert np.isnan(broken.nll).all() and (broken.top == -1).all()


def test_intervals_hold_the_mean_and_narrow_with_documents():
    rng = np.random.default_rng(0)
    few, many = bootstrap(rng.normal(1, 1, 8)), bootstrap(rng.normal(1, 1, 400))
    assert few.low < few.mean < few.high
    assert many.high - many.low < few.high - few.low
    # Of a mean of n normal numbers: 1.96 standard errors to each side.
    assert many.high - many.low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert bootstrap([2.0]).to_list() == [2.0, 2.0, 2.0]
    assert np.isnan(bootstrap([1.0, float("nan")]).mean)


def test_intervals_come_out_the_same_again():
    x = np.random.default_rng(0).normal(size=10)
    assert bootstrap(x, 3) == bootstrap(x, 3)


def test_coverage_of_the_interval():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        got = bootstrap(rng.normal(0, 1, 30))
        hits += got.low <= 0 <= got.high
    assert 0.86 < hits / 200 <= 1


def test_intervals_are_corrected_for_skew():
    """Of a skewed sample, BCa moves both ends up against plain percentiles."""
    x = np.random.default_rng(1).exponential(size=20)
    draws = x[np.random.default_rng(0).integers(0, 20, (9999, 20))].mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    got = bootstrap(x)
    assert got.low > low and got.high > high and got.mean == x.mean()


@pytest.mark.parametrize(
    "x, ends",
    [
        ([0.5] * 6, (0.5, 0.5)),  # equal values: no width
        ([0.0, 1.0], (0.0, 1.0)),  # two documents: percentiles
        ([0.1, 0.1, 0.1 + 1e-17, 0.1], (0.1, 0.1)),
        ([1.0, float("inf"), 2.0], None),
    ],
)
def test_degenerate_samples_have_an_interval(x, ends):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = bootstrap(x)
    if ends is None:
        assert not np.isfinite([got.mean, got.low, got.high]).any()
    else:
        assert (got.low, got.high) == pytest.approx(ends)


def test_share_kept():
    assert share_kept(0.3, 0.6) == 0.5 and share_kept(-0.6, 0.6) == -1
    assert share_kept(0.3, 0.0) is None and share_kept(0.3, float("nan")) is None


@pytest.mark.parametrize("scored", [1, 3, 4, 5, 16, 100, 256, 300])
def test_bins_cover_every_distance_once(scored):
    bins = distance_bins(scored)
    assert [i for a, b in bins for i in range(a, b)] == list(range(scored))
    assert all(b > a for a, b in bins)


def test_r2_over_documents_is_that_of_all_rows():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(2, 60, 4)) * np.array([1, 5, 2, 0.1]) + 30
    x = y + rng.normal(size=y.shape) * 0.5
    parts, whole = [], Variance()
    for a, b in ((0, 10), (10, 37), (37, 60)):
        one = Variance()
        one.add(x[:, a:b], y[:, a:b])
        parts.append(json.loads(json.dumps(one.to_list())))
    for part in parts:
        whole.merge(part)
    want = [1 - ((x[h] - y[h]) ** 2).sum() / ((y[h] - y[h].mean(0)) ** 2).sum() for h in range(2)]
    np.testing.assert_allclose(whole.r2(), want, rtol=1e-9)
    constant = Variance()
    constant.add(np.ones((1, 5, 2)), np.ones((1, 5, 2)))
    assert np.isnan(constant.r2()).all()


# ------------------------------------------------------------- attention


def test_cosines_are_one_for_native_keys_and_fall_with_noise():
    model = zoo.make("qwen3")
    geometry = read_geometry(model)
    tokens = np.random.default_rng(0).integers(1, 90, 30).tolist()
    cache = prefill(model, tokens[:20])
    native = [(mx.contiguous(k), mx.contiguous(v)) for k, v in read_cache(cache).layers]
    mx.eval(native)
    calls = []
    with capture_attention(model, cache, calls.append):
        model(mx.array([tokens[20:]]), cache=cache)
    mx.random.seed(0)
    for call in calls:
        k, v = (x[0] for x in native[call.layer])
        same = np.array(attention_cosines(call, k, v))
        assert same.shape == (4,), "one per query head"
        np.testing.assert_allclose(same, 1, atol=1e-5)
        little, much = (
            np.array(attention_cosines(call, k, v + s * mx.random.normal(v.shape))).mean()
            for s in (0.1, 10.0)
        )
        assert 1 > little > much
    assert len(calls) == len(geometry.layers)
