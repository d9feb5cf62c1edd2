"""Folders that are resumed: what is taken, continued, refused and removed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import pytest

from kvgraft.errors import FitError, FormatError
from kvgraft.evaluate.checkpoint import EvalCheckpoint
from kvgraft.files import atomic
from kvgraft.files.checkpoint import CheckpointFolder
from kvgraft.fit.checkpoint import FitCheckpoint


class Folder(CheckpointFolder):
    operation: ClassVar[str] = "count"
    settings: ClassVar[str] = "numbers"
    state_name: ClassVar[str] = "state.json"
    error = FitError

    def is_own(self, name: str) -> bool:
        return name.startswith("own-")


def test_the_same_operation_is_continued(tmp_path):
    first = Folder(tmp_path / "a" / "b", {"n": (1, 2)}, {"done": 0})
    first.state["done"] = 7
    first.save_state()
    again = Folder(tmp_path / "a" / "b", {"n": [1, 2]}, {"done": 0})
    assert again.state == {"done": 7} and again.identity == {"n": [1, 2]}


def test_another_one_is_refused(tmp_path):
    Folder(tmp_path, {"n": 1, "m": 1})
    with pytest.raises(FitError, match="another count; what differs: k, n. Resume .* numbers"):
        Folder(tmp_path, {"n": 2, "m": 1, "k": 0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[1]", "damaged"),
        ("{}", "damaged"),
        ('{"format_version": 9, "identity": {}}', "version 9"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, content, message):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(FitError, match=message):
        Folder(tmp_path, {})
    assert (tmp_path / "state.json").read_text() == content


def test_places_that_cannot_serve_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FitError, match="not empty and holds no unfinished count"):
        Folder(tmp_path, {})
    with pytest.raises(FitError, match="Cannot use .*thesis.txt as a working folder"):
        Folder(tmp_path / "thesis.txt", {})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_values_and_arrays_come_back(tmp_path):
    folder = Folder(tmp_path, {})
    assert (
        folder.read_json("own-a.json") is None and folder.read_arrays("own-a.safetensors") is None
    )
    folder.write_json("own-a.json", {"x": [1.5, math.nan]})
    folder.write_arrays("own-a.safetensors", {"x": mx.arange(3, dtype=mx.bfloat16)})
    x, nan = folder.read_json("own-a.json")["x"]
    assert x == 1.5 and math.isnan(nan)
    back = folder.read_arrays("own-a.safetensors")["x"]
    assert back.dtype == mx.bfloat16 and back.tolist() == [0, 1, 2]
    for name in ("own-a.json", "own-a.safetensors"):
        (tmp_path / name).write_text("{")
    with pytest.raises(FormatError, match="own-a.json is damaged"):
        folder.read_json("own-a.json")
    with pytest.raises(FormatError, match="own-a.safetensors is damaged"):
        folder.read_arrays("own-a.safetensors")


def test_a_failed_write_is_explained_and_leaves_the_old_file(tmp_path, monkeypatch):
    folder = Folder(tmp_path, {})
    folder.write_arrays("own-a.safetensors", {"x": mx.zeros(3)})

    def full(path, arrays):
        Path(path).write_bytes(b"half")
        raise RuntimeError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        with pytest.raises(FitError, match="Cannot write .*no space.* the count can be resumed"):
            folder.write_arrays("own-a.safetensors", {"x": mx.ones(3)})
    with monkeypatch.context() as patch:

        def no_space(descriptor):
            raise OSError(28, "No space left on device")

        patch.setattr(atomic.os, "fsync", no_space)
        with pytest.raises(FitError, match="the disk is full. .* The count can be resumed"):
            folder.write_json("own-a.json", 1)
    assert folder.read_arrays("own-a.safetensors")["x"].tolist() == [0, 0, 0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own-a.safetensors", "state.json"]


def test_removing_spares_what_others_put_there(tmp_path):
    folder = Folder(tmp_path / "work", {})
    folder.write_json("own-a.json", 1)
    (tmp_path / "work" / "mine.json").write_text("1")
    (tmp_path / "work" / ".own-b.json.kvgraft-tmp-x").mkdir()  # of a process that was killed
    folder.remove()
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["mine.json"]
    (tmp_path / "work" / "mine.json").unlink()
    again = Folder(tmp_path / "work", {})
    again.empty()
    assert list((tmp_path / "work").iterdir()) == []
    again.remove()
    assert not (tmp_path / "work").exists()


def test_what_a_fit_and_an_evaluation_call_their_own(tmp_path):
    fit = FitCheckpoint(tmp_path / "fit", {"n_passes": 1})
    own = ["rows-source-000001.safetensors", "moments-0-000050-part-1.safetensors"]
    assert all(map(fit.is_own, own)) and not fit.is_own("state.json.bak")
    evaluation = EvalCheckpoint(tmp_path / "eval", {"text": "x"})
    evaluation.write("target-task-0001", {"reply": "1"})
    evaluation.keep_cache("source-document-0000", {2: (mx.zeros((1, 1, 2, 4)),) * 2})
    assert list(evaluation.cache("source-document-0000")) == [2]
    (tmp_path / "eval" / "eval.json").write_text(json.dumps({}))
    evaluation.empty()
    assert [p.name for p in (tmp_path / "eval").iterdir()] == ["eval.json"]
