"""``kvgraft verify``."""

from __future__ import annotations

import shutil

from kvgraft.cli.main import main


def test_an_altered_mapper_fails_to_verify(mapper, tmp_path, capsys):
    copy = tmp_path / "altered"
    shutil.copytree(mapper, copy)
    weights = copy / "mapper.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["verify", str(copy)]) == 1
    assert "mapper.safetensors" in capsys.readouterr().err


def test_verify_says_what_is_wrong_once(mapper, tmp_path, capsys):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((mapper / "mapper.safetensors").read_bytes()[:500])
    assert main(["verify", str(cut)]) == 1
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("cut short") == 1 and "NOT OK" in shown.err
    assert "were checked" not in shown.err  # nothing could be
