"""``kvgraft fit`` on the bundled pair."""

from __future__ import annotations

import shlex

import pytest
from bundled_pair import FIT, LITTLE, TEXT

import kvgraft
from kvgraft.cli.main import main
from kvgraft.mapper.mapper import Mapper


def test_fit_writes_a_mapper_that_verifies(mapper, capsys):
    assert main(["verify", str(mapper)]) == 0
    assert "mapper.safetensors" in capsys.readouterr().out
    assert [m.target_layer for m in kvgraft.load_mapper(mapper).layers] == [0, 1, 2]


def test_fit_says_what_it_wrote_and_what_to_do_next(tmp_path, capsys):
    assert main([*FIT, *LITTLE, "--out", str(tmp_path / "m")]) == 0
    out = capsys.readouterr().out
    assert "held-out R2 of the keys" in out and "kvgraft eval" in out


def test_an_interrupted_fit_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgraft.fit.gather.solve_mapper", interrupt)
    assert main([*FIT, *LITTLE, "--out", str(tmp_path / "m")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change,message",
    [
        (["--text", "/nowhere/text.txt"], "/nowhere/text.txt"),
        (["--source", "/nowhere/model"], "/nowhere/model"),
        (["--k", "0"], "kvgraft: --k must be 1 or more"),
        (["--sequences", "1"], "--sequences and --seq-len must be at least 2"),
        (["--memory-limit", "1M"], "--memory-limit of 1.0 MB is not enough"),
    ],
)
def test_bad_input_to_fit_is_named(change, message, tmp_path, capsys):
    args = [*FIT, *LITTLE, "--out", str(tmp_path / "m")]
    assert main([*args, *change]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change,message",
    [
        (["--text", "/nowhere/text.txt"], "/nowhere/text.txt"),
        (["--text", f"{TEXT}=much"], "must be a number"),
        (["--resume", TEXT], "is a file; a fit keeps its state in a folder"),
        (["--prefix", "64", "--tune-steps", "2"], "leaves nothing to score"),
    ],
)
def test_what_cannot_be_done_is_refused_before_models_are_loaded(
    change, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("kvgraft.models.handle.load_model", lambda *a, **k: pytest.fail("loaded"))
    assert main([*FIT, *LITTLE, "--out", str(tmp_path / "m"), *change]) == 1
    assert message in capsys.readouterr().err


def test_more_source_layers_than_there_are(tmp_path, capsys):
    assert main([*FIT, *LITTLE, "--k", "40", "--out", str(tmp_path / "m")]) == 0
    assert "--k is 40, and the source has 6 layers; all of them" in capsys.readouterr().out
    assert Mapper.load(tmp_path / "m").fit["k"] == 6
    plan = ["plan", *FIT[1:], *LITTLE, "--k-values", "7"]
    assert main(plan) == 0
    assert "--k-values is 7, and the source has 6 layers" in capsys.readouterr().out


def test_a_place_that_is_taken_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("mine")
    monkeypatch.setattr("kvgraft.fit.pipeline.prepare", lambda *a, **k: pytest.fail("started"))
    assert main([*FIT, *LITTLE, "--out", str(tmp_path / "m")]) == 1
    assert "is not overwritten" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_suggested_commands_can_be_pasted(tmp_path, capsys):
    out = tmp_path / "my mapper"
    assert main([*FIT, *LITTLE, "--out", str(out)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "kvgraft eval" in x)
    assert shlex.split(line)[:3] == ["kvgraft", "eval", str(out)]
