"""Calibration text: what is read, how it is cut, what is held out."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from fit_problems import prose, tokenizer
from texts import TOKENIZER, decoded, words

from kvgraft.errors import FitError
from kvgraft.fit import CalibrationText, TextSource, parse_source, read_text
from kvgraft.text import sources as sources_module


def test_sequences_are_the_text_in_order(tmp_path):
    path = words(tmp_path / "a.txt")
    got = read_text(path, TOKENIZER, sequences=10, seq_len=50)
    assert got.tokens.shape == (10, 50) and got.tokens.dtype == np.int32
    assert decoded(got.tokens) == path.read_text()[:500]
    assert got.heldout.tolist() == [False] * 9 + [True]
    assert got.notes == ()
    facts = got.describe()
    assert facts["tokens"] == 450 and facts["heldout_tokens"] == 50
    assert facts["sources"][0]["name"] == "a.txt" and facts["sources"][0]["sequences"] == 10
    assert facts["sources"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    json.dumps(facts)


def test_pieces_of_a_long_file_join_up(tmp_path, monkeypatch):
    path = words(tmp_path / "a.txt")
    path.write_text(path.read_text().replace(". ", ".\n"))
    whole = read_text(path, TOKENIZER, sequences=100, seq_len=64)
    monkeypatch.setattr(sources_module, "_PIECE", 100)
    assert read_text(path, TOKENIZER, sequences=100, seq_len=64).digest == whole.digest


def test_only_as_much_is_read_as_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "_PIECE", 100)
    path = tmp_path / "a.txt"
    path.write_text("some words on a line\n" * 50 + prose(5000))
    path.write_text("\n".join(prose(10, i).strip() for i in range(500)))
    got = read_text(path, TOKENIZER, sequences=2, seq_len=40)
    assert got.sources[0]["tokens_read"] < 400


def test_bos_begins_every_sequence_where_the_tokenizer_adds_it(tmp_path):
    with_bos = tokenizer(bos=True)
    got = read_text(words(tmp_path / "a.txt"), with_bos, sequences=4, seq_len=20)
    assert (got.tokens[:, 0] == with_bos.bos_token_id).all()
    assert (got.tokens[:, 1:] != with_bos.bos_token_id).all()
    assert decoded(got.tokens[:, 1:]) == (tmp_path / "a.txt").read_text()[: 4 * 19]


def test_mix_follows_the_weights(tmp_path):
    a, b = words(tmp_path / "a.txt", seed=1), words(tmp_path / "b.txt", seed=2)
    sources = [TextSource(a, weight=3), TextSource(b, weight=1)]
    got = read_text(sources, TOKENIZER, sequences=40, seq_len=32)
    assert [s["sequences"] for s in got.sources] == [30, 10]
    # Of each source the end is held out, so that the mix is in both parts.
    held = decoded(got.tokens[got.heldout])
    assert got.heldout.sum() == 4
    assert held[-32:] in b.read_text() and held[:32] in a.read_text()
    assert a.read_text().index(held[:32]) == 27 * 32


def test_what_one_source_lacks_comes_from_the_others(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(prose(30, 9)[:100])
    long = words(tmp_path / "long.txt")
    got = read_text([short, long], TOKENIZER, sequences=20, seq_len=32)
    assert [s["sequences"] for s in got.sources] == [3, 17]
    assert len(got) == 20


def test_too_little_text_is_used_with_a_note(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(prose(100)[:325])
    got = read_text(path, TOKENIZER, sequences=500, seq_len=32)
    assert len(got) == 10 and "10 sequences of 32 tokens, not the 500" in got.notes[0]


def test_far_too_little_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("just one line")
    with pytest.raises(FitError, match="13 tokens, less than the two sequences of 1,024"):
        read_text(path, TOKENIZER)
    path.write_text("")
    with pytest.raises(FitError, match="0 tokens"):
        read_text(path, TOKENIZER)


def test_repeated_text_is_not_both_fitted_and_held_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(prose(100)[:64] * 20)
    with pytest.raises(FitError, match="19 repeated sequences were dropped"):
        read_text(path, TOKENIZER, sequences=20, seq_len=64)
    path.write_text(prose(100)[:64] * 20 + prose(100, 5)[:64])
    got = read_text(path, TOKENIZER, sequences=99, seq_len=64)
    assert len(got) == 2 and any("repeated" in note for note in got.notes)


def test_digest_sees_tokens_and_split(tmp_path):
    path = words(tmp_path / "a.txt")
    base = read_text(path, TOKENIZER, sequences=20, seq_len=32)
    assert read_text(path, TOKENIZER, sequences=20, seq_len=32).digest == base.digest
    digests = {
        base.digest,
        read_text(path, TOKENIZER, sequences=20, seq_len=32, heldout=0.3).digest,
        read_text(path, TOKENIZER, sequences=19, seq_len=32).digest,
        read_text(path, TOKENIZER, sequences=20, seq_len=31).digest,
        read_text(path, tokenizer(bos=True), sequences=20, seq_len=32).digest,
    }
    assert len(digests) == 5


def test_arguments(tmp_path):
    path = words(tmp_path / "a=2.txt")
    assert parse_source(str(path)) == TextSource(path)
    assert parse_source("b.txt=2.5") == TextSource(parse_source("b.txt").path, 2.5)
    assert parse_source("b.txt=x").path.name == "b.txt=x"
    for bad in (f"{path}=x", f"{path}=", "hf:owner/name=1,5"):
        with pytest.raises(FitError, match="weight of .* must be a number"):
            parse_source(bad)
    with pytest.raises(FitError, match="weight"):
        parse_source(f"{path}=inf")
    for wrong in ({"sequences": 1}, {"heldout": 0}, {"heldout": 1.0}, {"seq_len": 1}):
        with pytest.raises(FitError):
            read_text(path, TOKENIZER, **{"seq_len": 32, **wrong})
    with pytest.raises(FitError, match="No calibration text"):
        read_text([], TOKENIZER)
    with pytest.raises(FitError, match="weight"):
        TextSource(path, weight=0)
    in_memory = TextSource(None, documents=(prose(200), prose(200, 1)))
    assert len(read_text(in_memory, TOKENIZER, sequences=5, seq_len=32)) == 5
    with pytest.raises(FitError, match="at least one sequence"):
        CalibrationText(np.zeros((2, 4), np.int32), np.array([True, True]))
