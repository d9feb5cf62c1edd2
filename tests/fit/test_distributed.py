"""Two processes that share the text, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fit_problems import prose, save_model

from kvgraft.fit import FitConfig, fit_mapper
from kvgraft.mapper.mapper import Mapper

CONFIG = FitConfig(
    sequences=9,
    seq_len=48,
    stride=1,
    k=1,
    head_mapping="local",
    weight_format="float32",
    ridge_lambda=1.0,
)
ARGUMENTS = (
    "--sequences 9 --seq-len 48 --stride 1 --k 1 --head-mapping local --weight-format float32 "
    "--lambda 1"
).split()
# What the script mlx.launch does, wherever it was installed.
LAUNCH = [sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    save_model(base / "source")
    save_model(base / "target", seed=1)
    (base / "text.txt").write_text(prose(400))
    (base / "other.txt").write_text(prose(400, 7))
    return base


def launch(folder: Path, out: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    port = str(20000 + os.getpid() % 20000)  # other tests may run beside this one
    command = [*LAUNCH, "-n", "2", "--backend", "ring", "-p", port, "--", sys.executable, "-m"]
    command += [
        "kvgraft",
        "fit",
        "--source",
        folder / "source",
        "--target",
        folder / "target",
    ]
    command += ["--out", out, *ARGUMENTS, *extra]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120
    )


def test_two_processes_give_the_map_of_one(folder, tmp_path):
    done = launch(folder, tmp_path / "two", "--text", str(folder / "text.txt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Wrote") == 1
    two = Mapper.load(tmp_path / "two")
    one = fit_mapper(folder / "source", folder / "target", folder / "text.txt", CONFIG)
    assert two.fit["rows"] == one.fit["rows"] and two.fit["text"] == one.fit["text"]
    for a in one.layers:
        b = two.load_layer(a.target_layer)
        assert a.keys.sources == b.keys.sources
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            size = float(mx.abs(x.weight).max())
            assert float(mx.abs(x.weight - y.weight).max()) < 1e-3 * size
        for name in ("r2_keys", "r2_values"):
            assert b.scores[name] == pytest.approx(a.scores[name], abs=1e-5)


def test_disagreement_is_refused(folder, tmp_path):
    # The same name, and on each "machine" another text.
    script = tmp_path / "text.sh"
    script.write_text(
        f'#!/bin/sh\nln -sf {folder}/$([ "$MLX_RANK" = 0 ] && echo text || echo other).txt '
        f'{tmp_path}/$MLX_RANK.txt\nexec "$@" --text {tmp_path}/$MLX_RANK.txt\n'
    )
    script.chmod(0o755)
    port = str(20001 + os.getpid() % 20000)
    command = [*LAUNCH, "-n", "2", "--backend", "ring", "-p", port, "--", script, sys.executable]
    command += ["-m", "kvgraft", "fit", "--source", folder / "source"]
    command += ["--target", folder / "target", "--out", tmp_path / "out", *ARGUMENTS]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120
    )
    assert "do not agree" in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def test_one_process_of_a_group_is_like_none(folder):
    group = mx.distributed.init()
    assert group.size() == 1
    alone = fit_mapper(folder / "source", folder / "target", folder / "text.txt", CONFIG)
    grouped = fit_mapper(
        folder / "source", folder / "target", folder / "text.txt", CONFIG, group=group
    )
    for a, b in zip(alone.layers, grouped.layers, strict=True):
        x, y = np.array(a.keys.weight), np.array(b.keys.weight)
        assert np.abs(x - y).max() < 1e-5 * np.abs(x).max()
    with pytest.raises(Exception, match="memory_limit"):
        limited = replace(CONFIG, memory_limit=1000)
        fit_mapper(folder / "source", folder / "target", folder / "text.txt", limited, group=group)
