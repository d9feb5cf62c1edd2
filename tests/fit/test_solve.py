"""Maps out of moments against a least-squares solution on all rows."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import oracle
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
from kvgraft.fit import FeatureRows, FitConfig, solve_mapper


def features_of(m, source: FeatureRows, kind: str, head: int) -> np.ndarray:
    group = None if m.heads is None else m.heads[head]
    return side_by_side([source.of(kind)[s] for s in m.sources], group)


@pytest.mark.parametrize("pair", list(PAIRS))
@pytest.mark.parametrize("plan", ["full", "local", "grouped"])
@pytest.mark.parametrize("convention, lam", [("gram", 0.01), ("gram", 50.0), ("covariance", 0.05)])
def test_equals_least_squares_on_all_rows(pair, plan, convention, lam):
    source_geo, target_geo = PAIRS[pair]
    config = replace(EXACT, head_mapping=plan, lambda_convention=convention, ridge_lambda=lam)
    if plan == "local" and pair in ("fewer heads", "more heads"):
        source, target = problem(source_geo, target_geo)
        fit, held = split(source_geo, target_geo, source, target)
        with pytest.raises(FitError, match="equal KV head counts"):
            solve_mapper(fit, held, config)
        return
    source, target = problem(source_geo, target_geo)
    structure = "heads" if plan == "local" else "full"
    fit, held = split(source_geo, target_geo, source, target, structure=structure)
    mapper = solve_mapper(fit, held, config)
    mapper.check()
    n = ROWS - HELD
    ridge = lam * (n if convention == "covariance" else 1)
    for m in mapper.layers:
        for kind, part in (("keys", m.keys), ("values", m.values)):
            r2 = []
            for h in range(target_geo.layers[m.target_layer].n_kv_heads):
                x = features_of(part, source, kind, h)
                y = target.of(kind)[m.target_layer][h].astype(np.float64)
                w, b = direct(x[:n], y[:n], ridge)
                got_w, got_b = np.array(part.weight[h]), np.array(part.bias[h])
                # Features differ by a factor of 100 in size: compare what they do.
                size = x[:n].std(axis=0)[:, None]
                assert np.abs((got_w - w) * size).max() < 1e-5 * np.abs(w * size).max()
                assert np.abs(got_b - b).max() < 1e-4 * (1 + np.abs(b).max())
                r2.append(r_squared(y[n:], x[n:] @ w + b))
                assert m.scores[f"r2_{kind}.{h}"] == pytest.approx(r2[-1], abs=1e-4)
            assert m.scores[f"r2_{kind}"] == pytest.approx(np.mean(r2), abs=1e-4)
            assert m.scores[f"r2_{kind}_fit"] > m.scores[f"r2_{kind}"] > 0.2


def test_in_sample_score_is_that_of_the_rows():
    source_geo, target_geo = PAIRS["equal"]
    source, target = problem(source_geo, target_geo)
    fit, _ = split(source_geo, target_geo, source, target)
    m = solve_mapper(fit, None, replace(EXACT, ridge_lambda=20.0, layer_ranking="paper")).layers[0]
    n = ROWS - HELD
    want = []
    for h in range(2):
        x, y = features_of(m.values, source, "values", h)[:n], target.values[0][h][:n]
        w, b = direct(x, y, 20.0)
        want.append(r_squared(y, x @ w + b))
    assert m.scores["r2_values_fit"] == pytest.approx(np.mean(want), abs=1e-5)
    assert "r2_values" not in m.scores


def test_planted_relation_is_found_and_applied():
    source_geo, target_geo = geometry(5, 2, 8, 6), geometry(3, 2, 4, 10)
    rng = np.random.default_rng(3)
    source = noise(source_geo, ROWS, rng)
    planted = [[4, 1], [0, 2], [3, 1]]
    target = linear(source, target_geo, planted, rng, error=1e-3)
    fit, held = split(source_geo, target_geo, source, target)
    mapper = solve_mapper(fit, held, EXACT)
    for m, want in zip(mapper.layers, planted, strict=True):
        assert list(m.keys.sources) == sorted(want) == list(m.values.sources)
        assert min(m.scores["r2_keys"], m.scores["r2_values"]) > 0.999
        got = oracle.map_layer(
            [source.keys[s].astype(np.float64) for s in m.keys.sources],
            oracle.to_numpy(m.keys.weight),
            oracle.to_numpy(m.keys.bias),
        )
        assert oracle.nmse(got, target.keys[m.target_layer].astype(np.float64)) < 1e-5


def test_noise_scores_nothing_held_out_and_a_lot_in_sample():
    source_geo, target_geo = geometry(4, 2, 16), geometry(2, 2, 16)
    rng = np.random.default_rng(0)
    source, target = noise(source_geo, 400, rng), noise(target_geo, 400, rng)
    fit, held = split(source_geo, target_geo, source, target, held=150)
    for m in solve_mapper(fit, held, replace(EXACT, k="all")).layers:
        for kind in ("keys", "values"):
            assert m.scores[f"r2_{kind}_fit"] > 0.4  # 128 features on 250 rows
            assert m.scores[f"r2_{kind}"] < 0.0


def test_duplicate_and_constant_features():
    source_geo, target_geo = geometry(3, 2, 8), geometry(2, 2, 8)
    source, target = problem(source_geo, target_geo, error=0.01)
    source.keys[1][:] = source.keys[0]  # a layer twice
    source.values[0][:] = 7.0  # a layer that never varies
    fit, held = split(source_geo, target_geo, source, target)
    for lam in (0.0, 1.0):
        mapper = solve_mapper(fit, held, replace(EXACT, k="all", ridge_lambda=lam))
        assert [m.keys.sources for m in mapper.layers] == [(0, 1, 2)] * 2
        for m in mapper.layers:
            assert np.isfinite(np.array(m.keys.weight)).all()
            assert np.isfinite(np.array(m.values.weight)).all()
            assert np.abs(np.array(m.values.weight)[:, :16]).max() == 0.0
            assert 1 < m.scores["condition_keys"] <= 1e300
        # Half of what layer 0 was made of is gone with the old layer 1.
        assert 0.2 < mapper.layers[0].scores["r2_keys"] < 0.8
        assert mapper.layers[1].scores["r2_values"] > 0.99
        assert bool(mapper.layers[0].scores.get("unstable_keys")) == (lam == 0.0)


def test_more_features_than_rows():
    source_geo, target_geo = geometry(4, 2, 16), geometry(1, 2, 8)
    rng = np.random.default_rng(0)
    source, target = noise(source_geo, 60, rng), noise(target_geo, 60, rng)
    fit, held = split(source_geo, target_geo, source, target, held=20)
    config = replace(EXACT, k="all", ridge_lambda=0.1)
    m = solve_mapper(fit, held, config).layers[0]
    x, y = side_by_side(source.keys)[:40], target.keys[0][0][:40]
    w, _ = direct(x, y, 0.1)
    size = x.std(axis=0)[:, None]
    got = np.array(m.keys.weight[0])
    assert np.abs((got - w) * size).max() < 2e-3 * np.abs(w * size).max()
    assert m.scores["r2_keys_fit"] > 0.99 > m.scores["r2_keys"]


@pytest.mark.parametrize("plan", ["full", "local"])
def test_lambda_by_held_out_score(plan):
    # More features than the rows can tell apart, and noise: λ matters, and more for
    # the values, which are noisier.
    source_geo, target_geo = geometry(4, 2, 12), geometry(2, 2, 8)
    rng = np.random.default_rng(3)
    source = noise(source_geo, 260, rng)
    target = linear(source, target_geo, [[0, 1], [2, 3]], rng, error=1.0)
    louder = [v + 6.0 * rng.standard_normal(v.shape).astype(np.float32) for v in target.values]
    fit, held = split(source_geo, target_geo, source, FeatureRows(target.keys, louder), held=80)
    config = replace(EXACT, k="all", head_mapping=plan)
    auto = solve_mapper(fit, held, replace(config, ridge_lambda="auto"))
    fixed = [solve_mapper(fit, held, replace(config, ridge_lambda=10.0**e)) for e in range(-3, 5)]
    for t, m in enumerate(auto.layers):
        for kind in ("keys", "values"):
            best = max(one.layers[t].scores[f"r2_{kind}"] for one in fixed)
            assert m.scores[f"r2_{kind}"] > best - 0.02
            same = replace(config, ridge_lambda=m.scores[f"lambda_{kind}"])
            again = solve_mapper(fit, held, same).layers[t]
            assert mx.allclose(getattr(again, kind).weight, getattr(m, kind).weight, rtol=1e-4)
        assert m.scores["lambda_values"] > m.scores["lambda_keys"]
    assert auto.fit["mean_r2_values"] > fixed[0].fit["mean_r2_values"] + 0.05
    assert auto.fit["lambda"] == "auto"
    with pytest.raises(FitError, match="held-out text"):
        solve_mapper(fit, None, replace(config, ridge_lambda="auto", layer_ranking="paper"))


def test_constant_target():
    source_geo, target_geo = geometry(2, 2, 4), geometry(1, 2, 4)
    source, target = problem(source_geo, target_geo)
    target.keys[0][1] = 5.0
    fit, held = split(source_geo, target_geo, source, target)
    m = solve_mapper(fit, held, EXACT).layers[0]
    assert np.abs(np.array(m.keys.weight[1])).max() == 0.0
    assert np.array(m.keys.bias[1]) == pytest.approx(5.0)
    assert m.scores["r2_keys.1"] == 1.0


def test_no_rows():
    from kvgraft.fit import Moments

    with pytest.raises(FitError, match="no rows"):
        solve_mapper(Moments(geometry(1, 1, 4), geometry(1, 1, 4)), None, FitConfig(k=1))


def test_weights_are_ready_to_use():
    source_geo, target_geo = PAIRS["equal"]
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    seen = []
    mapper = solve_mapper(
        fit, held, FitConfig(k=1), progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert mapper.layers[0].keys.weight.dtype == mx.float16
    assert mapper.layers[0].keys.bias.dtype == mx.float32
    assert mapper.fit["rows"] == ROWS - HELD and mapper.fit["heldout_rows"] == HELD
