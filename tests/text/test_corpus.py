"""Calibration text: what is read, how it is cut, what is held out."""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fit_problems import prose, tokenizer

from kvgraft.errors import FitError
from kvgraft.fit import CalibrationText, TextSource, parse_source, read_text
from kvgraft.text import corpus as text_module
from kvgraft.text.corpus import check_sources

TOKENIZER = tokenizer()


def words(path, n=2000, seed=0):
    path.write_text(prose(n, seed))
    return path


def decoded(rows) -> str:
    return TOKENIZER.decode(rows.reshape(-1))


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
    monkeypatch.setattr(text_module, "_PIECE", 100)
    assert read_text(path, TOKENIZER, sequences=100, seq_len=64).digest == whole.digest


def test_only_as_much_is_read_as_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_PIECE", 100)
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


def test_jsonl_documents_are_set_apart(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"text": "first one"}, "second as a string", {"text": ""}, {"text": "last"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    got = read_text(path, TOKENIZER, sequences=99, seq_len=8)
    joined = "first one\n\nsecond as a string\n\nlast\n\n"
    assert decoded(got.tokens) == joined[: len(joined) // 8 * 8]


def test_jsonl_field_and_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    body = "0123456789abcdefghijklmnopqrstuvwxyz"
    chat = [
        {"role": "user", "content": "ask me now " * 5},
        {"role": "assistant", "content": "tell you then " * 5},
    ]
    path.write_text(json.dumps({"body": body}) + "\n" + json.dumps({"messages": chat}) + "\n")
    source = TextSource(path, field="body")
    plain = read_text(source, TOKENIZER, sequences=99, seq_len=10)
    assert decoded(plain.tokens).startswith(body + "\n\n" + "ask me now " * 5 + "\n\ntell you")

    class Templated:
        encode = TOKENIZER.encode

        def apply_chat_template(self, messages, tokenize):
            assert tokenize is False
            return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    templated = read_text(source, Templated(), sequences=99, seq_len=10, chat=True)
    assert "<user>ask me" in decoded(templated.tokens)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2 is not JSON"),
        ('{"other": "x"}', "line 2 has no text under 'text'"),
        ("[1]", "line 2 has no text"),
        ('{"messages": ["x"]}', "line 2 has no text under 'text', and no list of messages"),
    ],
)
def test_bad_jsonl_is_located(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(FitError, match=message):
        read_text(path, TOKENIZER, sequences=4, seq_len=8)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (
        ("a.jsonl", '{"text": "and so on and on and on"}'),
        ("a.txt", "and so on " * 9),
    ):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())
        text = read_text(path, TOKENIZER, sequences=2, seq_len=8)
        assert decoded(text.tokens).startswith("and so on")


def test_a_template_that_fails_is_located(tmp_path):
    class Picky:
        encode = TOKENIZER.encode

        def apply_chat_template(self, messages, tokenize):
            raise IndexError("no messages")

    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(FitError, match="line 1: the chat template .*no messages"):
        read_text(path, Picky(), sequences=2, seq_len=8, chat=True)


def test_half_a_character_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud800 and so on and on and on and on"}\n')
    text = read_text(path, TOKENIZER, sequences=2, seq_len=8)
    assert decoded(text.tokens).startswith("? and so on")


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8"), ("gone.txt", None, "Cannot read")],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FitError, match=message) as caught:
        read_text(path, TOKENIZER)
    assert name in str(caught.value)


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


def test_files_are_looked_for_before_work(tmp_path):
    path = words(tmp_path / "a.txt")
    check_sources([path, TextSource(None, documents=("some text",)), parse_source("hf:owner/name")])
    for missing in (tmp_path / "b.txt", tmp_path):
        with pytest.raises(FitError, match=f"calibration text {missing}:"):
            check_sources([path, missing])


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


# ------------------------------------------------------- optional kinds of sources


def test_parquet(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"document number {i} " * 3 for i in range(300)]
    parquet.write_table(pa.table({"text": texts, "id": list(range(300))}), path)
    got = read_text(path, TOKENIZER, sequences=20, seq_len=50)
    assert decoded(got.tokens) == "\n\n".join(texts)[:1000]
    with pytest.raises(FitError, match="no text under 'body'"):
        read_text(TextSource(path, field="body"), TOKENIZER, sequences=4, seq_len=8)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(FitError, match="a.parquet"):
        read_text(path, TOKENIZER, sequences=4, seq_len=8)


def test_missing_packages_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(FitError, match=r"pip install 'kvgraft\[data\]'"):
        read_text(tmp_path / "a.parquet", TOKENIZER)
    with pytest.raises(FitError, match=r"datasets package: pip install 'kvgraft\[data\]'"):
        read_text(parse_source("hf:owner/name"), TOKENIZER)


def test_datasets_are_streamed(monkeypatch):
    asked = []

    def load_dataset(repo, config, *, split, streaming):
        asked.append((repo, config, split, streaming))
        if repo == "owner/gone":
            raise ConnectionError("no network")
        return ({"text": f"row {i} of many"} for i in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = parse_source("hf:owner/name:sample=2")
    assert source == TextSource(None, 2.0, dataset="owner/name:sample")
    got = read_text(source, TOKENIZER, sequences=5, seq_len=30)
    assert asked == [("owner/name", "sample", "train", True)]
    assert decoded(got.tokens).startswith("row 0 of many\n\nrow 1 of many")
    assert got.sources[0]["name"] == "owner/name:sample"
    with pytest.raises(FitError, match="owner/gone.*no network.*download it"):
        read_text(parse_source("hf:owner/gone"), TOKENIZER)
