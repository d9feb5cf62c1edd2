"""``kvgraft convert``."""

from __future__ import annotations

import json
import re

import pytest
from bundled_pair import FIT, LITTLE

import kvgraft
from kvgraft.cli.main import main
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "8bit"])
def test_convert_stores_other_weights(mapper, tmp_path, weights, capsys):
    out = tmp_path / weights
    assert main(["convert", str(mapper), str(out), "--weight-format", weights]) == 0
    assert main(["verify", str(out)]) == 0
    assert ("was not measured" in capsys.readouterr().out) == (weights == "8bit")


def test_what_rounding_costs_is_said(mapper, tmp_path, capsys):
    changes = []
    for weights in ("8bit", "4bit"):
        assert (
            main(["convert", str(mapper), str(tmp_path / weights), "--weight-format", weights]) == 0
        )
        said = re.search(r"keys' weights by ([0-9.]+) %", capsys.readouterr().out)
        changes.append(float(said[1]))
    assert 0 < 5 * changes[0] < changes[1] < 50
    assert main([*FIT, *LITTLE, "--weight-format", "4bit", "--out", str(tmp_path / "fit")]) == 0
    assert re.search(r"4bit weights cost -?[0-9.]+ of it", capsys.readouterr().out)
    fitted = kvgraft.load_mapper(tmp_path / "fit").fit
    assert fitted["mean_r2_keys_unrounded"] != fitted["mean_r2_keys"]


def test_a_verdict_is_that_of_its_weights(mapper, tmp_path, capsys):
    judged = Mapper.load(mapper)
    judged.quality = Quality.from_record({"verdict": "ship", "reasons": []})
    folder = judged.save(tmp_path / "judged")
    (folder / "eval").mkdir()
    (folder / "eval" / "report.md").write_text("of these weights")
    (folder / "mine.txt").write_text("a note")
    for weights, verdict in (("float16", "ship"), ("4bit", None)):
        out = tmp_path / weights
        assert main(["convert", str(folder), str(out), "--weight-format", weights]) == 0
        assert Mapper.load(out).quality.verdict == verdict
    assert main(["convert", str(folder), str(folder), "--weight-format", "8bit"]) == 1
    assert "Choose another" in capsys.readouterr().err
    judged.save(folder)
    assert (folder / "eval" / "report.md").exists()
    judged.quality = Quality()
    judged.save(folder)  # as a new fit does
    assert not (folder / "eval").exists() and (folder / "mine.txt").exists()


def test_convert_to_veloxquant_and_back(mapper, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert main(["convert", str(mapper), str(theirs), "--to", "veloxquant"]) == 0
    assert json.loads((theirs / "manifest.json").read_text())["format_version"] == 1
    assert main(["convert", str(theirs), str(ours)]) == 0
    assert main(["verify", str(ours)]) == 0
