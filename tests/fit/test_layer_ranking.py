"""Scores of source layers against least squares on all rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_problems import (
    EXACT,
    HELD,
    PAIRS,
    ROWS,
    direct,
    geometry,
    linear,
    noise,
    problem,
    r_squared,
    side_by_side,
    split,
)

from kvgraft.errors import FitError
from kvgraft.fit import FeatureRows, FitConfig, MomentSet, score_layers, solve_mapper
from kvgraft.fit.layer_ranking import allowed_sources, choose_layers


def ols_r2(x, y, test_x, test_y):
    w, b = direct(x, y, 0.0)
    return r_squared(test_y, test_x @ w + b)


def test_paper_rule_is_the_papers():
    source_geo, target_geo = geometry(3, 2, 8), geometry(2, 2, 8)
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    scores = score_layers_of(fit, held, "paper")
    assert scores.rule == "paper" and scores.head_matched
    n = ROWS - HELD
    for kind in ("keys", "values"):
        for t in range(2):
            for s in range(3):
                per_head = [
                    ols_r2(x := source.of(kind)[s][h][:n], y := target.of(kind)[t][h][:n], x, y)
                    for h in range(2)
                ]
                assert scores.of(kind)[t, s] == pytest.approx(np.mean(per_head), abs=1e-5)
    assert scores.of("shared") == pytest.approx((scores.keys + scores.values) / 2)


@pytest.mark.parametrize("pair", ["head_dim", "fewer heads"])
def test_heldout_rule_scores_other_text(pair):
    source_geo, target_geo = PAIRS[pair]
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    for rule in ("heldout", "paper"):  # the paper's does not exist for these pairs
        scores = score_layers_of(fit, held, rule)
        assert scores.rule == "heldout"
        assert scores.head_matched == (pair == "head_dim")
        n = ROWS - HELD
        heads = [[0], [1]] if pair == "head_dim" else [None, None]
        per_head = []
        for h, group in enumerate(heads):
            x = side_by_side([source.values[2]], group)
            y = target.values[1][h].astype(np.float64)
            per_head.append(ols_r2(x[:n], y[:n], x[n:], y[n:]))
        assert scores.values[1, 2] == pytest.approx(np.mean(per_head), abs=1e-4)


def score_layers_of(fit, held, rule):
    return score_layers(MomentSet.of(fit), MomentSet.of(held), rule=rule)


def test_k_and_separate_layers():
    source_geo, target_geo = geometry(4, 2, 8), geometry(1, 2, 8)
    rng = np.random.default_rng(8)
    source = noise(source_geo, ROWS, rng)
    keys = linear(source, target_geo, [[0]], rng, error=0.1)
    values = linear(source, target_geo, [[3]], rng, error=0.5)
    target = FeatureRows(keys.keys, values.values)
    fit, held = split(source_geo, target_geo, source, target)

    def layer(**changes):
        return solve_mapper(fit, held, replace(EXACT, **changes)).layers[0]

    m = layer(k=1, source_layers="separate")
    assert m.keys.sources == (0,) and m.values.sources == (3,)
    m = layer(k=1, k_values=2, source_layers="separate")
    assert len(m.keys.sources) == 1 and 3 in m.values.sources and len(m.values.sources) == 2
    m = layer(k=2)
    assert m.keys.sources == m.values.sources == (0, 3)
    assert layer(k="all").keys.sources == (0, 1, 2, 3)
    with pytest.warns(UserWarning, match="k is 99"):
        assert layer(k=99).keys.sources == (0, 1, 2, 3)
    assert layer(k=1, k_values="all").values.sources == (0, 1, 2, 3)


def test_one_layer_each():
    source_geo, target_geo = geometry(1, 1, 4), geometry(1, 1, 4)
    source, target = problem(source_geo, target_geo, error=0.0)
    fit, held = split(source_geo, target_geo, source, target)
    m = solve_mapper(fit, held, FitConfig(k=1, weight_format="float32")).layers[0]
    assert m.keys.sources == (0,) and m.r2_k > 0.9999


def test_ties_go_to_the_lower_layer():
    scores = np.array([[0.5, 0.7, 0.5, 0.7, np.nan, 0.1]])
    assert choose_layers(scores, 0, 1) == (1,)
    assert choose_layers(scores, 0, 3) == (0, 1, 3)
    assert choose_layers(scores, 0, "all") == (0, 1, 2, 3, 5)
    with pytest.raises(FitError, match="no usable|No source layer"):
        choose_layers(np.full((1, 2), np.nan), 0, 1)


def test_sliding_layers_feed_only_what_they_cover():
    windows = [8, None, 16]
    source_geo = geometry(3, 1, 4, windows=windows)
    target_geo = geometry(3, 1, 4, windows=[None, 12, 8])
    assert [allowed_sources(source_geo, target_geo, t) for t in range(3)] == [
        [1],
        [1, 2],
        [0, 1, 2],
    ]
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    mapper = solve_mapper(fit, held, replace(EXACT, k=2, layer_ranking="paper"))
    assert mapper.layers[0].keys.sources == (1,)
    assert set(mapper.layers[1].keys.sources) == {1, 2}
    sliding = geometry(2, 1, 4, windows=[8, 8])
    with pytest.raises(FitError, match="Target layer 0 attends to the whole text"):
        allowed_sources(sliding, target_geo, 0)
