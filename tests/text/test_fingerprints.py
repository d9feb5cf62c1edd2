"""Fingerprints find shared runs wherever they lie, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.errors import EvaluationError
from kvgraft.text import fingerprints as overlap

CALIBRATION = np.random.default_rng(0).integers(0, 5000, (40, 700))
KNOWN = overlap.fingerprints(CALIBRATION)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 39), st.integers(0, 444), st.integers(0, 744), st.integers(0, 2**31))
def test_a_shared_run_of_guaranteed_length_is_always_found(row, there, here, seed):
    document = np.random.default_rng(seed).integers(5000, 9000, 1000)
    document[here : here + overlap.GUARANTEE] = CALIBRATION[row, there : there + overlap.GUARANTEE]
    assert overlap.shared(document.tolist(), KNOWN) > 0


def test_other_text_is_not_found():
    rng = np.random.default_rng(1)
    assert not any(overlap.shared(rng.integers(0, 5000, 1000).tolist(), KNOWN) for _ in range(200))


def test_short_repetitions_do_not_count():
    rng = np.random.default_rng(2)
    for i in range(40):
        document = rng.integers(5000, 9000, 800)
        document[100 : 99 + overlap.RUN] = CALIBRATION[i, 50 : 49 + overlap.RUN]
        assert overlap.shared(document.tolist(), KNOWN) == 0


def test_all_of_a_fitted_text_is_shared():
    assert overlap.shared(CALIBRATION[7].tolist(), KNOWN) == 1


def test_short_sequences_have_one_fingerprint_each():
    short = overlap.fingerprints([[1, 2, 3], [4], []])
    assert len(short) == 2
    assert overlap.shared([1, 2, 3], short) == 1 and overlap.shared([3, 2, 1], short) == 0
    assert overlap.shared([], short) == 0 and overlap.shared([1], overlap.fingerprints([])) == 0


def test_they_survive_json():
    stored = json.loads(json.dumps(overlap.encode(KNOWN)))
    assert np.array_equal(overlap.decode(stored), KNOWN)
    assert overlap.decode(None) is None and overlap.decode({"form": "other"}) is None
    assert overlap.decode({**stored, "run": 3}) is None
    with pytest.raises(EvaluationError, match="damaged"):
        overlap.decode({**stored, "data": "%%"})


def test_about_one_number_per_hundred_tokens_is_kept():
    assert CALIBRATION.size / 150 < len(KNOWN) < CALIBRATION.size / 80
