"""The comparison of recipes, on little text: that it runs, goes on, and counts right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgraft.demo.data import bundled

ROOT = Path(__file__).parents[2]
SMALL = "--sequences 4 --seq-len 64 --heldout 0.25 --documents 2 --prefix 40 --scored 16 --k 4"
TUNING = "--tune-steps 2 --tune-batch 1"


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import fit_recipes

    return fit_recipes


def test_recipes_are_compared_and_a_second_call_reads_nothing(
    recipes, tmp_path, monkeypatch, capsys
):
    folder = ["--folder", str(tmp_path / "kept")]
    names = ["attention", "local", "low-rank", "together", "tuned"]
    found = recipes.run(
        [*SMALL.split(), *TUNING.split(), *folder, "--json", str(tmp_path / "x"), "--recipes"]
        + names
    )
    rows = {row["recipe"]: row for row in found["recipes"]}
    assert list(rows) == ["full", *names]
    native = np.array(found["native"])
    for row in rows.values():
        assert len(row["nll"]) == 2 and np.isfinite(row["nll"]).all()
        assert row["gap"][0] == pytest.approx(np.mean(row["nll"] - native))
    assert rows["full"]["rows"] == rows["attention"]["rows"] == 3 * 64
    assert rows["attention"]["nll"] != rows["full"]["nll"]
    assert rows["local"]["weights"] < rows["full"]["weights"]
    # No more than all layers have, and all that half of them leave, but for one rank.
    assert 0.9 < rows["low-rank"]["weights"] / rows["full"]["weights"] <= 1
    assert rows["together"]["weights"] == rows["full"]["weights"]
    assert "large -> small" in capsys.readouterr().out

    monkeypatch.setattr(recipes, "capture", None)
    monkeypatch.setattr(recipes, "read_documents", None)
    shipped = ["--mapper", str(bundled("mapper"))]
    again = recipes.run([*SMALL.split(), *folder, *shipped, "--recipes", "attention"])
    assert [row["recipe"] for row in again["recipes"]] == ["full", "attention", "mapper"]
    assert again["recipes"][2]["config"]["tuning"]["steps"] > 0
    assert again["recipes"][1]["nll"] == rows["attention"]["nll"]
    back = recipes.run([*SMALL.split(), *folder, "--swap", "--recipes", "half"])
    assert back["source"] == "small" and len(back["recipes"]) == 2


def test_an_unknown_recipe_is_refused(recipes, tmp_path):
    with pytest.raises(recipes.FitError, match="No recipe cake"):
        recipes.run([*SMALL.split(), "--recipes", "cake", "--folder", str(tmp_path / "kept")])


def test_a_low_rank_map_of_full_rank_is_the_map_of_all_layers(recipes):
    from benchmarks import low_rank
    from fit_problems import geometry, noise

    from kvgraft.fit import Moments, MomentSet
    from kvgraft.fit.ridge import solve_ridge

    source, target = geometry(3, 2, 4), geometry(1, 2, 4)
    moments = Moments(source, target)
    rng = np.random.default_rng(0)
    x, y = noise(source, 300, rng), noise(target, 300, rng)
    for i in range(3):
        y.keys[0][:] += (i + 1) * x.keys[i]
    moments.add(x, y)
    fit = MomentSet(moments)
    want, _ = solve_ridge(
        fit.xx("keys", (0, 1, 2), None), fit.xy("keys", (0, 1, 2), None, [0], None), 0.5
    )
    got = low_rank._solve(fit, "keys", 0, (1,), [0, 2], 8, 0.5, 0.5)
    assert np.abs(got - want).max() < 1e-8
    less = low_rank._solve(fit, "keys", 0, (1,), [0, 2], 2, 0.5, 0.5)
    others = np.r_[0:8, 16:24]
    assert np.linalg.matrix_rank(less[others], tol=1e-8) == 2
