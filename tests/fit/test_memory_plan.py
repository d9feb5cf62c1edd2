"""Memory and time of a fit, said beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fit_problems import gathered, geometry, noise, prose, save_model

from kvgraft.cli.main import main
from kvgraft.errors import FitError
from kvgraft.fit import FitConfig, forecast, plan_fit_memory
from kvgraft.fit.time_estimate import BlasRate, estimate_time, measure_blas
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec


def model(layers: int, heads: int, dim: int) -> ModelGeometry:
    layer = LayerGeometry(heads, dim, dim, RopeSpec(dim, base=1e6))
    return ModelGeometry((layer,) * layers, "bfloat16")


QWEN3 = model(28, 8, 128)


def test_moments_of_the_plan_are_those_that_are_made():
    source_geo, target_geo = geometry(4, 2, 8), geometry(3, 2, 8)
    rng = np.random.default_rng(0)
    rows = noise(source_geo, 10, rng), noise(target_geo, 10, rng)
    for plan, structure in (("full", "full"), ("local", "heads")):
        made = [
            gathered(source_geo, target_geo, *rows, structure=structure, dtype=dtype)
            for dtype in ("float64", "float32")
        ]
        planned = plan_fit_memory(source_geo, target_geo, FitConfig(head_mapping=plan))
        assert planned.structure == structure
        assert planned.moment_bytes == sum(m.nbytes for m in made)


@pytest.mark.parametrize(
    ("plan", "limit_gb"),
    [("full", 12), ("full", 20), ("full", 40), ("local", 6), ("local", 8), ("local", 12)],
)
def test_limits_are_kept_and_nothing_is_left_out(limit_gb, plan):
    config = FitConfig(head_mapping=plan, memory_limit=limit_gb * 10**9)
    planned = plan_fit_memory(QWEN3, QWEN3, config, model_bytes=(10**9, 3 * 10**9))
    assert planned.peak_bytes <= config.memory_limit
    seen = set()
    for one in planned.passes:
        assert sum(part.nbytes for part in one) <= planned.moment_bytes
        for part in one:
            heads = range(8) if part.heads is None else part.heads
            targets = range(28) if part.targets is None else part.targets
            for h in heads:
                for t in targets:
                    assert (part.kind, h, t) not in seen
                    seen.add((part.kind, h, t))
    assert len(seen) == 2 * 8 * 28
    assert planned.spill == (planned.disk_bytes > 0)


def test_tighter_limits_take_more_passes():
    passes = [
        len(plan_fit_memory(QWEN3, QWEN3, FitConfig(memory_limit=gb * 10**9)).passes)
        for gb in (40, 20, 12, 8)
    ]
    assert passes[0] == 1 and passes == sorted(passes) and passes[-1] > passes[1]


def test_auto_takes_the_structure_that_fits():
    config = FitConfig(head_mapping="auto", k="auto")
    assert plan_fit_memory(QWEN3, QWEN3, config).structure == "full"
    tight = replace(config, memory_limit=3 * 10**9)
    assert plan_fit_memory(QWEN3, QWEN3, tight).structure == "heads"
    with pytest.raises(FitError, match="memory_limit"):
        plan_fit_memory(QWEN3, model(28, 4, 128), tight)  # unequal heads have no such structure


def test_sequential_counts_one_model_and_the_rows_on_disk():
    config = FitConfig(sequential=True)
    planned = plan_fit_memory(QWEN3, QWEN3, config, model_bytes=(2 * 10**9, 3 * 10**9))
    both = plan_fit_memory(QWEN3, QWEN3, FitConfig(), model_bytes=(2 * 10**9, 3 * 10**9))
    assert both.peak_bytes - planned.peak_bytes == 2 * 10**9
    assert planned.disk_bytes == 500 * 256 * 2 * 28672 * 2  # rows, keys and values, bfloat16


def test_time_is_work_over_rate():
    rate = BlasRate(1e12, 5e11)
    config = FitConfig(k=8)
    planned = plan_fit_memory(QWEN3, QWEN3, config)
    took = estimate_time(planned, QWEN3, QWEN3, config, rate, 2.0, 500)
    assert took.models == 1000
    f = 28672
    products = 2 * 2 * 128_000 * f * (f * 29 / 56 + f)  # of which a tenth is held out
    assert took.moments == pytest.approx(products * (0.9 / 5e11 + 0.1 / 1e12), rel=1e-6)
    solving = 2 * 28 * (8192**3 / 3 + 4 * 8192**2 * 1024)
    assert took.solve == pytest.approx(solving / 5e11, rel=1e-6)
    local = replace(config, head_mapping="local")
    less = estimate_time(plan_fit_memory(QWEN3, QWEN3, local), QWEN3, QWEN3, local, rate, 2.0, 500)
    assert less.moments == pytest.approx(took.moments / 8, rel=1e-6)
    assert less.solve == pytest.approx(took.solve / 64, rel=0.2)
    auto = replace(config, k="auto", head_mapping="auto")
    assert estimate_time(planned, QWEN3, QWEN3, auto, rate, 2.0, 500).solve > took.solve
    rates = measure_blas(64)
    assert rates.single > 0 and rates.double > 0


def test_the_command_says_it_all(tmp_path, capsys):
    save_model(tmp_path / "a")
    save_model(tmp_path / "b", seed=1)
    (tmp_path / "text.txt").write_text(prose(100))
    pair = ["--source", str(tmp_path / "a"), "--target", str(tmp_path / "b"), "--seq-len", "32"]
    assert main(["plan", *pair, "--text", str(tmp_path / "text.txt")]) == 0
    out = capsys.readouterr().out
    for word in ("enough for", "models", "moments", "peak", "disk", "time", "sequences"):
        assert word in out
    assert main(["plan", *pair]) == 0
    assert "500 sequences" in capsys.readouterr().out
    assert main(["plan", *pair, "--memory-limit", "1M"]) == 1
    assert "--memory-limit of 1.0 MB" in capsys.readouterr().err
    found = forecast(tmp_path / "a", tmp_path / "b", None, FitConfig(seq_len=16))
    assert found.time.models > 0 and found.sequences == 500
