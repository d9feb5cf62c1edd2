"""``kvgraft demo``."""

from __future__ import annotations

import pytest
from bundled_pair import LARGE, SMALL

from kvgraft.cli.main import main
from kvgraft.demo.data import bundled


def test_demo_runs_on_the_bundled_pair(capsys):
    assert main(["demo", "--documents", "2", "--prefix", "200", "--scored", "40"]) == 0
    out = capsys.readouterr().out
    for line in ("mapping its cache", "target, mapped cache", "source alone", "keeps"):
        assert line in out


def test_demo_with_models_of_ones_own(mapper, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("User: Anna lives in Dover.\nAssistant: Good to know.\n")
    args = ["demo", "--source", LARGE, "--target", SMALL, "--mapper", str(mapper)]
    short = ["--documents", "1", "--prefix", "64", "--scored", "16"]
    asked = ["--text", str(text), "--question", "User: Where does Anna live?\nAssistant:"]
    assert main([*args, *short, *asked]) == 0
    assert "Where does Anna live?" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args,message",
    [
        (["--source", LARGE], "both --source and --target"),
        (["--mapper", "x"], "--mapper goes with"),
        (["--source", SMALL, "--target", LARGE, "--mapper", str(bundled("mapper"))], "layers"),
    ],
)
def test_demo_refuses_what_does_not_fit(args, message, capsys):
    assert main(["demo", *args]) == 1
    assert message in capsys.readouterr().err
