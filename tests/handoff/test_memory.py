"""Memory of a hand-off: counting, and limits that the system enforces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mappers
import mlx.core as mx
import pytest
import zoo
from mlx.utils import tree_flatten

from kvgraft.errors import MemoryLimitError
from kvgraft.handoff import MemoryLimit, plan_memory
from kvgraft.handoff.memory import cache_bytes, mapper_bytes, token_bytes
from kvgraft.mapper.mapper import open_mapper
from kvgraft.mapper.save import save_mapper
from kvgraft.models.forward import prefill
from kvgraft.models.handle import ModelHandle, model_bytes, stored_bytes
from kvgraft.models.probe import read_geometry

HERE = Path(__file__).parents[1] / "helpers"

# ----------------------------------------------------------------------------- counting


def test_a_model_is_counted_as_its_parameters():
    model = zoo.make("qwen3")
    sizes = [p.nbytes for _, p in tree_flatten(model.parameters())]
    assert model_bytes(model) == sum(sizes) > 0


def test_stored_size_is_that_of_the_loaded_model(tmp_path):
    model = zoo.make("qwen3", dtype=mx.float16)
    model.save_weights(str(tmp_path / "model.safetensors"))
    assert stored_bytes(tmp_path) == model_bytes(model)
    model.set_dtype(mx.float32)
    assert stored_bytes(tmp_path, mx.float32) == model_bytes(model)
    assert stored_bytes(tmp_path / "absent") is None


def test_a_cache_is_counted_with_its_padding():
    model = zoo.make("qwen3")
    cache = prefill(model, list(range(10)))
    assert cache_bytes(cache) == 256 * token_bytes(read_geometry(model))
    quantised = [entry.to_quantized(group_size=32, bits=8) for entry in cache]
    assert 0 < cache_bytes(quantised) < cache_bytes(cache) / 2
    assert cache_bytes(None) == 0


def test_only_mapper_weights_in_memory_count(tmp_path):
    mapper = mappers.mapper()
    parts = [p for m in mapper.layers for p in (m.keys, m.values)]
    assert mapper_bytes(mapper) == sum(p.weight.nbytes + p.bias.nbytes for p in parts)
    loaded = open_mapper(save_mapper(mapper, tmp_path / "m"))
    assert mapper_bytes(loaded) == 0
    loaded.load_layer(0)
    assert 0 < mapper_bytes(loaded) < mapper_bytes(mapper)


def test_the_plan_holds_one_model_at_a_time():
    mapper = mappers.mapper()
    sizes = dict(source_weights=10**9, source_cache=10**6, target_weights=10**9, n_tokens=100)
    plan = plan_memory(**sizes, target=mapper.target, mapper=mapper)
    assert 10**9 < plan.peak < 1.1 * 10**9
    assert plan.stages[-1].nbytes == 10**9 + 100 * token_bytes(mapper.target)
    both = plan_memory(**sizes, target=mapper.target, mapper=mapper, keep_source=True)
    assert both.peak > 2 * 10**9
    assert "target loaded" in both.describe()


def test_unused_buffers_are_released_before_the_limit_counts():
    held = [50]
    memory_limit = MemoryLimit(100, reserve=20, observe=lambda: held[0])
    memory_limit.check("resting")
    held[0] = 101
    with pytest.raises(MemoryLimitError, match="while mapping"):
        memory_limit.check("mapping")
    assert memory_limit.usable == 80


def test_a_handle_knows_its_size_before_it_is_loaded(tmp_path):
    model = zoo.make("qwen3")
    model.save_weights(str(tmp_path / "model.safetensors"))
    assert ModelHandle(tmp_path).nbytes == model_bytes(model)
    assert ModelHandle(lambda: model, nbytes=7).nbytes == 7
    assert ModelHandle(lambda: model).nbytes is None


# ----------------------------------------------------------------------- a limit that bites


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS")
def test_a_switch_finishes_where_both_models_would_not_fit(tmp_path):
    """The system limits the process to what it holds with one model, and half a model more."""

    def run(mode: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(HERE / "hard_limit.py"), str(tmp_path), mode]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("prepare").returncode == 0
    finished = run("switch")
    assert finished.returncode == 0, finished.stderr
    got = json.loads(finished.stdout)
    assert got["reason"] is None and got["mapped"] > 100 and got["tokens"] == 6
    assert got["model"] < got["peak"] < got["limit"] < 2 * got["model"]
    assert abs(got["planned"] - got["peak"]) < 0.05 * got["peak"]
    failed = run("both")  # the limit is real: the same, with both in memory, fails
    assert failed.returncode != 0 and "HandoffError" in failed.stderr
