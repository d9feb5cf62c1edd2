"""Maps out of moments against a least-squares solution on all rows."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import oracle
import pytest
from fit_problems import (
    cut,
    direct,
    gathered,
    geometry,
    linear,
    noise,
    r_squared,
    side_by_side,
)

from kvgraft.errors import FitError
from kvgraft.fit import FeatureRows, FitConfig, MomentSet, score_layers, solve_mapper
from kvgraft.fit.layer_ranking import allowed_sources, choose_layers
from kvgraft.fit.ridge import solve_ridge
from kvgraft.fit.solve import even_groups, head_plan
from kvgraft.models.geometry import ModelGeometry

ROWS, HELD = 420, 120
EXACT = FitConfig(weight_format="float32", k=2)


def split(source_geo, target_geo, source, target, held=HELD, **options):
    """Moments of the first rows and of the rest."""
    n = source.keys[0].shape[1] - held
    return (
        gathered(source_geo, target_geo, cut(source, 0, n), cut(target, 0, n), **options),
        gathered(
            source_geo, target_geo, cut(source, n, n + held), cut(target, n, n + held), **options
        ),
    )


def problem(source_geo, target_geo, *, rows=ROWS, error=0.3, local=False, seed=1):
    rng = np.random.default_rng(seed)
    source = noise(source_geo, rows, rng)
    n = len(source_geo.layers)
    sources = [[t % n, (t + 1) % n] for t in range(len(target_geo.layers))]
    return source, linear(source, target_geo, sources, rng, error=error, local=local)


def features_of(m, source: FeatureRows, kind: str, head: int) -> np.ndarray:
    group = None if m.heads is None else m.heads[head]
    return side_by_side([source.of(kind)[s] for s in m.sources], group)


PAIRS = {
    "equal": (geometry(4, 2, 8), geometry(3, 2, 8)),
    "head_dim": (geometry(4, 2, 8, 6), geometry(3, 2, 4, 10)),
    "fewer heads": (geometry(3, 4, 8), geometry(3, 2, 8)),
    "more heads": (geometry(3, 2, 8), geometry(4, 3, 6)),
}


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


@pytest.mark.parametrize("weights", ["float16", "bfloat16", "8bit", "4bit"])
def test_stored_weights_are_what_is_scored(weights):
    source_geo, target_geo = geometry(3, 2, 32), geometry(2, 2, 16)
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    exact = solve_mapper(fit, held, EXACT)
    config = replace(EXACT, weight_format=weights, group_size=32)
    rounded = solve_mapper(fit, held, config)
    lost = exact.layers[0].scores["r2_keys"] - rounded.layers[0].scores["r2_keys"]
    assert abs(lost) < {"float16": 1e-5, "bfloat16": 1e-3, "8bit": 1e-2, "4bit": 0.4}[weights]
    m = rounded.layers[0].keys
    x = [source.keys[s][:, -HELD:].astype(np.float64) for s in m.sources]
    from kvgraft.ops.quantized import dequantize

    got = oracle.map_layer(x, oracle.to_numpy(dequantize(m.weight)), oracle.to_numpy(m.bias))
    want = [r_squared(target.keys[0][h, -HELD:].astype(np.float64), got[h]) for h in range(2)]
    assert rounded.layers[0].scores["r2_keys"] == pytest.approx(np.mean(want), abs=1e-4)


@pytest.mark.parametrize("weights", ["8bit", "4bit"])
def test_what_rounding_costs_is_against_the_unrounded_map(weights):
    source_geo, target_geo = geometry(3, 2, 32), geometry(2, 2, 16)
    source, target = problem(source_geo, target_geo)
    # Means far from zero, which the intercept takes up, are where the two differ.
    source = FeatureRows([x + 5.0 for x in source.keys], [x - 5.0 for x in source.values])
    fit, held = split(source_geo, target_geo, source, target)
    exact = solve_mapper(fit, held, EXACT)
    rounded = solve_mapper(fit, held, replace(EXACT, weight_format=weights, group_size=32))
    for before, after in zip(exact.layers, rounded.layers, strict=True):
        for kind in ("keys", "values"):
            unrounded = after.scores[f"r2_{kind}_unrounded"]
            assert unrounded == pytest.approx(before.scores[f"r2_{kind}"], abs=1e-4)


def test_weights_beyond_float16_are_refused():
    source_geo, target_geo = geometry(1, 1, 4), geometry(1, 1, 4)
    rng = np.random.default_rng(0)
    source = noise(source_geo, 60, rng)
    target = FeatureRows([1e7 * x for x in source.keys], source.values)
    fit, held = split(source_geo, target_geo, source, target, held=10)
    with pytest.raises(FitError, match="layer 0, keys.*bfloat16"):
        solve_mapper(fit, held, FitConfig(k=1))
    assert solve_mapper(fit, held, FitConfig(k=1, weight_format="bfloat16")).layers[0].r2_k > 0.99


def test_groups_that_do_not_divide_are_refused():
    source_geo, target_geo = geometry(1, 1, 8), geometry(1, 1, 8)
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    with pytest.raises(FitError, match="groups of 64"):
        solve_mapper(fit, held, FitConfig(k=1, weight_format="4bit"))


# ----------------------------------------------------------------- ill-conditioned


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


@pytest.mark.parametrize("n, m", [(1, 1), (40, 7)])
def test_solver_reports_how(n, m):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3 * n, n)) * 10.0 ** rng.uniform(-6, 6, n)
    y = rng.standard_normal((3 * n, m))
    w, report = solve_ridge(x.T @ x, x.T @ y, 0.0)
    want = np.linalg.lstsq(x / np.abs(x).max(axis=0), y, rcond=None)[0]
    size = np.abs(x).max(axis=0)[:, None]
    assert np.abs(w * size - want).max() < 1e-9 * np.abs(want).max()
    # The sizes span twelve orders of magnitude; equilibrated they do not matter.
    assert report.method == "cholesky" and report.condition < 1e4
    indefinite = -np.eye(n) * 1.0
    indefinite[np.diag_indices(n)] = np.where(np.arange(n) % 2, 1.0, 1.0)
    if n > 1:
        indefinite[0, 1] = indefinite[1, 0] = 1.5
        solved, report = solve_ridge(indefinite, np.ones((n, m)), 0.0)
        assert report.method == "eigen" and np.isfinite(solved).all()
    with pytest.raises(FitError, match="NaN or infinity"):
        solve_ridge(np.full((n, n), np.nan), np.ones((n, m)), 0.0)


# ----------------------------------------------------------------------- selection


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


# ----------------------------------------------------------------------- head plans


def test_even_groups():
    assert even_groups(4, 2) == ((0, 1), (2, 3))
    assert even_groups(2, 4) == ((0,), (0,), (1,), (1,))
    assert even_groups(3, 5) == ((0,), (0,), (1,), (1,), (2,))
    assert even_groups(5, 3) == ((0, 1), (1, 2), (3, 4))
    for n in range(1, 9):
        for m in range(1, 9):
            groups = even_groups(n, m)
            assert len(groups) == m and len({len(g) for g in groups}) == 1
            assert {h for g in groups for h in g} == set(range(n))


def test_stated_groups():
    source_geo, target_geo = geometry(2, 4, 4), geometry(1, 2, 4)
    groups = ((3, 0), (1, 2))
    assert head_plan(source_geo, target_geo, 0, (0, 1), "grouped", groups) == groups
    source, target = problem(source_geo, target_geo)
    fit, held = split(source_geo, target_geo, source, target)
    m = solve_mapper(fit, held, replace(EXACT, head_mapping="grouped", groups=groups)).layers[0]
    n = ROWS - HELD
    x = side_by_side([source.keys[s] for s in m.keys.sources], (3, 0))
    w, _ = direct(x[:n], target.keys[0][0][:n], 0.01)
    size = x.std(axis=0)[:, None]
    assert np.abs((np.array(m.keys.weight[0]) - w) * size).max() < 1e-5 * np.abs(w * size).max()
    for bad in (((0,), (9,)), ((0,),)):
        with pytest.raises(FitError, match="do not fit"):
            head_plan(source_geo, target_geo, 0, (0, 1), "grouped", bad)


def test_models_with_mixed_head_counts():
    base = geometry(1, 2, 4).layers[0]
    mixed = ModelGeometry((base, replace(base, n_kv_heads=1)), "float32")
    assert head_plan(mixed, geometry(1, 2, 4), 0, (0, 1), "full") is None
    with pytest.raises(FitError, match="equal KV head counts"):
        head_plan(mixed, geometry(1, 2, 4), 0, (0, 1), "local")
    with pytest.raises(FitError, match="state the groups"):
        head_plan(mixed, geometry(1, 2, 4), 0, (0, 1), "grouped")
    source, target = problem(mixed, geometry(2, 2, 4))
    fit, held = split(mixed, geometry(2, 2, 4), source, target)
    mapper = solve_mapper(fit, held, replace(EXACT, k="all"))
    mapper.check()
    assert mapper.layers[0].keys.shape == (2, 12, 4)


# --------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": "some"},
        {"k_values": -1},
        {"ridge_lambda": -0.1},
        {"ridge_lambda": float("nan")},
        {"ridge_lambda": "best"},
        {"lambda_convention": "trace"},
        {"layer_ranking": "best"},
        {"head_mapping": "partial"},
        {"weight_format": "int8"},
        {"sequences": 1},
        {"stride": 0},
        {"seq_len": 8, "skip": 8},
        {"heldout": 0.0},
        {"heldout": 1.0},
        {"groups": ((0,), (1,))},
        {"head_mapping": "grouped", "groups": ((0,), (1, 2))},
        {"structure": "heads"},
        {"group_size": 48},
        {"memory_limit": 0},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(FitError):
        FitConfig(**wrong)


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
