"""The ``kvgraft`` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvgraft
from kvgraft.cli.main import main
from kvgraft.cli.parser import COMMANDS


def test_bad_usage_is_told_apart(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 2


def test_python_m_kvgraft_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kvgraft", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvgraft {kvgraft.__version__}\n"


def test_help_lists_every_command_and_imports_no_models(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in COMMANDS)
    code = (
        "import sys; from kvgraft.cli.parser import build_parser; build_parser().format_help(); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_unknown_commands_and_options_are_bad_usage(capsys):
    for argv in (["graft"], ["env", "--jsn"], []):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
