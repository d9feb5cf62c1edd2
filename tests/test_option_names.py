"""Messages name what the user gave: arguments from Python, options on the command line."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from kvgraft.cli.main import main
from kvgraft.cli.parser import build_parser
from kvgraft.demo.data import bundled
from kvgraft.errors import KvgraftError
from kvgraft.evaluate.results import EvalConfig
from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.option_names import named, options

LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))
TEXT = str(bundled("text/calibration_stories.txt"))
PAIR = ["--source", LARGE, "--target", SMALL, "--text", TEXT]


def test_both_ways():
    assert named("seq_len") == "seq_len"
    assert named("plan", "local") == "plan='local'"
    assert named("sequential", True) == "sequential=True"
    with options({"seq_len": "--seq-len", "plan": "--plan", "sequential": "--sequential"}):
        assert named("seq_len") == "--seq-len"
        assert named("plan", "local") == "--plan local"
        assert named("sequential", True) == "--sequential"
        assert named("group_size") == "group_size"  # no option, so only its Python name is right
    assert named("seq_len") == "seq_len"


def test_commands_know_their_options():
    parser = build_parser()
    fit = parser.parse_args(["fit", *PAIR, "--out", "m"]).options
    assert fit["ridge_lambda"] == "--lambda" and fit["work"] == "--resume"
    no_option = {"groups", "effective_rows", "content_space", "group_size", "structure"}
    assert {f.name for f in fields(FitConfig)} - no_option <= fit.keys()
    evaluation = parser.parse_args(["eval", "m", *PAIR]).options
    assert {f.name for f in fields(EvalConfig)} <= evaluation.keys()
    transfer = ["transfer", "in", "out", "--mapper", "m", "--target", "t"]
    assert parser.parse_args(transfer).options["prompt"] == "--prompt-file"
    assert (
        parser.parse_args(["generate", "--from", "a", "--to", "b", "-p", "x"]).options["max_tokens"]
        == "--max-tokens"
    )


PYTHON_NAMES = re.compile(r"\b[a-z]+_[a-z_]+\b|='")


@pytest.mark.parametrize(
    "change, message",
    [
        (["--lambda", "-1"], "--lambda must be 0 or more"),
        (["--seq-len", "1"], "--sequences and --seq-len must be"),
        (["--skip", "70", "--seq-len", "64"], "--skip 70 leaves none of 64"),
        (["--heldout", "2"], "--heldout must lie"),
        (["--tune-rate", "3"], "--tune-steps must be 0 or more, --tune-batch"),
        (["--documents", "0"], "--documents must be at least 1, --prefix at least 2"),
        (["--seq-len", "64", "--prefix", "80"], "--prefix 80 .* or a larger --seq-len"),
        (["--seq-len", "1000000"], r"shorter sequences \(--seq-len\)"),
        (["--memory-limit", "1M"], r"--memory-limit .*\(--sequential\).*smaller --k"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_fit_speaks_of_its_options(change, message, tmp_path, capsys):
    assert main(["fit", *PAIR, "--out", str(tmp_path / "m"), *change]) == 1
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert not PYTHON_NAMES.search(err.replace(TEXT, ""))


def test_notes_speak_of_options_too(tmp_path, capsys):
    little = ["--sequences", "4", "--seq-len", "32", "--k", "2", "--plan", "full"]
    assert main(["fit", *PAIR, *little, "--out", str(tmp_path / "m")]) == 0
    assert "a smaller --k, or --plan local" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (["--documents", "1"], "--documents and --prefix must be"),
        (["--tails", "0"], "--tails at least 1"),
        (["--needle-depths", "2"], "--needle-depths must lie"),
        (["--prefix", "40"], "Use a longer --prefix"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_eval_speaks_of_its_options(change, message, capsys):
    assert main(["eval", str(bundled("mapper")), *PAIR, "--no-write", *change]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_python_names_from_python(tmp_path):
    with pytest.raises(KvgraftError, match="sequences and seq_len must be at least 2, stride"):
        FitConfig(seq_len=1)
    with pytest.raises(KvgraftError, match=r"memory_limit .*\(sequential=True\)"):
        fit_mapper(LARGE, SMALL, TEXT, FitConfig(memory_limit=10**6))
    with pytest.raises(KvgraftError, match="Use a longer prefix"):
        EvalConfig(prefix=40)
