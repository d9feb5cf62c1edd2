"""Settings of a fit, and their keys in stored JSON."""

from __future__ import annotations

import pytest
from bundled_pair import LARGE, SMALL, TEXT

from kvgraft.demo.data import bundled
from kvgraft.errors import FitError
from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.mapper.mapper import Mapper


def test_stored_keys_are_those_of_every_release():
    stored = FitConfig(head_mapping="local", weight_format="8bit").to_dict()
    assert (stored["plan"], stored["weights"]) == ("local", "8bit")
    assert (stored["selection"], stored["layers"]) == ("heldout", "shared")
    assert not {"head_mapping", "weight_format", "layer_ranking", "source_layers"} & set(stored)


def test_a_new_record_has_the_keys_of_an_old_one():
    """The bundled mapper was stored before the fields had their present names."""
    old = Mapper.load(bundled("mapper")).fit
    config = FitConfig(
        sequences=4, seq_len=32, stride=1, k=2, layer_ranking="paper", source_layers="separate"
    )
    new = fit_mapper(LARGE, SMALL, TEXT, config).fit
    stored = {key: new[key] for key in ("plan", "weights", "layers", "selection")}
    assert stored == {
        "plan": "full", "weights": "float16", "layers": "separate", "selection": "paper"
    }  # fmt: skip
    # What else an old one has was measured, not set.
    assert {k for k in old if not k.startswith(("mean_", "second", "tuning"))} <= new.keys()


def test_auto_selects_k_of_the_values_too():
    with pytest.raises(FitError, match="k='auto' selects k_values too"):
        FitConfig(k="auto", k_values=4)


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
