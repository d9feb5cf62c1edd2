"""``kvgraft generate`` on the bundled pair."""

from __future__ import annotations

import io
import sys

import pytest
from bundled_pair import LARGE, SMALL

from kvgraft.cli.main import main
from kvgraft.demo.data import bundled

MAPPER = str(bundled("mapper"))
PROMPT = "The bottle belongs to Frank. Martha likes oysters best. What does Martha like best?"
PAIR = ["generate", "--source", LARGE, "--target", SMALL, "-m", "8"]


def test_it_streams_text_and_reports_the_switch(capsys):
    assert main([*PAIR, "--mapper", MAPPER, "--switch-after", "3", "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert "oysters" in out and "[" not in out
    assert "large -> small" in err and "mapped, native end 1" in err


def test_the_first_model_may_only_read(capsys):
    assert main([*PAIR, "--mapper", MAPPER, "--switch-after", "0", "--prompt", PROMPT]) == 0
    assert "mapped, native end 1" in capsys.readouterr().err


def test_native_start_and_end_repair_sampling_and_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    options = "--native-start 2 --native-end 3 --repair --seed 1 --temp 0.5".split()
    command = [*PAIR, "--mapper", MAPPER, "--switch-after", "2", "--prompt", "-", *options]
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "native start 2, " in err and " mapped, native end 3" in err
    assert "0 mapped]" in err  # repaired


def test_without_a_mapper_the_text_is_re_prefilled(capsys):
    assert main([*PAIR, "--switch-after", "2", "--prompt", PROMPT]) == 0
    assert "re-prefill: there is no mapper for this pair" in capsys.readouterr().err


def test_a_limit_that_nothing_fits_keeps_the_first_model(capsys):
    command = [*PAIR, "--mapper", MAPPER, "--switch-after", "2", "--memory-limit", "0.0001"]
    assert main([*command, "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert "oysters" in out
    assert "stayed with large: small does not fit" in err and "no switch" in err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--switch-after", "-1"], "--switch-after"),
        (["--repair", "1"], "--repair"),
        (["--native-start", "-1"], "--native-start must be at least 0"),
        (["--native-end", "0"], "--native-end must be at least 1"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(1 << 64)], "--seed"),
        (["--temp", "-1"], "--temp"),
        (["--temp", "nan"], "--temp"),
        (["--top-p", "3"], "--top-p"),
        (["--top-p", "nan"], "--top-p"),
        (["--min-p", "-0.5"], "--min-p"),
        (["--top-k", "-1"], "--top-k"),
        (["--top-k", "999999"], "--top-k"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--repetition-penalty", "nan"], "--repetition-penalty"),
        (["--mapper", "nowhere"], "nowhere"),
        (["--target", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_refused_before_any_model_is_loaded(options, what, capsys):
    assert main([*PAIR, "--prompt", PROMPT, *options]) == 1
    assert what in capsys.readouterr().err


def test_old_names_still_work(capsys):
    old = ["generate", "--from", LARGE, "--to", SMALL, "-m", "4", "--head", "2", "--tail", "3"]
    assert main([*old, "--mapper", MAPPER, "--switch-after", "2", "--prompt", PROMPT]) == 0
    err = capsys.readouterr().err
    assert "--from is now --source" in err and "--tail is now --native-end" in err
    assert "native start 2, " in err and " mapped, native end 3" in err
