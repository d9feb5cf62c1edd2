"""Source KV heads per target KV head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_problems import (
    EXACT,
    HELD,
    ROWS,
    direct,
    geometry,
    problem,
    side_by_side,
    split,
)

from kvgraft.errors import FitError
from kvgraft.fit import solve_mapper
from kvgraft.fit.head_mapping import even_groups, head_groups
from kvgraft.models.geometry import ModelGeometry


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
    assert head_groups(source_geo, target_geo, 0, (0, 1), "grouped", groups) == groups
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
            head_groups(source_geo, target_geo, 0, (0, 1), "grouped", bad)


def test_models_with_mixed_head_counts():
    base = geometry(1, 2, 4).layers[0]
    mixed = ModelGeometry((base, replace(base, n_kv_heads=1)), "float32")
    assert head_groups(mixed, geometry(1, 2, 4), 0, (0, 1), "full") is None
    with pytest.raises(FitError, match="equal KV head counts"):
        head_groups(mixed, geometry(1, 2, 4), 0, (0, 1), "local")
    with pytest.raises(FitError, match="state the groups"):
        head_groups(mixed, geometry(1, 2, 4), 0, (0, 1), "grouped")
    source, target = problem(mixed, geometry(2, 2, 4))
    fit, held = split(mixed, geometry(2, 2, 4), source, target)
    mapper = solve_mapper(fit, held, replace(EXACT, k="all"))
    mapper.check()
    assert mapper.layers[0].keys.shape == (2, 12, 4)
