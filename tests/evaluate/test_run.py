"""The whole evaluation: on maps whose quality is known, and on the bundled pair."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from eval_problems import SMALL, identity
from fit_problems import prose, save_model

from kvgraft.cli.main import main
from kvgraft.demo.data import bundled
from kvgraft.errors import ArgumentError, EvaluationError, PairMismatchError
from kvgraft.evaluate import arms, stages
from kvgraft.evaluate.run import evaluate_mapper, measure
from kvgraft.evaluate.summary import summarise
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.verify import verify_artifact


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    save_model(path / "model")
    save_model(path / "deeper", seed=1, num_hidden_layers=3)
    (path / "text.txt").write_text("<|endoftext|>".join(prose(120, seed) for seed in range(5)))
    return path


@pytest.fixture(scope="module")
def perfect(folder):
    mapper = identity(folder / "model")
    model = folder / "model"
    measured = measure(mapper, model, model, [folder / "text.txt"], SMALL)
    return summarise(mapper, measured)


def test_a_perfect_map_is_told_from_nothing(perfect):
    found = perfect["arms"]
    assert found[arms.MAPPED]["gap"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert found[arms.MAPPED]["agreement"] == 1 and found[arms.MAPPED]["kl"] < 1e-5
    assert found[arms.ALONE]["nll"][0] == pytest.approx(found[arms.NATIVE]["nll"][0], abs=1e-4)
    assert perfect["attention_cosine"]["min"] == pytest.approx(1, abs=1e-4)
    for kind in ("keys", "values"):
        assert np.array(perfect["r2"][kind]["by_head"]) == pytest.approx(1, abs=1e-4)
        assert np.array(perfect["importance"][kind]) == pytest.approx(np.eye(2), abs=1e-6)
    for end in ((0, 6), (4, 1), (4, 6)):
        assert found[arms.with_ends(*end)]["gap"] == pytest.approx([0, 0, 0], abs=1e-4)
    # The same model and no map at all: its own cache.
    assert found[arms.RAW]["gap"] == pytest.approx([0, 0, 0], abs=1e-4)
    needle = perfect["needle"]["examples"]
    for example in needle:
        native = example["replies"][arms.NATIVE]
        assert all(reply == native for name, reply in example["replies"].items() if name)
    for row in perfect["by_distance"]["gap"][arms.MAPPED]:
        assert row == pytest.approx([0, 0, 0], abs=1e-4)


def test_controls_differ_from_the_native_cache(perfect):
    for name in (arms.NONE, arms.WRONG, arms.RANDOM):
        arm = perfect["arms"][name]
        assert arm["kl"] > 1e-3, name
        assert abs(arm["gap"][0]) > 1e-4, name


def test_results_are_plain_and_complete(perfect):
    again = json.loads(json.dumps(perfect, allow_nan=False))
    assert (again["policy"]["head"], again["policy"]["tail"]) == arms.PLAIN, "nothing to gain"
    assert [r["tokens"] for r in again["speed"]] == [16, 48]
    assert again["speed"][0]["map_warm_seconds"] > 0 and "map_cold_seconds" not in again["speed"][0]
    assert again["text"]["documents"] == 3 and again["text"]["disjoint"] is None
    assert again["machine"]["cores"] and again["versions"]["mlx"]
    assert again["needle"]["tasks"] == 2 and len(again["needle"]["cells"]) == 2
    # A random model knows no language: the text can't tell anything.
    assert again["verdict"]["level"] == "do not ship"


def test_a_map_that_gives_nan_is_not_shipped(folder):
    mapper = identity(folder / "model")
    mapper.layers[1].values.weight *= float("nan")
    config = replace(SMALL, needle_lengths=(), speed_lengths=())
    model = folder / "model"
    results = summarise(mapper, measure(mapper, model, model, [folder / "text.txt"], config))
    json.dumps(results, allow_nan=False)
    assert results["verdict"]["level"] == "do not ship"
    assert "NaN" in results["verdict"]["reasons"][0]
    assert results["arms"][arms.MAPPED]["finite"] is False
    assert results["needle"] is None and results["speed"] == []


def test_models_of_another_pair_are_refused(folder):
    mapper = identity(folder / "model")
    with pytest.raises(PairMismatchError):
        measure(mapper, folder / "deeper", folder / "model", [folder / "text.txt"], SMALL)


def test_a_mapper_that_leaves_out_layers_is_refused(folder):
    mapper = identity(folder / "model")
    del mapper.layers[1]
    with pytest.raises(EvaluationError, match=r"does not produce target layers \[1\]"):
        measure(mapper, folder / "model", folder / "model", [folder / "text.txt"], SMALL)


def test_sliding_layers_are_evaluated_within_their_window(folder, tmp_path):
    model = save_model(tmp_path / "sliding", model_type="gemma3_text", sliding_window=400,
                       num_hidden_layers=2, sliding_window_pattern=2)  # fmt: skip
    mapper = identity(model)
    assert [layer.window for layer in mapper.target.layers] == [400, None]
    config = replace(SMALL, needle_depths=(0.5,))
    results = summarise(mapper, measure(mapper, model, model, [folder / "text.txt"], config))
    for name in (arms.MAPPED, arms.with_ends(4, 6), arms.RAW):
        assert results["arms"][name]["gap"] == pytest.approx([0, 0, 0], abs=1e-3)
    assert results["attention_cosine"]["min"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(EvaluationError, match="last 400 tokens"):
        measure(mapper, model, model, [folder / "text.txt"], replace(config, prefix=380))


def test_an_interrupted_evaluation_goes_on(folder, tmp_path, monkeypatch):
    mapper, model = identity(folder / "model"), folder / "model"
    text = [folder / "text.txt"]
    config = replace(SMALL, needle_samples=1, speed_lengths=())
    original = stages.Stages._run_document
    calls = []

    def failing(self, i, *args):
        calls.append(i)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, i, *args)

    monkeypatch.setattr(stages.Stages, "_run_document", failing)
    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        measure(mapper, model, model, text, config, work=work)
    with pytest.raises(EvaluationError, match="what differs: settings"):
        measure(mapper, model, model, text, replace(config, seed=5), work=work)
    got = summarise(mapper, measure(mapper, model, model, text, config, work=work))
    assert calls == [0, 1, 1, 2]
    assert list(work.iterdir()) == [], "nothing stays behind"
    want = summarise(mapper, measure(mapper, model, model, text, config))
    assert got["arms"].keys() == want["arms"].keys()
    for name, arm in want["arms"].items():
        assert got["arms"][name]["nll"] == pytest.approx(arm["nll"], abs=1e-4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    with pytest.raises(EvaluationError, match="not empty"):
        measure(mapper, model, model, text, config, work=tmp_path / "other")


def test_one_call_measures_judges_stores_and_reports(folder, tmp_path):
    model, text = folder / "model", folder / "text.txt"
    path = identity(model).save(tmp_path / "mapper")
    config = replace(SMALL, needle_lengths=(), speed_lengths=(16,))
    found = evaluate_mapper(path, model, model, text, config, store=True, out=tmp_path / "out")
    assert found.stored and [f.name for f in found.files][-1] == "eval.json"
    assert json.loads(found.files[-1].read_text()) == found.results
    assert "map_cold_seconds" in found.results["speed"][0]
    assert Mapper.load(path).quality.verdict == found.verdict.level
    only = evaluate_mapper(identity(model), model, model, [text], config)
    assert only.files == () and not only.stored
    assert only.results["arms"] == found.results["arms"]
    with pytest.raises(ArgumentError, match="path"):
        evaluate_mapper(identity(model), model, model, text, config, store=True)


@pytest.mark.parametrize(
    "options",
    [
        {"documents": 1},
        {"prefix": 1},
        {"scored": 0},
        {"native_starts": (-1,)},
        {"repeats": 0},
        {"native_ends": (40,)},
        {"native_ends": (0,)},
        {"needle_depths": (1.5,)},
        {"speed_lengths": (1,)},
    ],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(EvaluationError):
        replace(SMALL, **options)


# ---------------------------------------------------------- the bundled pair

TEXT = bundled("text")
PAIR = [
    *("--source", str(bundled("models/large")), "--target", str(bundled("models/small"))),
    *("--calibration", str(TEXT / "calibration_novels.txt")),
    str(TEXT / "calibration_stories.txt"),
]
QUICK = [
    *("--documents", "4", "--prefix", "96", "--scored", "64"),
    *("--native-starts", "0", "--native-ends", "1"),
    *("16", "--needle-lengths", "200", "--needle-depths", "0.5", "--needle-samples", "1"),
    *("--speed-lengths", "64", "96", "--repeats", "1"),
]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A copy of the bundled mapper after ``kvgraft eval``, and its exit status."""
    path = tmp_path_factory.mktemp("bundled") / "mapper"
    mapper = Mapper.load(bundled("mapper"))
    mapper.quality = Quality()
    mapper.save(path)
    text = ["--text", str(TEXT / "heldout_stories.txt"), str(TEXT / "heldout_novels.txt")]
    status = main(["eval", str(path), *PAIR, *text, *QUICK, "--fail-below", "warning"])
    return path, status


