"""Fits on keys and values that were captured elsewhere."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import oracle
import pytest
from fit_problems import geometry, noise, same_maps

from kvgraft.errors import FitError, GeometryError
from kvgraft.fit import FitConfig, fit_arrays
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.rope import RopeSpec


def arrays(geo: ModelGeometry, rows, rope: RopeSpec | None, at: np.ndarray):
    """``(keys with RoPE, values)`` per layer."""
    out = []
    for k, v in zip(rows.keys, rows.values):
        turned = k if rope is None else oracle.rotate(k, at, rope)
        out.append((mx.array(turned.astype(np.float32)), mx.array(v)))
    return out


@pytest.mark.parametrize("content_space", [True, False])
@pytest.mark.parametrize("plan", ["full", "local"])
def test_fit_on_arrays(content_space, plan):
    rope = RopeSpec(8, base=1e4)
    plain = geometry(3, 2, 8)
    geo = ModelGeometry(tuple(replace(g, rope=rope) for g in plain.layers), "float32")
    rng = np.random.default_rng(0)
    source, target = noise(plain, 300, rng), noise(plain, 300, rng)
    for t in range(3):  # a relation in content space
        for h in range(2):
            target.keys[t][h] = source.keys[t][h] @ rng.standard_normal((8, 8)).astype("f4")
            target.values[t][h] = 2 * source.values[t][h]
    at = np.arange(300) * 7 % 1000
    pairs = [arrays(geo, rows, rope, at) for rows in (source, target)]
    config = FitConfig(k=1, head_mapping=plan, content_space=content_space, weight_format="float32")
    mapper = fit_arrays(*pairs, geo, geo, mx.array(at), config)
    assert mapper.content_space == content_space
    for m in mapper.layers:
        assert m.r2_v > 0.999
        assert (m.r2_k > 0.999) == content_space  # a fixed map cannot follow the rotation
    if content_space:
        assert mapper.layers[2].keys.sources == (2,)
        by_layer = fit_arrays(dict(enumerate(pairs[0])), pairs[1], geo, geo, mx.array(at), config)
        same_maps(by_layer, mapper)


def test_more_source_layers_than_there_are():
    geo = geometry(2, 2, 4)
    given = arrays(geo, noise(geo, 40, np.random.default_rng(0)), None, np.arange(40))
    with pytest.warns(UserWarning, match="^k_values is 5, and the source has 2 layers"):
        mapper = fit_arrays(given, given, geo, geo, None, FitConfig(k=1, k_values=5))
    assert mapper.fit["k_values"] == 2


def test_arrays_that_do_not_fit_are_refused():
    geo = geometry(2, 2, 4)
    rows = noise(geo, 40, np.random.default_rng(0))
    good = arrays(geo, rows, None, np.arange(40))
    config = FitConfig(k=1)
    with pytest.raises(GeometryError, match="2 layers, got 1"):
        fit_arrays(good[:1], good, geo, geo, None, config)
    with pytest.raises(GeometryError, match=r"missing are \[1\]"):
        fit_arrays(good, {0: good[0]}, geo, geo, None, config)
    with pytest.raises(GeometryError, match="layer 1 must be keys"):
        fit_arrays([good[0], (good[1][0][:1], good[1][1])], good, geo, geo, None, config)
    with pytest.raises(GeometryError, match="different numbers of tokens"):
        fit_arrays([(k[:, :9], v[:, :9]) for k, v in good], good, geo, geo, None, config)
    with pytest.raises(GeometryError, match="need 40 positions"):
        fit_arrays(good, good, geo, geo, mx.arange(3), config)
    with pytest.raises(FitError, match="too few"):
        few = [(k[:, :2], v[:, :2]) for k, v in good]
        fit_arrays(few, few, geo, geo, None, config)
    bad = [(k, mx.full(v.shape, float("inf"))) for k, v in good]
    with pytest.raises(FitError, match="source model's values of layer 0"):
        fit_arrays(bad, good, geo, geo, None, config)
