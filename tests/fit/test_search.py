"""Choosing k and plan by the loss of the target."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from fit_problems import geometry, prose, save_model

from kvgraft.cache.map import map_cache
from kvgraft.errors import FitError
from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.fit import search as choose_module
from kvgraft.fit.search import Documents, choose, read_documents, score
from kvgraft.fit.solve import solve_mapper
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import continuation_nll, prefill
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry

AUTO = FitConfig(
    sequences=10,
    seq_len=48,
    stride=1,
    k="auto",
    head_mapping="auto",
    documents=2,
    heldout=0.2,
    weight_format="float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    save_model(base / "source")
    save_model(base / "other", seed=1, num_key_value_heads=1)
    (base / "text.txt").write_text(prose(800))
    return base


# ------------------------------------------------------------- the search, on paper


def search(losses, monkeypatch, *, config=AUTO, layers=28, fits=lambda config: True):
    """Run the search over made-up losses; what was tried, and what won."""
    geo = geometry(layers, 2, 4)
    tried: list[FitConfig] = []

    def solve(config: FitConfig) -> Mapper:
        tried.append(config)
        size = (config.k if config.k_values is None else config.k_values) * (
            2 if config.head_mapping == "full" else 1
        )
        made = Mapper(geo, geo, [])
        made.config = config
        monkeypatch.setattr(Mapper, "n_parameters", property(lambda self: self.size), raising=False)
        made.size = size
        return made

    monkeypatch.setattr(
        choose_module, "score", lambda mapper, *rest: [losses(mapper.config) + d for d in (0, 1)]
    )
    documents = Documents(
        np.zeros((2, 8), np.int32), 4, [], native_nll=[1.0, 2.0], source_nll=[1, 2]
    )
    notes: list[str] = []
    mapper, trials = choose(
        solve, documents, None, geo, geo, config, fits=fits, notify=notes.append
    )
    assert [t for t in trials if t.chosen] and len(notes) >= len(trials)
    return mapper.config, tried, trials


def test_the_search_goes_up_until_it_gets_worse(monkeypatch):
    def losses(c):
        base = {1: 2.0, 2: 1.5, 4: 1.2, 8: 1.3, 12: 1.4, 16: 1.0, 24: 1.0}[c.k]
        return base + (0.3 if c.head_mapping == "full" else 0.0)

    won, tried, trials = search(losses, monkeypatch)
    assert (won.head_mapping, won.k) == ("local", 4)
    assert [c.k for c in tried if c.head_mapping == "local"][:5] == [1, 2, 4, 8, 12]  # not 16
    assert trials[2].gap == pytest.approx(0.2) and trials[2].gap_error == pytest.approx(0.0)
    assert sum(t.chosen for t in trials) == 1 and trials[2].chosen


def test_variations_of_the_winner_are_tried(monkeypatch):
    def losses(c):
        loss = 1.0 + abs(c.k - 4) * 0.1
        return loss - 0.05 * (c.k_values == 8) - 0.2 * (c.ridge_lambda == 1.0)

    won, tried, _ = search(losses, monkeypatch, config=replace(AUTO, head_mapping="local"))
    assert won.ridge_lambda == 1.0 and won.k == 4
    assert {"separate"} <= {c.source_layers for c in tried}
    assert 8 in {c.k_values for c in tried}


def test_a_larger_map_has_to_earn_its_size(monkeypatch):
    won, _, _ = search(lambda c: 1.0 - 0.00001 * c.k, monkeypatch)
    assert (won.head_mapping, won.k) == ("local", 1)
    won, _, _ = search(
        lambda c: 1.0 - 0.01 * (c.head_mapping == "full") - 0.01 * min(c.k, 2), monkeypatch
    )
    assert (won.head_mapping, won.k) == ("full", 2)


def test_what_does_not_fit_is_left_out(monkeypatch):
    won, tried, _ = search(lambda c: 1.0 / c.k, monkeypatch, fits=lambda c: c.k <= 4)
    assert max(c.k for c in tried) == 4 and won.k == 4


@pytest.mark.parametrize("weights", ["8bit", "4bit"])
def test_what_cannot_be_quantised_is_left_out(monkeypatch, weights):
    # Heads of 4: "local" reads 4 inputs a layer, "full" 8.
    config = replace(AUTO, weight_format=weights, group_size=64)
    won, tried, _ = search(lambda c: 1.0, monkeypatch, config=config)
    assert {(c.head_mapping, c.k) for c in tried} == {
        ("local", 16), ("full", 8), ("full", 16), ("full", 24),
    }  # fmt: skip
    assert (won.head_mapping, won.k) == ("local", 16)
    with pytest.raises(FitError, match="none could be solved"):
        search(lambda c: 1.0, monkeypatch, config=config, layers=3)


def test_given_settings_are_kept(monkeypatch):
    _, tried, _ = search(lambda c: 1.0, monkeypatch, config=replace(AUTO, k=3))
    assert {c.k for c in tried} == {3} and {c.head_mapping for c in tried} == {"local", "full"}
    assert len(tried) == 2
    _, tried, _ = search(
        lambda c: 1.0, monkeypatch, config=replace(AUTO, head_mapping="full"), layers=3
    )
    assert {c.head_mapping for c in tried} == {"full"} and [c.k for c in tried[:3]] == [1, 2, 3]


def test_losses_that_are_not_finite_lose(monkeypatch):
    won, _, trials = search(lambda c: 1.0 if c.k == 2 else float("nan"), monkeypatch)
    assert won.k == 2
    with pytest.raises(FitError, match="finite loss"):
        search(lambda c: float("inf"), monkeypatch)


# ------------------------------------------------------------------- on real models


def test_scores_are_those_of_a_hand_over(folder):
    source, target = load_model(folder / "source"), load_model(folder / "other")
    geos = read_geometry(source.model), read_geometry(target.model)
    mapper = fit_mapper(
        source, target, folder / "text.txt", replace(AUTO, k=2, head_mapping="full")
    )
    tokens = np.random.default_rng(0).integers(0, 200, (2, 40)).astype(np.int32)
    documents = read_documents(source.model, tokens, 30)
    got = score(mapper, documents, target.model, geos[1])
    for row, loss, alone in zip(tokens.tolist(), got, documents.source_nll):
        cache = prefill(source.model, row[:29])
        grafted = map_cache(cache, mapper, target.model)
        assert loss == pytest.approx(
            float(continuation_nll(target.model, grafted, row[29:]).mean()), rel=1e-5
        )
        # The source's caches were kept before it went on by itself.
        own = float(continuation_nll(source.model, cache, row[29:]).mean())
        assert alone == pytest.approx(own, rel=1e-5)
    assert all(k.shape[2] == 29 for k, _ in documents.source[0].values())
    with pytest.raises(FitError, match="leaves nothing to score"):
        read_documents(source.model, tokens, 40)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_model_onto_itself_takes_the_smallest_map(folder, sequential, tmp_path):
    notes = []
    mapper = fit_mapper(
        folder / "source",
        folder / "source",
        folder / "text.txt",
        replace(AUTO, sequential=sequential, ridge_lambda=1e-4),
        notify=notes.append,
    )
    assert (mapper.fit["plan"], mapper.fit["k"]) == ("local", 1)
    trials = mapper.fit["choice"]["trials"]
    assert {(t["plan"], t["k"]) for t in trials} >= {("local", 1), ("full", 1)}
    assert abs(trials[0]["gap"]) < 1e-3 and sum(t["chosen"] for t in trials) == 1
    assert mapper.fit["choice"]["scored_tokens"] == 2 * 12
    assert sum("loss" in note for note in notes) == len(trials)
    json.dumps(mapper.fit, allow_nan=False)
    mapper.save(tmp_path / "out")
    assert Mapper.load(tmp_path / "out").fit["choice"] == mapper.fit["choice"]


def test_unequal_heads_compare_grouped_and_full(folder):
    notes = []
    source, target = load_model(folder / "source"), load_model(folder / "other")
    mapper = fit_mapper(source, target, folder / "text.txt", AUTO, notify=notes.append)
    assert {t["plan"] for t in mapper.fit["choice"]["trials"]} == {"grouped", "full"}
    mapper.check()
    assert mapper.layers[0].keys.weight.dtype == mx.float32


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("sliding") / "sliding",
        model_type="llama",
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=8,
    )


@pytest.mark.parametrize("direction", ["from", "to"])
def test_choosing_for_sliding_windows(folder, sliding, direction):
    # The prefix is longer than the window, and the mapped cache goes on.
    pair = load_model(sliding), load_model(folder / "source")
    source, target = pair if direction == "from" else pair[::-1]
    mapper = fit_mapper(source, target, folder / "text.txt", AUTO)
    trials = mapper.fit["choice"]["trials"]
    assert trials and all(np.isfinite(t["nll"]) for t in trials)
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 250, 40)]
    cache = prefill(source.model, tokens[:30], step=7)
    mapped = map_cache(cache, mapper, target.model)
    assert mx.isfinite(target.model(mx.array([tokens[30:]]), cache=mapped)).all()


def test_tuning_leaves_sliding_windows_alone(folder, sliding):
    notes = []
    config = replace(AUTO, k=1, head_mapping="full", tune_steps=2)
    mapper = fit_mapper(
        sliding, folder / "source", folder / "text.txt", config, notify=notes.append
    )
    assert "tuning" not in mapper.fit
    assert any("keeping the closed-form map" in note for note in notes)


def test_moments_alone_cannot_choose():
    with pytest.raises(FitError, match="needs the models"):
        solve_mapper([], None, AUTO)