def test_the_command_stores_verdict_policy_and_numbers(evaluated):
    path, status = evaluated
    assert verify_artifact(path).ok
    quality = Mapper.load(path).quality.record
    results = json.loads((path / "eval" / "eval.json").read_text())
    assert (
        quality["verdict"]
        == results["verdict"]["level"]
        in (
            "ship",
            "ship with warning",
            "do not ship",
        )
    )
    assert status == (3 if quality["verdict"] == "do not ship" else 0)
    assert quality["policy"].keys() == {"head", "tail"} and quality["reasons"]
    nll = quality["nll"]
    assert nll[arms.NATIVE] < nll[arms.MAPPED] < nll[arms.WRONG] < nll[arms.RANDOM]
    assert nll[arms.MAPPED] < nll[arms.NONE]
    assert quality["agreement"] > 0.7 and quality["attention_cosine"] > 0.9
    # Tuning trades R² for what the target makes of the cache.
    assert 0.4 < quality["r2"]["values"] < 1 and 0.3 < quality["r2"]["keys"] < 1
    assert "no document shares" in quality["text"]["disjoint"]
    assert quality["break_even_tokens"].keys() == {"warm", "cold"}
    card = (path / "README.md").read_text()
    assert f"**Verdict: {quality['verdict']}.**" in card
    assert f"| {arms.MAPPED} | {nll[arms.MAPPED]:.3f} |" in card


