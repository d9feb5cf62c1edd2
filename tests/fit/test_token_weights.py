"""Row weights from the target's attention."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import zoo
from fit_problems import prose, save_model
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.errors import FitError
from kvgraft.fit import FitConfig, fit_mapper, forecast
from kvgraft.fit import gather as gather_module
from kvgraft.fit.capture import capture
from kvgraft.fit.token_weights import boundaries, recorded_sensitivities, shrink
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry

CONFIG = FitConfig(
    sequences=8, seq_len=48, stride=1, k=1, weight_format="float32", token_weights="attention"
)


def attention_of_one(q, k, v, scale):
    """``[D]`` output of one query, in the clear."""
    logits = scale * (k @ q)
    return mx.softmax(logits) @ v


def squared_jacobian(function, x):
    """Sum of squares of the Jacobian of ``function`` at ``x``."""

    def column(unit):
        return mx.jvp(function, [x], [unit])[1][0]

    columns = mx.vmap(column)(mx.eye(x.size).reshape(x.size, *x.shape))
    return float((columns**2).sum())


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_sensitivities_are_squared_jacobians(name):
    model = zoo.make(name, seed=3)
    geometry = read_geometry(model)
    tokens = np.random.default_rng(0).integers(0, zoo.VOCAB, 11)
    cache = make_prompt_cache(model)
    seen_queries = []
    modules = {type(m).__module__ for m in model.modules()}
    module = next(
        m
        for m in (__import__("sys").modules[n] for n in modules)
        if hasattr(m, "scaled_dot_product_attention")
    )
    original = module.scaled_dot_product_attention

    def keep(queries, keys, values, cache, scale, mask, sinks=None):
        seen_queries.append((queries, keys, values, scale, sinks))
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    module.scaled_dot_product_attention = keep
    try:
        with recorded_sensitivities(model, cache, geometry, len(tokens)) as found:
            model(mx.array(tokens)[None], cache=cache)
    finally:
        module.scaled_dot_product_attention = original
    assert len(found) == len(cache) == len(seen_queries)
    for layer, (by_key, by_value) in enumerate(found):
        q, k, v, scale, sinks = seen_queries[layer]
        window = geometry.layers[layer].window
        per = q.shape[1] // k.shape[1]
        want_k, want_v = np.zeros(11), np.zeros(11)
        for b in boundaries(11):
            low = 0 if window is None else max(0, b - window + 1)
            for h in range(q.shape[1]):
                ks, vs = k[0, h // per, low : b + 1], v[0, h // per, low : b + 1]
                one = q[0, h, b]

                def out(ks, vs, one=one, h=h, sinks=sinks, scale=scale):
                    if sinks is None:
                        return attention_of_one(one, ks, vs, scale)
                    logits = mx.concatenate([scale * (ks @ one), sinks[h : h + 1]])
                    return mx.softmax(logits)[:-1] @ vs

                for i in range(low, b):
                    at = i - low

                    def of_key(x, ks=ks, vs=vs, at=at):
                        return out(mx.concatenate([ks[:at], x[None], ks[at + 1 :]]), vs)

                    def of_value(x, ks=ks, vs=vs, at=at):
                        return out(ks, mx.concatenate([vs[:at], x[None], vs[at + 1 :]]))

                    want_k[i] += squared_jacobian(of_key, ks[at])
                    want_v[i] += squared_jacobian(of_value, vs[at]) / vs.shape[1]
        assert np.array(by_value) == pytest.approx(want_v, rel=1e-3, abs=1e-7)
        assert np.array(by_key) == pytest.approx(want_k, rel=1e-3, abs=1e-6 * want_k.max())
        if window is None:
            assert want_v[0] > 0


def test_capturing_changes_nothing():
    model = zoo.make("qwen3")
    tokens = np.arange(20)
    plain = capture(model, tokens, np.arange(20, dtype=np.int32))
    watched = capture(
        model, tokens, np.arange(20, dtype=np.int32), attention_geometry=read_geometry(model)
    )
    for a, b in zip([*plain.keys, *plain.values], [*watched.keys, *watched.values]):
        assert mx.array_equal(a, b)
    assert plain.sensitivity is None and watched.sensitivity.shape == (2, 20)
    assert np.array(watched.sensitivity.sum(axis=1)) == pytest.approx([1, 1], rel=1e-5)


def test_attention_that_cannot_be_instrumented_is_refused(folder):
    with pytest.raises(FitError, match="cannot be instrumented"):
        model = zoo.make("gemma2")  # has an attention of its own
        capture(
            model,
            np.arange(9),
            np.arange(9, dtype=np.int32),
            attention_geometry=read_geometry(model),
        )


def test_a_built_in_of_that_name_is_not_instrumented(monkeypatch):
    model = zoo.make("qwen3")
    geometry = read_geometry(model)
    monkeypatch.setattr(qwen3, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    with pytest.raises(FitError, match="cannot be instrumented"):
        with recorded_sensitivities(model, make_prompt_cache(model), geometry, 8):
            pass


def test_boundaries_are_log_spaced():
    at = boundaries(1024)
    assert at[0] == 12 and at[-1] == 1023 and len(at) == 32
    assert (np.diff(at) > 0).all() and np.diff(at)[-1] > 20 * np.diff(at)[0]
    assert boundaries(4).tolist() == [2, 3] and boundaries(2).tolist() == [1]


def test_shrinking_keeps_enough_rows():
    rng = np.random.default_rng(0)
    spiky = rng.exponential(1, 200) ** 6
    for floor in (0.1, 0.5, 0.9, 1.0):
        w = shrink(spiky, floor)
        share = w.sum() ** 2 / (w**2).sum() / len(w)
        assert w.mean() == pytest.approx(1) and (w >= 0).all()
        assert share == pytest.approx(floor, rel=1e-6)
        assert (np.diff(w[np.argsort(spiky)]) >= -1e-12).all()
    gentle = 1 + 0.01 * rng.standard_normal(200)
    assert shrink(gentle, 0.5) == pytest.approx(gentle / gentle.mean())
    for nothing in (np.zeros(5), np.full(5, np.nan)):
        assert shrink(nothing, 0.5).tolist() == [1] * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    save_model(base / "source", num_hidden_layers=2)
    save_model(base / "target", seed=1)
    (base / "text.txt").write_text(prose(400))
    return base


def test_weights_reach_the_fit_and_survive_a_stop(folder, tmp_path, monkeypatch):
    pair = load_model(folder / "source"), load_model(folder / "target")
    plain = fit_mapper(*pair, folder / "text.txt", replace(CONFIG, token_weights="uniform"))
    by_default = fit_mapper(*pair, folder / "text.txt", replace(CONFIG, token_weights="auto"))
    weighted = fit_mapper(*pair, folder / "text.txt", CONFIG)
    assert plain.fit["effective_rows"] == plain.fit["rows"] == weighted.fit["rows"]
    assert weighted.fit["token_weights"] == "attention"
    assert 0.45 < weighted.fit["effective_rows"] / weighted.fit["rows"] < 0.95
    a, b = (np.array(m.layers[1].keys.weight) for m in (plain, weighted))
    assert np.abs(a - b).max() > 1e-4 * np.abs(a).max()
    assert np.array_equal(b, np.array(by_default.layers[1].keys.weight))

    real, calls = gather_module.capture, []

    def stop(*args, **named):
        if len(calls) == 9:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(gather_module, "capture", stop)
        with pytest.raises(KeyboardInterrupt):
            fit_mapper(*pair, folder / "text.txt", CONFIG, work=tmp_path / "work")
    again = fit_mapper(*pair, folder / "text.txt", CONFIG, work=tmp_path / "work")
    got = np.array(again.layers[1].keys.weight)
    assert np.abs(got - b).max() < 1e-4 * np.abs(b).max()
    with pytest.raises(FitError, match="effective_rows"):
        FitConfig(effective_rows=0)


def test_where_attention_cannot_be_seen_rows_count_alike(folder, tmp_path):
    save_model(tmp_path / "blind", model_type="gemma2")  # it has an attention of its own
    pair = folder / "source", tmp_path / "blind"
    notes: list[str] = []
    auto = replace(CONFIG, token_weights="auto")
    mapper = fit_mapper(*pair, folder / "text.txt", auto, notify=notes.append)
    assert any("cannot be instrumented" in note for note in notes)
    assert mapper.fit["token_weights"] == "uniform"
    assert mapper.fit["effective_rows"] == mapper.fit["rows"]
    assert any("cannot be instrumented" in n for n in forecast(*pair, None, auto).notes)
    with pytest.raises(FitError, match="cannot be instrumented"):
        fit_mapper(*pair, folder / "text.txt", CONFIG)
