"""Sources of text: the kinds of files, and errors that say which one cannot be read."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from texts import TOKENIZER, decoded, words

from kvgraft.errors import EvaluationError, FitError, TextError
from kvgraft.text.corpus import read_text
from kvgraft.text.sources import TextSource, check_sources, parse_source


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
    with pytest.raises(TextError, match=message):
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
    with pytest.raises(TextError, match="line 1: the chat template .*no messages"):
        read_text(path, Picky(), sequences=2, seq_len=8, chat=True)


def test_half_a_character_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud800 and so on and on and on and on"}\n')
    text = read_text(path, TOKENIZER, sequences=2, seq_len=8)
    assert decoded(text.tokens).startswith("? and so on")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("latin.txt", "caf\xe9".encode("latin-1"), "not UTF-8"), ("gone.txt", None, "Cannot read")],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=message) as caught:
        read_text(path, TOKENIZER)
    assert name in str(caught.value)


def test_files_are_looked_for_before_work(tmp_path):
    path = words(tmp_path / "a.txt")
    check_sources([path, TextSource(None, documents=("some text",)), parse_source("hf:owner/name")])
    for missing in (tmp_path / "b.txt", tmp_path):
        with pytest.raises(TextError, match=f"Cannot read {missing}:"):
            check_sources([path, missing])


def test_parquet(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"document number {i} " * 3 for i in range(300)]
    parquet.write_table(pa.table({"text": texts, "id": list(range(300))}), path)
    got = read_text(path, TOKENIZER, sequences=20, seq_len=50)
    assert decoded(got.tokens) == "\n\n".join(texts)[:1000]
    with pytest.raises(TextError, match="no text under 'body'"):
        read_text(TextSource(path, field="body"), TOKENIZER, sequences=4, seq_len=8)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(TextError, match="a.parquet"):
        read_text(path, TOKENIZER, sequences=4, seq_len=8)


def test_missing_packages_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(TextError, match=r"pip install 'kvgraft\[data\]'"):
        read_text(tmp_path / "a.parquet", TOKENIZER)
    with pytest.raises(TextError, match=r"datasets package: pip install 'kvgraft\[data\]'"):
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
    with pytest.raises(TextError, match="owner/gone.*no network.*download it"):
        read_text(parse_source("hf:owner/gone"), TOKENIZER)


def test_a_fit_and_an_evaluation_catch_it_as_their_own():
    assert issubclass(TextError, FitError) and issubclass(TextError, EvaluationError)
