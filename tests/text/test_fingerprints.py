"""Fingerprints find shared runs wherever they lie, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fit_problems import prose, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.errors import EvaluationError
from kvgraft.fit import read_text
from kvgraft.text import fingerprints as overlap
from kvgraft.text.heldout import read_heldout

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


@pytest.fixture
def files(tmp_path):
    texts = {name: prose(900, seed) for seed, name in enumerate(("fitted", "other", "third"))}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def read(paths, fit, **options):
    options = {"count": 4, "length": 600, **options}
    return read_heldout(paths, tokenizer(), fit, **options)


def test_the_fit_stores_what_an_evaluation_compares(files):
    text = read_text(files / "fitted.txt", tokenizer(), sequences=4, seq_len=512)
    fit = {"text": json.loads(json.dumps(text.describe()))}
    got = read([files / "other.txt", files / "third.txt"], fit)
    assert len(got) == 4 and "fingerprints in the artifact" in got.disjoint
    # A part of the fitted text, under another name and moved by some words.
    moved = files / "moved.txt"
    moved.write_text("some words before it " + (files / "fitted.txt").read_text()[300:2200])
    with pytest.raises(EvaluationError, match="the mapper was fitted on"):
        read([moved, files / "other.txt"], fit)


def test_the_same_file_is_told_by_its_digest(files):
    text = read_text(files / "fitted.txt", tokenizer(), sequences=99, seq_len=512)
    facts = text.describe()
    del facts["fingerprints"]
    # The digest is of the text as it was read; documents lose the white space around them.
    path = files / "fitted.txt"
    path.write_text(path.read_text().strip())
    facts = read_text(path, tokenizer(), sequences=99, seq_len=512).describe()
    del facts["fingerprints"]
    with pytest.raises(EvaluationError, match="same SHA-256"):
        read([path], {"text": facts})


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_that_was_fitted_on_in_part_is_told_by_its_digest(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kvgraft.text.corpus._PIECE", 1000)
    path = tmp_path / f"fitted{suffix}"
    texts = [prose(300, seed) for seed in range(6)]
    lines = [json.dumps({"text": t}) for t in texts] if suffix == ".jsonl" else texts
    path.write_text("\n".join(lines) + "\n")
    text = read_text(path, tokenizer(), sequences=3, seq_len=400).describe()
    whole = sum(len(tokenizer().encode(t)) for t in texts)
    assert text["sources"][0]["tokens_read"] < 0.9 * whole, "the fit left some of it"
    del text["fingerprints"]
    with pytest.raises(EvaluationError, match="same SHA-256"):
        read([path], {"text": text})
    other = tmp_path / f"other{suffix}"
    other.write_text("\n".join(reversed(lines)) + "\n")
    assert len(read([other], {"text": text})) == 4


def test_repeated_documents_count_once(tmp_path):
    texts = [prose(300, seed) for seed in range(3)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(t) for t in [*texts[:2], *texts]))
    got = read([path], {}, count=3)
    assert len({row.tobytes() for row in got.tokens}) == len(got) == 3
    assert got.notes == ("2 repeated documents were dropped.",)
    assert read([path], {}, count=2).notes == ()
    path.write_text("\n".join([json.dumps(texts[0])] * 3))
    with pytest.raises(EvaluationError, match="1 documents"):
        read([path], {}, count=3, length=900)


def test_an_old_artifact_needs_the_calibration_text(files):
    got = read([files / "other.txt"], {})
    assert got.disjoint is None and got.describe()["disjoint"] is None
    got = read([files / "other.txt"], {}, calibration=[files / "fitted.txt"])
    assert "calibration text given" in got.disjoint
    with pytest.raises(EvaluationError, match="share 64"):
        read([files / "fitted.txt"], {}, calibration=[files / "fitted.txt"])


def test_documents_are_told_apart_and_taken_in_turn(tmp_path):
    a, b = tmp_path / "a.txt", tmp_path / "b.jsonl"
    long = [prose(200, s) for s in range(3)]
    a.write_text("".join(f"<|endoftext|>{t}" for t in (long[0], "short", long[1])))
    b.write_text(json.dumps({"text": long[2]}))
    tok = tokenizer(bos=True)
    got = read_heldout([a, b], tok, {}, count=3, length=300)
    starts = [tok.decode(row[1:100].tolist()) for row in got.tokens]
    assert [s == t[:99] for s, t in zip(starts, (long[0], long[2], long[1]))] == [True] * 3
    assert (got.tokens[:, 0] == tok.bos_token_id).all()
    # More stretches of the long texts where there are too few texts.
    more = read_heldout([a, b], tok, {}, count=99, length=300)
    assert len(more) > 3 and len({row.tobytes() for row in more.tokens}) == len(more)


def test_too_little_text_is_refused(files):
    with pytest.raises(EvaluationError, match="at least 2"):
        read([files / "other.txt"], {}, length=5000)
    with pytest.raises(EvaluationError, match="Cannot read"):
        read([files / "absent.txt"], {})
    with pytest.raises(EvaluationError, match="Give held-out text"):
        read([], {})
