"""Artifacts to open and to damage."""

from __future__ import annotations

import os
from typing import Any

import mappers
import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def flushed(monkeypatch):
    """Inodes that were flushed to disk, in order; really doing it takes most of a test's time."""
    inodes: list[Any] = []
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.append(os.fstat(fd).st_ino))
    return inodes


@pytest.fixture
def folder(tmp_path):
    return mappers.mapper(dtype=mx.float16).save(tmp_path / "a")


@pytest.fixture
def sharded(tmp_path):
    return mappers.mapper(dtype=mx.float16).save(tmp_path / "a", shard_bytes=9000)
