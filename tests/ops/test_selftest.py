"""The self-test that users run: it can fail, and says what it did not run."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from kvgraft import _ext
from kvgraft.cli import main as cli
from kvgraft.ops import fused as ops
from kvgraft.ops import selftest
from kvgraft.ops.cases import CASES

FEW = CASES[::12]


def test_every_problem_on_every_path():
    outcomes = list(selftest.run(FEW))
    assert [o for o in outcomes if not o.ok] == []
    for isa in _ext.cpu_isas():
        assert [o.case for o in outcomes if o.path == f"cpu {isa}"] == [c.name for c in FEW]
    assert _ext.cpu_isa() == _ext.cpu_isas()[0]


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x * 1.01,
        lambda x: x.at[..., 0].add(float("nan")) if x.size else x,
        lambda x: mx.zeros_like(x),
        lambda x: x[..., :-1],
        lambda x: x.astype(mx.float32 if x.dtype == mx.float16 else mx.float16),
    ],
    ids=["scaled", "nan", "zero", "short", "dtype"],
)  # fmt: skip
def test_a_wrong_kernel_is_told(fault, monkeypatch, capsys):
    right = ops.map_layer
    monkeypatch.setattr(ops, "map_layer", lambda *a, **k: fault(right(*a, **k)))
    monkeypatch.setattr(selftest, "CASES", tuple(c for c in FEW if c.tokens))
    assert selftest.main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and out.rstrip().splitlines()[-1].startswith("FAILED in")


def test_an_error_in_a_kernel_is_one_outcome(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no pipeline")

    monkeypatch.setattr(ops, "map_layer", broken)
    outcomes = list(selftest.run(CASES[:2]))
    assert len(outcomes) >= 4 and all(o.detail == "no pipeline" and not o.ok for o in outcomes)


def test_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "kvgraft.ops.selftest", "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "map_layer" in done.stdout and "PASSED in" in done.stdout
    assert f"The CPU kernel was run ({', '.join(sorted(_ext.cpu_isas()))})." in done.stdout
    if _ext.metal_status():
        assert f"The Metal kernels were NOT run: {_ext.metal_status()}." in done.stdout


def test_kvgraft_env_runs_it(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "CASES", CASES[:2])
    monkeypatch.setattr(selftest, "speed", lambda: [])
    assert cli.main(["env", "--selftest", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and len(data["outcomes"]) >= 4 and data["env"]["mlx"]


def test_speed_names_the_path():
    rows = selftest.speed(repeats=1)
    assert [r["path"] for r in rows] == ["metal" if mx.default_device() == mx.Device(mx.gpu) and
                                         not _ext.metal_status() else "cpu"] * 2  # fmt: skip
    assert all(r["kernel_ms"] > 0 for r in rows)
