"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os

import pytest

from kvgraft.errors import ArtifactWriteError, FormatError
from kvgraft.files import atomic


def test_text_and_json_are_replaced_in_one_step(tmp_path):
    path = tmp_path / "new" / "a.json"
    atomic.write_text(path, "old")
    with pytest.raises(RuntimeError), atomic.replacing_file(path) as fresh:
        assert fresh.suffix == ".json" and fresh.parent != path.parent
        fresh.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    atomic.write_json(path, {"a": [1, None, "ü"]}, indent=1)
    assert json.loads(path.read_text()) == {"a": [1, None, "ü"]}
    with pytest.raises(ValueError):
        atomic.write_json(path, float("nan"))
    assert os.listdir(path.parent) == ["a.json"]


def test_a_file_is_flushed_before_it_takes_its_name(tmp_path, monkeypatch):
    order = []
    sync, replace = atomic._sync, os.replace
    monkeypatch.setattr(atomic, "_sync", lambda p: (order.append(p.name), sync(p)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    atomic.write_text(tmp_path / "a.txt", "text")
    assert order == ["new.txt", "replace", tmp_path.name]


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "_sync", full)
    with pytest.raises(ArtifactWriteError, match="the disk is full"):
        atomic.write_text(tmp_path / "a", "text")
    assert os.listdir(tmp_path) == []


def test_a_dry_run_changes_nothing(tmp_path):
    def refuse(path):
        raise FormatError("not ours")

    path = tmp_path / "a"
    atomic.dry_run(atomic.replacing_file(path, refuse))
    assert os.listdir(tmp_path) == []
    path.write_text("mine")
    with pytest.raises(FormatError, match="not ours"):
        atomic.dry_run(atomic.replacing_file(path, refuse))
    with pytest.raises(ArtifactWriteError, match="is a file"):
        atomic.dry_run(atomic.replacing_folder(path, refuse, bool))
    assert path.read_text() == "mine" and os.listdir(tmp_path) == ["a"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "kept.json").write_text("{}")
    (tmp_path / ".a.json.kvgraft-tmp-x1").mkdir()
    (tmp_path / ".a.json.kvgraft-tmp-x1" / "new.json").write_text("half")
    with atomic.replacing_file(tmp_path / "b") as fresh:
        fresh.write_text("being written")
        atomic.remove_leftovers(tmp_path)
        assert fresh.exists()
    assert sorted(os.listdir(tmp_path)) == ["b", "kept.json"]


def test_the_exchange_is_atomic_here(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "b") == ["a"]
    assert not atomic._exchange(tmp_path / "a", tmp_path / "nothing")
