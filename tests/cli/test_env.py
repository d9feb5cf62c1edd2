"""``kvgraft env``."""

from __future__ import annotations

import json

import kvgraft
from kvgraft.cli.main import main


def test_env_is_printed_as_text_and_as_json(capsys):
    assert main(["env"]) == 0
    assert f"kvgraft   {kvgraft.__version__}" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kvgraft"] == kvgraft.__version__