def test_weights_stay_what_they_were(evaluated):
    path, _ = evaluated
    before, after = Mapper.load(bundled("mapper")), Mapper.load(path)
    assert before.fit == after.fit
    for m in before.layers:
        a, b = before.read_layer(m.target_layer), after.read_layer(m.target_layer)
        assert mx.array_equal(a.keys.weight, b.keys.weight)
        assert mx.array_equal(a.values.bias, b.values.bias)


def test_text_that_was_fitted_on_is_refused(evaluated, capsys):
    path, _ = evaluated
    before = (path / "mapper_config.json").read_bytes()
    text = ["--text", str(TEXT / "calibration_novels.txt")]
    assert main(["eval", str(path), *PAIR, *text, *QUICK]) == 1
    assert "fitted on" in capsys.readouterr().err
    assert (path / "mapper_config.json").read_bytes() == before


def test_the_gate_and_a_report_elsewhere(evaluated, tmp_path, capsys, monkeypatch):
    path, _ = evaluated
    before = (path / "mapper_config.json").read_bytes()
    text = ["--text", str(TEXT / "heldout_novels.txt")]
    few = [*QUICK, "--documents", "2", "--needle-lengths", "--speed-lengths"]
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    arguments = ["eval", str(path), *PAIR, *text, *few, "--no-write", "--out", str(out)]
    assert main([*arguments, "--fail-below", "ship"]) == 3, "two documents are a small sample"
    assert json.loads((out / "eval.json").read_text())["needle"] is None
    assert (path / "mapper_config.json").read_bytes() == before
    error = capsys.readouterr().err
    assert "VERDICT" not in error and 'pip install "kvgraft[report]"' in error
    assert (out / "report.md").exists() and not (out / "figures").exists()
