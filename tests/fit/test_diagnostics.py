"""What a fit says when its map is worth little."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from kvgraft.cli.main import main
from kvgraft.demo.data import bundled
from kvgraft.errors import QualityWarning
from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.fit.diagnostics import quality_warnings
from kvgraft.mapper.mapper import Mapper

LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))


@pytest.fixture
def mapper() -> Mapper:
    """The bundled one, without what is known of it."""
    found = Mapper.load(bundled("mapper"))
    found.fit = {"k": 6, "plan": "full"}
    for m in found.layers:
        m.scores = {"r2_keys": 0.7, "r2_values": 0.6}
    return found


def choice(mapped: float, native: float, without: float) -> dict:
    trial = {"nll": mapped, "gap": mapped - native}
    return {
        "nll_without_context": without,
        "trials": [{**trial, "nll": 0.0, "chosen": False}, {**trial, "chosen": True}],
    }


def test_nothing_to_say_of_a_good_map(mapper):
    assert quality_warnings(mapper) == []
    mapper.fit["choice"] = choice(2.9, 2.7, 3.0)
    assert quality_warnings(mapper) == []


def test_next_to_nothing_explained(mapper):
    for m in mapper.layers:
        m.scores["r2_values"] = 0.02
    (what, advice) = quality_warnings(mapper)
    assert "nothing of the target's values" in what and "R2 0.020" in what
    assert "more text or a smaller k or head_mapping='local'" in advice and "re-prefill" in advice
    mapper.layers[0].scores["r2_keys"] = float("nan")
    assert len(quality_warnings(mapper)) == 3


def test_single_layers_below_their_mean(mapper):
    mapper.layers[1].scores["r2_keys"] = -0.3
    assert "the keys is negative for layer 1:" in quality_warnings(mapper)[0]
    mapper.layers[2].scores["r2_keys"] = -0.05
    assert "the keys is negative for layers 1, 2:" in quality_warnings(mapper)[0]


def test_tuned_maps_give_up_r2_on_purpose(mapper):
    mapper.layers[1].scores["r2_keys"] = -0.3
    mapper.fit["tuning"] = {"steps": 12}
    assert quality_warnings(mapper) == []
    mapper.fit["tuning"] = {"steps": 0}  # the closed form stands
    assert len(quality_warnings(mapper)) == 2


def test_a_gap_larger_than_the_context_is_worth(mapper):
    mapper.fit["choice"] = choice(3.1, 2.7, 3.0)
    (what, advice) = quality_warnings(mapper)
    assert "(loss 3.100) does not improve on no context at all (3.000)" in what
    assert "more text, or re-prefill" in advice  # smaller ones were tried
    mapper.fit["choice"] = choice(3.1, 3.05, 3.0)  # the target's own cache does not help either
    assert quality_warnings(mapper) == []


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Letters in no order: what is learnt from a few of them does not hold."""
    path = tmp_path_factory.mktemp("noise") / "noise.txt"
    letters = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
    path.write_bytes(letters.tobytes())
    return path


LITTLE = dict(sequences=4, seq_len=24, stride=1, k=6, head_mapping="full", ridge_lambda=1e-6)


def test_fit_mapper_warns(noise):
    with pytest.warns(QualityWarning, match="held-out text .*Fit on more text or a smaller k"):
        fit_mapper(LARGE, SMALL, noise, FitConfig(**LITTLE))


def test_the_command_says_it_last(noise, tmp_path, capsys):
    command = ["fit", "--source", LARGE, "--target", SMALL, "--text", str(noise)]
    command += (
        "--sequences 4 --seq-len 24 --stride 1 --lambda 1e-6 --k 6 --head-mapping full".split()
    )
    assert main([*command, "--out", str(tmp_path / "m")]) == 0
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith(
        "kvgraft: warning: Fit on more text or a smaller --k or --head-mapping local"
    )
    assert "on held-out text" in err[-2] and err[-2].startswith("kvgraft: warning: ")


def test_a_good_fit_does_not_warn_and_records_what_no_context_costs():
    config = FitConfig(
        sequences=12, seq_len=96, stride=1, k="auto", head_mapping="local", heldout=0.2, documents=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_mapper(LARGE, SMALL, bundled("text/calibration_stories.txt"), config)
    recorded = found.fit["choice"]
    native = recorded["trials"][0]["nll"] - recorded["trials"][0]["gap"]
    assert recorded["nll_without_context"] > native + 0.1
