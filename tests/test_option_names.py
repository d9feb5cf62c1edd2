"""Messages name what the user gave: arguments from Python, options on the command line."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import kvgraft
from kvgraft.cli.main import main
from kvgraft.cli.parser import COMMANDS, build_parser
from kvgraft.demo.data import bundled
from kvgraft.errors import KvgraftError
from kvgraft.evaluate.results import EvalConfig
from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.option_names import command_line, named, option_name

LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))
TEXT = str(bundled("text/calibration_stories.txt"))
PAIR = ["--source", LARGE, "--target", SMALL, "--text", TEXT]


def test_both_ways():
    assert named("seq_len") == "seq_len"
    assert named("head_mapping", "local") == "head_mapping='local'"
    assert named("sequential", True) == "sequential=True"
    with command_line():
        assert named("seq_len") == "--seq-len"
        assert named("head_mapping", "local") == "--head-mapping local"
        assert named("sequential", True) == "--sequential"
        assert named("ridge_lambda") == "--lambda"
    assert named("seq_len") == "seq_len"


SETTINGS = sorted(
    set(
        re.findall(
            r"""named\(['"](\w+)['"]""",
            "".join(p.read_text("utf-8") for p in Path(kvgraft.__file__).parent.rglob("*.py")),
        )
    )
    # Only Python callers can set these to values that a message names.
    - {"groups", "effective_rows", "group_size", "structure"}
)


@pytest.fixture(scope="module")
def options():
    """All options of all commands."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        for command in COMMANDS:
            with pytest.raises(SystemExit):
                build_parser(command).parse_args([command, "--help"])
    return set(re.findall(r"--[a-z-]+", shown.getvalue()))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_that_messages_name_has_its_option(setting, options):
    assert option_name(setting) in options


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
    little = ["--sequences", "4", "--seq-len", "32", "--k", "2", "--head-mapping", "full"]
    assert main(["fit", *PAIR, *little, "--out", str(tmp_path / "m")]) == 0
    assert "a smaller --k, or --head-mapping local" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (["--documents", "1"], "--documents and --prefix must be"),
        (["--native-ends", "0"], "--native-ends at least 1"),
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
