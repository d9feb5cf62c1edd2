"""Weights as they are stored: rounding, range and quantisation groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
from fit_problems import (
    EXACT,
    HELD,
    geometry,
    noise,
    problem,
    r_squared,
    split,
)

from kvgraft.errors import FitError
from kvgraft.fit import FeatureRows, FitConfig, solve_mapper
from kvgraft.fit.weight_format import storage_problem


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_mapping": "local", "k": 3}, "k=3 has 12; k=8 would do"),
        ({"head_mapping": "full", "k": 3}, "k=3 has 24; k=4 would do"),
        ({"head_mapping": "full", "k": 4, "k_values": 5}, "k_values=5 has 40; k_values=4 would do"),
    ],
)
def test_what_cannot_be_quantised_is_known_beforehand(settings, message):
    geo = geometry(28, 2, 4)
    config = replace(EXACT, weight_format="4bit", group_size=32, **settings)
    assert message in (storage_problem(geo, geo, config) or "")
    assert storage_problem(geo, geo, replace(config, weight_format="float16")) is None
    assert storage_problem(geo, geo, replace(config, k=8, k_values=None)) is None
    assert storage_problem(geo, geo, replace(config, k="auto", k_values=None)) is None
