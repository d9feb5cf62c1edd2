"""``kvgraft inspect``."""

from __future__ import annotations

import re

import pytest
from bundled_pair import SMALL

from kvgraft.cli.main import main
from kvgraft.demo.data import bundled


def test_inspect_a_mapper(mapper, capsys):
    assert main(["inspect", str(mapper), "--layers"]) == 0
    out = capsys.readouterr().out
    assert "large" in out and "target   2 values from" in out and "theta 10000" in out


def test_inspect_fits_a_terminal(capsys):
    assert main(["inspect", str(bundled("mapper"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88
    assert "  policy: head 0, tail 1" in lines
    assert any(re.fullmatch(r"    sha256: [0-9a-f]{12}…", line) for line in lines)


def test_inspect_a_model(capsys):
    assert main(["inspect", SMALL]) == 0
    assert "2 KV heads x 32, RoPE on 32 dims" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_empty_path_is_not_the_current_folder(command, mapper, monkeypatch, capsys):
    monkeypatch.chdir(mapper)
    assert main([command, "."]) == 0
    capsys.readouterr()
    assert main([command, ""]) == 1
    assert "is given" in capsys.readouterr().err


def test_a_missing_mapper_is_named(capsys):
    assert main(["inspect", "/nowhere/mapper"]) == 1
    assert "/nowhere/mapper" in capsys.readouterr().err
