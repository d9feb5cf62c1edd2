"""The command line, on the bundled pair."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import kvgraft
from kvgraft.cli.main import main
from kvgraft.cli.parser import build_parser
from kvgraft.cli.pretty import outline
from kvgraft.demo.data import bundled
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality

LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))
TEXT = str(bundled("text/calibration_stories.txt"))
FIT = ["fit", "--source", LARGE, "--target", SMALL, "--text", TEXT]
LITTLE = "--sequences 6 --seq-len 64 --stride 1 --k 2 --head-mapping local".split()


@pytest.fixture(scope="module")
def mapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "mapper"
    assert main([*FIT, *LITTLE, "--out", str(out)]) == 0
    return out


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

    monkeypatch.setattr("kvgraft.fit.pipeline.solve_mapper", interrupt)
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
    monkeypatch.setattr("kvgraft.fit.pipeline.load_model", lambda *a, **k: pytest.fail("loaded"))
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
    monkeypatch.setattr("kvgraft.fit.pipeline._gathered", lambda *a, **k: pytest.fail("started"))
    assert main([*FIT, *LITTLE, "--out", str(tmp_path / "m")]) == 1
    assert "is not overwritten" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


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


def test_outline():
    facts = {
        "short": {"a": 1, "b": None},
        "long": {"words": "word " * 30, "number": 0.123456789},
        "items": [{"n": i, "text": "x" * 40} for i in range(3)],
        "numbers": list(range(100, 140)),
        "digest": "0f" * 32,
    }
    lines = outline(facts, 0)
    assert lines[0] == "short: a 1, b None"
    assert lines[1] == "long:" and lines[2].startswith("  words: word word")
    assert "  number: 0.1235" in lines
    at = lines.index("items:")
    assert lines[at + 1] == f"  - n 0, text {'x' * 40}"
    assert lines[-1] == "digest: 0f0f0f0f0f0f…"
    numbers = " ".join(lines[at + 4 : -1])
    assert re.findall(r"\d+", numbers) == [str(n) for n in facts["numbers"]]
    assert max(map(len, lines)) <= 88


@pytest.mark.parametrize(
    "text, size",
    [
        ("12G", 12 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("800m", 8 * 10**8),
        ("12", 12 * 10**9),
        ("0.5", 5 * 10**8),
        ("12000000000", 12 * 10**9),
    ],
)
def test_memory_sizes_are_the_same_everywhere(text, size):
    parser = build_parser()
    pair = ["--source", "a", "--target", "b", "--memory-limit", text]
    assert parser.parse_args(["fit", *pair, "--text", "t", "--out", "m"]).memory_limit == size
    assert parser.parse_args(["plan", *pair]).memory_limit == size
    generate = ["generate", "--source", "a", "--target", "b", "-p", "x", "--memory-limit", text]
    assert parser.parse_args(generate).memory_limit == size


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "12Q", "G", ""])
def test_sizes_that_are_none(text, capsys):
    for command in (
        ["plan", "--source", "a", "--target", "b"],
        ["generate", "--source", "a", "--target", "b", "-p", "x"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--memory-limit={text}"])
        assert ended.value.code == 2
        assert "is no size above 0; write it as 12G" in capsys.readouterr().err


def test_suggested_commands_can_be_pasted(tmp_path, capsys):
    out = tmp_path / "my mapper"
    assert main([*FIT, *LITTLE, "--out", str(out)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "kvgraft eval" in x)
    assert shlex.split(line)[:3] == ["kvgraft", "eval", str(out)]


def test_inspect_a_model(capsys):
    assert main(["inspect", SMALL]) == 0
    assert "2 KV heads x 32, RoPE on 32 dims" in capsys.readouterr().out


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


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_empty_path_is_not_the_current_folder(command, mapper, monkeypatch, capsys):
    monkeypatch.chdir(mapper)
    assert main([command, "."]) == 0
    capsys.readouterr()
    assert main([command, ""]) == 1
    assert "is given" in capsys.readouterr().err


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


def test_env_is_printed_as_text_and_as_json(capsys):
    assert main(["env"]) == 0
    assert f"kvgraft   {kvgraft.__version__}" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kvgraft"] == kvgraft.__version__


def test_a_missing_mapper_is_named(capsys):
    assert main(["inspect", "/nowhere/mapper"]) == 1
    assert "/nowhere/mapper" in capsys.readouterr().err


def test_bad_usage_is_told_apart(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 2


def test_demo_runs_on_the_bundled_pair(capsys):
    assert main(["demo", "--documents", "2", "--prefix", "200", "--scored", "40"]) == 0
    out = capsys.readouterr().out
    for line in ("its cache is mapped in", "target, mapped cache", "source alone", "keeps"):
        assert line in out


def test_demo_with_models_of_ones_own(mapper, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("User: Anna lives in Dover.\nAssistant: Good to know.\n")
    args = ["demo", "--model", LARGE, "--target", SMALL, "--mapper", str(mapper)]
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
