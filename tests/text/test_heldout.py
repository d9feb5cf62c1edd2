"""Held-out documents: how they are taken, and that none was fitted on."""

from __future__ import annotations

import json

import pytest
from fit_problems import prose, tokenizer

from kvgraft.errors import EvaluationError
from kvgraft.text.corpus import read_text
from kvgraft.text.heldout import read_heldout


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
    monkeypatch.setattr("kvgraft.text.sources._PIECE", 1000)
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


def test_a_marker_separates_documents_in_plain_text_of_any_suffix(tmp_path):
    path = tmp_path / "notes.rst"
    texts = [prose(100, seed) for seed in range(3)]
    path.write_text("\ufeff" + "<|endoftext|>".join(texts))
    got = read([path], {}, count=3, length=300)
    starts = [tokenizer().decode(row[:100].tolist()) for row in got.tokens]
    assert starts == [text.strip()[:100] for text in texts]
    assert got.sources[0]["texts"] == 3
