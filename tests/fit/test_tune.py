"""Tuning the fitted map on the target's predictions."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from fit_problems import prose, save_model

from kvgraft.cache.map import map_cache
from kvgraft.errors import FitError
from kvgraft.fit import FitConfig, fit_mapper, read_text
from kvgraft.fit import tune as tune_module
from kvgraft.fit.search import Documents, read_documents
from kvgraft.fit.tune import _kl, _TunableMap, divergence, tune
from kvgraft.models.forward import prefill
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry

# So much λ that the closed form is poor and there is something to tune.
POOR = FitConfig(
    sequences=12,
    seq_len=48,
    stride=1,
    heldout=0.25,
    k=2,
    weight_format="float32",
    ridge_lambda=1e4,
    documents=3,
    tune_batch=2,
    tune_rate=0.05,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    save_model(base / "source", rope_theta=1e6)
    save_model(base / "target", seed=1, head_dim=24)
    (base / "text.txt").write_text(prose(400))
    return base


@pytest.fixture(scope="module")
def pair(folder):
    return load_model(folder / "source"), load_model(folder / "target")


@pytest.fixture(scope="module")
def poor(folder, pair):
    return fit_mapper(*pair, folder / "text.txt", POOR)


@pytest.fixture(scope="module")
def documents(folder, pair):
    text = read_text(folder / "text.txt", pair[0].tokenizer, sequences=12, seq_len=48, heldout=0.25)
    read = [read_documents(pair[0].model, t[None], 36, score_source=False) for t in text.tokens]
    held = text.heldout
    return (
        [d for d, h in zip(read, held) if not h],
        read_documents(pair[0].model, text.tokens[held], 36),
    )


def target_of(pair):
    return pair[1].model, read_geometry(pair[1].model)


def test_divergence_is_that_of_a_hand_over(pair, poor, documents):
    model, geometry = target_of(pair)
    got = divergence(poor, documents[1], model, geometry)
    for row, value in zip(documents[1].tokens.tolist(), got):
        grafted = map_cache(prefill(pair[0].model, row[:35]), poor, model)
        rest = mx.array(row[35:-1])[None]
        native = model(rest, cache=prefill(model, row[:35]))[0]
        p = np.array(mx.softmax(native, axis=-1)).astype(np.float64)
        q = np.array(mx.softmax(model(rest, cache=grafted)[0], axis=-1)).astype(np.float64)
        assert value == pytest.approx((p * np.log(p / q)).sum(axis=-1).mean(), rel=1e-3, abs=1e-6)
    logits = mx.random.normal((4, 9))
    assert float(_kl(logits, logits + 3.0)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("plan", ["full", "local"])
def test_no_change_is_the_mapper_itself(folder, pair, documents, plan):
    mapper = fit_mapper(*pair, folder / "text.txt", replace(POOR, head_mapping=plan))
    document = documents[0][0]
    start = _TunableMap(mapper, document)
    cache = start.cache(start.zeros(), document.source[0])
    row = document.tokens[0].tolist()
    want = map_cache(prefill(pair[0].model, row[:35]), mapper, pair[1].model)
    for a, b in zip(cache, want, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            size = float(mx.abs(y).max())
            assert float(mx.abs(x - y[..., : x.shape[2], :]).max()) < 1e-5 * size
    same = start.mapper(start.zeros(), replace(POOR, head_mapping=plan))
    for m, n in zip(mapper.layers, same.layers, strict=True):
        assert m.keys.heads == n.keys.heads and m.values.sources == n.values.sources
        assert mx.array_equal(m.keys.weight, n.keys.weight)
        assert mx.array_equal(m.values.bias, n.values.bias)


def test_the_gradient_is_that_of_the_loss(pair, poor, documents):
    document = documents[0][0]
    model = pair[1].model
    start = _TunableMap(poor, document)
    rest = mx.array(document.tokens[0][35:-1])[None]
    wanted = model(rest, cache=prefill(model, document.tokens[0][:35].tolist()))[0]

    def loss(params):
        return _kl(wanted, model(rest, cache=start.cache(params, document.source[0]))[0])

    zero = start.zeros()
    _, grads = mx.value_and_grad(loss)(zero)
    mx.random.seed(0)
    for name in ("0.keys.weight", "1.values.weight", "1.keys.bias"):
        way = mx.random.normal(zero[name].shape)
        step = 1e-2 / float(mx.sqrt((way**2).sum()))
        up, down = (float(loss({**zero, name: s * step * way})) for s in (1, -1))
        slope = (up - down) / (2 * step)
        assert float((grads[name] * way).sum()) == pytest.approx(slope, rel=0.1, abs=2e-3)


def test_tuning_helps_a_poor_map_on_other_documents(pair, poor, documents):
    model, geometry = target_of(pair)
    seen = []
    result = tune(
        poor,
        lambda i: documents[0][i % len(documents[0])],
        documents[1],
        model,
        geometry,
        config=replace(POOR, tune_steps=16),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (16, 16)
    assert result.after < 0.9 * result.before and result.steps > 0
    assert result.trace[0] == (0, result.before) and len(result.trace) == 9
    assert min(value for _, value in result.trace) == result.after
    again = float(np.mean(divergence(result.mapper, documents[1], model, geometry)))
    assert again == pytest.approx(result.after, rel=1e-4)
    # The mapper it started from is as it was.
    assert not mx.array_equal(result.mapper.layers[0].keys.weight, poor.layers[0].keys.weight)
    assert float(np.mean(divergence(poor, documents[1], model, geometry))) == pytest.approx(
        result.before, rel=1e-4
    )


def test_documents_that_come_again_are_kept(pair, poor, documents):
    model, geometry = target_of(pair)
    training = documents[0]
    results = {}
    for room, reads in ((1 << 30, len(training)), (0, 16)):
        read = []

        def one(i: int, read: list[int] = read) -> Documents:
            read.append(i)
            return training[i % len(training)]

        results[room] = tune(
            poor,
            one,
            documents[1],
            model,
            geometry,
            config=replace(POOR, tune_steps=8),
            distinct=len(training),
            kept_bytes=room,
        )
        # The first one is read once more, to see what the features are like.
        assert len(read) - reads in (0, 1)
    kept, again = results.values()
    assert kept.after == pytest.approx(again.after, rel=1e-4)


def test_tuning_that_does_harm_is_thrown_away(pair, poor, documents):
    model, geometry = target_of(pair)
    result = tune(
        poor,
        lambda i: documents[0][0],
        documents[1],
        model,
        geometry,
        config=replace(POOR, tune_steps=2, tune_rate=0.99, tune_batch=1),
    )
    if result.steps == 0:
        assert result.mapper is poor and result.after == result.before
    else:
        assert result.after < result.before

    def broken(i: int) -> Documents:
        one = documents[0][0]
        return replace(
            one, source=[{n: (k * float("nan"), v) for n, (k, v) in one.source[0].items()}]
        )

    result = tune(poor, broken, documents[1], model, geometry, config=replace(POOR, tune_steps=3))
    assert result.mapper is poor and result.steps == 0


def test_the_whole_way(folder, pair, tmp_path):
    notes, steps = [], []
    config = replace(POOR, tune_steps=8, weight_format="float16")
    mapper = fit_mapper(
        *pair,
        folder / "text.txt",
        config,
        notify=notes.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    told = mapper.fit["tuning"]
    assert told["divergence_after"] < told["divergence_before"]
    assert sum("tuning, step" in note for note in notes) == tune_module.EVALUATIONS
    assert steps[-1] == (12 + 2 + 8, 12 + 2 + 8)
    json.dumps(mapper.fit, allow_nan=False)
    assert mapper.layers[0].keys.weight.dtype == mx.float16
    # R² on held-out text is that of the tuned map.
    plain = fit_mapper(*pair, folder / "text.txt", replace(config, tune_steps=0))
    assert mapper.fit["mean_r2_values"] != plain.fit["mean_r2_values"]
    assert mapper.fit["mean_r2_values"] == pytest.approx(
        np.mean([m.scores["r2_values"] for m in mapper.layers])
    )
    sequential = fit_mapper(
        folder / "source",
        folder / "target",
        folder / "text.txt",
        replace(config, sequential=True),
    )
    assert sequential.fit["tuning"]["divergence_after"] == pytest.approx(
        told["divergence_after"], rel=0.05
    )
    mapper.save(tmp_path / "out")


def test_nothing_to_stop_by_is_refused(pair, poor, documents):
    empty = Documents(np.zeros((0, 48), np.int32), 36, [])
    with pytest.raises(FitError, match="does not train on"):
        tune(poor, lambda i: documents[0][0], empty, *target_of(pair), config=POOR)
    for wrong in ({"tune_steps": -1}, {"tune_batch": 0}, {"tune_rate": 0.0}):
        with pytest.raises(FitError, match="tune"):
            FitConfig(**wrong)
