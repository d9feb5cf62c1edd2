"""The whole fit on tiny models: what it finds, what it refuses, what it survives."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from fit_problems import direct, prose, same_maps, save_model, side_by_side, tokenizer
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache.map import map_cache
from kvgraft.errors import FitError, TokenizerMismatchError, UnsupportedModelError
from kvgraft.fit import (
    FitConfig,
    GatheredMoments,
    fit,
    fit_mapper,
    gather_moments,
    plan_fit_memory,
    read_text,
)
from kvgraft.fit import gather as gather_module
from kvgraft.fit.capture import capture
from kvgraft.fit.checkpoint import FitCheckpoint
from kvgraft.fit.token_weights import shrink
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry
from kvgraft.models.rope import RopeSpec

CONFIG = FitConfig(
    sequences=10, seq_len=48, stride=1, k=2, weight_format="float32", ridge_lambda=1.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("models")
    save_model(base / "source", num_hidden_layers=3)
    save_model(base / "target", seed=1, rope_theta=5e5, head_dim=24)
    (base / "text.txt").write_text(prose(400))
    return base


@pytest.fixture(scope="module")
def pair(folder):
    return load_model(folder / "source"), load_model(folder / "target")


def cached(model, tokens) -> tuple[list[np.ndarray], list[np.ndarray]]:
    cache = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    n = len(tokens)
    return (
        [oracle.to_numpy(c.keys[0, :, :n]) for c in cache],
        [oracle.to_numpy(c.values[0, :, :n]) for c in cache],
    )


# ---------------------------------------------------------------- what it finds


@pytest.mark.parametrize("stride, skip, by", [(1, 0, "auto"), (3, 2, "auto"), (1, 0, "uniform")])
def test_equals_a_fit_by_hand(folder, pair, stride, skip, by):
    source, target = pair
    config = replace(CONFIG, stride=stride, skip=skip, token_weights=by)
    mapper = fit_mapper(source, target, folder / "text.txt", config)
    text = read_text(folder / "text.txt", source.tokenizer, sequences=10, seq_len=48)
    rows: dict[str, list[list[np.ndarray]]] = {"x": [], "v": [], "y": []}
    at = np.arange(skip, 48, stride)
    specs = [read_geometry(m.model).layers for m in pair]
    weights: list[np.ndarray] = []
    for tokens in text.tokens[~text.heldout]:
        seen = capture(
            target.model, tokens, at, attention_geometry=read_geometry(target.model)
        ).sensitivity
        mattering = np.array(seen)[0].astype(np.float64)
        weights.append(np.ones(len(at)) if by == "uniform" else shrink(mattering, 0.5))
        keys, values = cached(source.model, tokens)
        target_keys, _ = cached(target.model, tokens)
        stripped = [
            oracle.strip(k, np.arange(48), layer.rope)[:, at] for k, layer in zip(keys, specs[0])
        ]
        wanted = [
            oracle.strip(k, np.arange(48), layer.rope)[:, at]
            for k, layer in zip(target_keys, specs[1])
        ]
        rows["x"].append(stripped)
        rows["y"].append(wanted)
        rows["v"].append([v[:, at] for v in values])
    m = mapper.layers[1]
    x = np.concatenate([side_by_side([one[s] for s in m.keys.sources]) for one in rows["x"]])
    y = np.concatenate([one[1][0] for one in rows["y"]])
    w, b = direct(x, y, 1.0, np.concatenate(weights))
    size = x.std(axis=0)[:, None]
    got = np.array(m.keys.weight[0])
    # The two differ by the float32 rounding of the rotations, which the fit magnifies.
    assert np.abs((got - w) * size).max() < 1e-3 * np.abs(w * size).max()
    assert mapper.fit["rows"] == len(x) == 9 * len(at)
    assert mapper.fit["token_weights"] == ("uniform" if by == "uniform" else "attention")
    assert mapper.source.layers == specs[0] and mapper.target.layers == specs[1]


def test_a_model_onto_itself_is_the_identity(folder):
    source = load_model(folder / "source")
    config = replace(CONFIG, k=1, ridge_lambda=1e-6)
    mapper = fit_mapper(source, source, folder / "text.txt", config)
    for m in mapper.layers:
        assert m.keys.sources == m.values.sources == (m.target_layer,)
        assert min(m.r2_k, m.r2_v) > 0.99999
    tokens = source.tokenizer.encode(prose(40, 77))[:100]
    cache = make_prompt_cache(source.model)
    source.model(mx.array(tokens[:60])[None], cache=cache)
    grafted = map_cache(cache, mapper, source.model)
    native = source.model(mx.array(tokens[60:])[None], cache=cache)
    mapped = source.model(mx.array(tokens[60:])[None], cache=grafted)

    def nll(logits: mx.array) -> float:
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        wanted = mx.array(tokens[61:])[None, :, None]
        return -float(mx.take_along_axis(logp[:, :-1], wanted, axis=-1).mean())

    assert abs(nll(native) - nll(mapped)) < 1e-3


@pytest.mark.parametrize("plan", ["local", "grouped"])
def test_plans_reach_the_mapper(folder, pair, plan):
    mapper = fit_mapper(*pair, folder / "text.txt", replace(CONFIG, head_mapping=plan))
    mapper.check()
    assert mapper.layers[0].keys.heads == ((0,), (1,))
    assert mapper.layers[0].keys.shape == (2, 32, 24)


def test_sliding_window_models_keep_every_position(tmp_path, folder):
    from zoo import WINDOW

    save_model(
        tmp_path / "sliding",
        model_type="llama",
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=WINDOW,
    )
    sliding = load_model(tmp_path / "sliding")
    mapper = fit_mapper(sliding, load_model(folder / "target"), folder / "text.txt", CONFIG)
    assert mapper.fit["rows"] == 9 * 48 > 9 * WINDOW
    assert all(m.keys.sources == (0,) for m in mapper.layers)  # the layer that keeps the text


def test_what_the_mapper_says_about_itself(folder, tmp_path):
    notes, steps = [], []
    mapper = fit(
        folder / "source",
        folder / "target",
        folder / "text.txt",
        tmp_path / "out",
        CONFIG,
        progress=lambda done, total: steps.append((done, total)),
        notify=notes.append,
    )
    assert steps == [(i, 12) for i in range(13)]  # 10 sequences, 2 layers
    back = Mapper.load(tmp_path / "out")
    assert back.source_model == load_model(folder / "source").identity()
    assert back.fit["text"]["sequences"] == 9 and back.fit["lambda_convention"] == "gram"
    assert back.fit == json.loads(json.dumps(mapper.fit))
    for m in back.layers:
        assert m.scores["r2_keys"] == mapper.layer(m.target_layer).scores["r2_keys"]
    assert notes == []


def test_few_rows_are_pointed_out(folder, pair):
    notes = []
    fit_mapper(*pair, folder / "text.txt", replace(CONFIG, sequences=4), notify=notes.append)
    assert any("144 rows are few for 64 features" in note for note in notes)


def test_one_stream_many_maps(folder, pair, tmp_path):
    moments = gather_moments(*pair, folder / "text.txt", CONFIG, work=tmp_path / "work")
    assert isinstance(moments, GatheredMoments)
    for changes in (
        {"k": 1},
        {"head_mapping": "local"},
        {"k": "all", "lambda_convention": "covariance"},
    ):
        config = replace(CONFIG, **changes)
        again = fit_mapper(*pair, folder / "text.txt", config)
        same_maps(moments.solve(config), again, 1e-4)
    # And once more from the files alone.
    reread = gather_moments(*pair, folder / "text.txt", CONFIG, work=tmp_path / "work")
    same_maps(reread.solve(), moments.solve())


# --------------------------------------------------------- memory, passes, files


def test_sequential_models_give_the_same_map(folder, pair, tmp_path):
    want = fit_mapper(*pair, folder / "text.txt", CONFIG)
    got = fit_mapper(
        folder / "source",
        folder / "target",
        folder / "text.txt",
        replace(CONFIG, sequential=True),
        work=tmp_path / "work",
    )
    same_maps(got, want)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("plan", ["full", "local"])
def test_passes_give_the_same_map(folder, pair, plan):
    config = replace(CONFIG, head_mapping=plan)
    want = fit_mapper(*pair, folder / "text.txt", config)
    geos = [read_geometry(m.model) for m in pair]
    free = plan_fit_memory(*geos, config)
    # Room for less than half of the moments, beside what is needed anyway.
    size = sum(p.nbytes for _, p in _leaves(pair))
    rest = free.peak_bytes + size - free.moment_bytes
    limited = replace(config, memory_limit=rest + int(0.4 * free.moment_bytes))
    plan_made = plan_fit_memory(*geos, limited, model_bytes=(size, 0))
    assert len(plan_made.passes) > 1 and plan_made.spill
    assert plan_made.peak_bytes <= limited.memory_limit
    steps = []
    got = fit_mapper(
        *pair, folder / "text.txt", limited, progress=lambda d, t: steps.append((d, t))
    )
    same_maps(got, want, 1e-3)
    assert steps[-1] == (10 * len(plan_made.passes) + 2, 10 * len(plan_made.passes) + 2)


def _leaves(pair):
    from mlx.utils import tree_flatten

    return [leaf for m in pair for leaf in tree_flatten(m.model.parameters())]


def test_hopeless_limits_are_refused_before_work(folder, pair, monkeypatch):
    monkeypatch.setattr(gather_module, "capture", None)  # would raise a TypeError
    with pytest.raises(FitError, match="memory_limit of .* is not enough.*head_mapping='local'"):
        fit_mapper(*pair, folder / "text.txt", replace(CONFIG, memory_limit=10_000_000))


def test_plan_of_a_real_pair():
    def model(layers, heads, dim):
        layer = LayerGeometry(heads, dim, dim, RopeSpec(dim, base=1e6))
        return ModelGeometry((layer,) * layers, "bfloat16")

    source, target = model(28, 8, 128), model(28, 8, 128)  # Qwen3 0.6B -> 1.7B
    full = plan_fit_memory(source, target, FitConfig())
    local = plan_fit_memory(source, target, FitConfig(head_mapping="local"))
    pairs = 28672 * (28672 + 1024) // 2 + 28672 * 28672  # upper blocks, and with the target
    assert full.moment_bytes == pytest.approx(2 * pairs * 12, rel=1e-3)
    assert local.structure == "heads"
    assert local.moment_bytes == pytest.approx(full.moment_bytes / 8, rel=0.05)
    assert full.rows == 450 * 256 and full.in_dim == 8192 and local.in_dim == 1024
    limit = 12 * 10**9
    tight = plan_fit_memory(
        source, target, FitConfig(memory_limit=limit), model_bytes=(10**9, 3 * 10**9)
    )
    assert tight.peak_bytes <= limit and len(tight.passes) >= 6
    covered = sorted((p.kind, t) for one in tight.passes for p in one for t in p.targets)
    assert covered == [(kind, t) for kind in ("keys", "values") for t in range(28)]
    assert any("passes" in line for line in tight.describe())


# ------------------------------------------------------------------------ resuming


def interrupt_after(monkeypatch, n: int, error: BaseException):
    """Let ``n`` model runs happen, then fail."""
    real, calls = gather_module.capture, []

    def counting(*args, **named):
        if len(calls) == n:
            raise error
        calls.append(1)
        return real(*args, **named)

    monkeypatch.setattr(gather_module, "capture", counting)
    return calls


@pytest.mark.parametrize("sequential", [False, True])
def test_resume_runs_only_what_is_missing(folder, pair, tmp_path, monkeypatch, sequential):
    monkeypatch.setattr(gather_module, "CHECKPOINT_EVERY", 3)
    want = fit_mapper(*pair, folder / "text.txt", CONFIG)
    config = replace(CONFIG, sequential=sequential)
    models = [folder / "source", folder / "target"] if sequential else pair
    n_done = 15 if sequential else 17  # of 20 model runs
    with monkeypatch.context() as patch:
        interrupt_after(patch, n_done, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            fit_mapper(*models, folder / "text.txt", config, work=tmp_path / "work")
    left = sorted(os.listdir(tmp_path / "work"))
    assert "state.json" in left and any(name.startswith("moments-0-") for name in left)
    with monkeypatch.context() as patch:
        calls = interrupt_after(patch, 99, AssertionError())
        got = fit_mapper(*models, folder / "text.txt", config, work=tmp_path / "work")
    # A sequence is kept once both models have read it; of the 17 runs that is 16.
    assert len(calls) == 20 - (15 if sequential else 16)
    same_maps(got, want, 1e-3)
    assert not (tmp_path / "work").exists()


def test_kill_and_resume(folder, tmp_path):
    """A process that is killed outright, at some point in the middle."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time\n"
        "from kvgraft.fit import FitConfig, fit_mapper\n"
        "from kvgraft.fit import gather\n"
        "gather.CHECKPOINT_EVERY = 2\n"
        "config = FitConfig(sequences=10, seq_len=48, stride=1, k=2, weight_format='float32',\n"
        "                   ridge_lambda=1.0)\n"
        "def slow(done, total):\n"
        "    print(done, flush=True)\n"
        "    time.sleep(0.3)\n"
        "fit_mapper(sys.argv[1], sys.argv[2], sys.argv[3], config, work=sys.argv[4],\n"
        "           progress=slow)\n"
    )
    work = tmp_path / "work"
    arguments = [folder / "source", folder / "target", folder / "text.txt", work]
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) >= 5:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = json.loads((work / "state.json").read_text())
    assert 0 < state["done"] < 10
    pair = load_model(folder / "source"), load_model(folder / "target")
    got = fit_mapper(*pair, folder / "text.txt", CONFIG, work=work)
    same_maps(got, fit_mapper(*pair, folder / "text.txt", CONFIG), 1e-3)


def test_killed_while_saving(folder, tmp_path):
    """Killed outright in the middle of writing, again and again, at points drawn at random."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, sys\n"
        "from kvgraft.fit import FitConfig, fit_mapper\n"
        "from kvgraft.fit import gather\n"
        "gather.CHECKPOINT_EVERY = 2\n"
        "config = FitConfig(sequences=10, seq_len=48, stride=1, k=2, weight_format='float32',\n"
        "                   ridge_lambda=1.0)\n"
        "left = int(sys.argv[5])\n"
        "def counted(call):\n"
        "    def wrapped(*args):\n"
        "        global left\n"
        "        left -= 1\n"
        "        if left == 0:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return call(*args)\n"
        "    return wrapped\n"
        # Files are written, synced, put in place, and the old ones removed.
        "os.fsync, os.replace = counted(os.fsync), counted(os.replace)\n"
        "mapper = fit_mapper(sys.argv[1], sys.argv[2], sys.argv[3], config, work=sys.argv[4])\n"
        "mapper.save(sys.argv[6])\n"
    )
    work, out = tmp_path / "work", tmp_path / "out"
    draw = random.Random(7)
    done = []
    for points in [draw.randint(8, 44), draw.randint(8, 44), draw.randint(8, 44), 10**9]:
        arguments = [folder / "source", folder / "target", folder / "text.txt", work, points, out]
        command = [sys.executable, str(script), *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == (0 if points == 10**9 else -signal.SIGKILL), ended.stderr
        if work.exists():
            state = json.loads((work / "state.json").read_text())
            done.append((state["pass"], state["done"]))
    assert done == sorted(done) and done[-1] > (0, 0)
    assert not work.exists()
    pair = load_model(folder / "source"), load_model(folder / "target")
    got = Mapper.load(out)
    for m in got.layers:
        got.load_layer(m.target_layer)
    same_maps(got, fit_mapper(*pair, folder / "text.txt", CONFIG), 1e-3)


def test_an_interrupted_fit_leaves_nothing_behind(folder, pair, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    for sequential in (False, True):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 7, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                fit(
                    folder / "source",
                    folder / "target",
                    folder / "text.txt",
                    tmp_path / "out",
                    replace(CONFIG, sequential=sequential),
                )
    assert sorted(os.listdir(tmp_path)) == ["tmp"] and os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_stopped_leaves_nothing_behind(folder, tmp_path, stop):
    """Neither a mapper nor the rows that waited in a temporary folder."""
    script = tmp_path / "run.py"
    script.write_text(
        "import signal, sys, time\n"
        "from kvgraft.cli import main as cli\n"
        "from kvgraft.fit import gather\n"
        # As from a terminal: what a shell starts in the background ignores Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "capture = gather.capture\n"
        "def slow(*args, **named):\n"
        "    print('reading', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return capture(*args, **named)\n"
        "gather.capture = slow\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    waiting, out = tmp_path / "tmp", tmp_path / "out"
    waiting.mkdir()
    command = "fit --sequential --sequences 10 --seq-len 48 --k 2 --head-mapping full".split()
    command += ["--source", folder / "source", "--target", folder / "target"]
    command += ["--text", folder / "text.txt", "--out", out]
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(waiting)},
    )
    for line in process.stdout:
        if line == "reading\n" and list(waiting.glob("kvgraft-fit-*/rows-source-*")):
            break
    process.send_signal(stop)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in err
    assert not list(waiting.glob("kvgraft*")) and not out.exists()


def test_a_folder_of_another_fit_is_refused(folder, pair, tmp_path, monkeypatch):
    work = tmp_path / "work"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 8, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            fit_mapper(*pair, folder / "text.txt", CONFIG, work=work)
    with pytest.raises(FitError, match="what differs: stride, text"):
        fit_mapper(*pair, folder / "text.txt", replace(CONFIG, sequences=9, stride=2), work=work)
    with pytest.raises(FitError, match=r"what is gathered \(head_mapping, memory_limit\)"):
        fit_mapper(*pair, folder / "text.txt", replace(CONFIG, head_mapping="local"), work=work)
    # k, λ and the plan's weights are not part of the moments and may change.
    fit_mapper(*pair, folder / "text.txt", replace(CONFIG, k=1, ridge_lambda=3.0), work=work)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(FitError, match="not empty"):
        fit_mapper(*pair, folder / "text.txt", CONFIG, work=mine)
    (mine / "state.json").write_text("{")
    with pytest.raises(FitError, match="damaged"):
        fit_mapper(*pair, folder / "text.txt", CONFIG, work=mine)
    assert (mine / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(("out", "work"), [("a", "a"), ("a", "a/state"), ("a/b", "a")])
def test_mapper_and_state_need_folders_of_their_own(folder, pair, tmp_path, out, work):
    with pytest.raises(FitError, match="neither inside the other"):
        fit(*pair, folder / "text.txt", tmp_path / out, CONFIG, work=tmp_path / work)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_quantised_is_refused_before_any_text_is_read(folder, pair, tmp_path):
    config = replace(CONFIG, weight_format="4bit", head_mapping="full", k=1, group_size=128)
    with pytest.raises(FitError, match="groups 128 inputs.* or give weight_format='float16'"):
        fit_mapper(*pair, folder / "text.txt", config, work=tmp_path / "work")
    assert not (tmp_path / "work").exists()


FULL_DISK = """
import resource, sys
from kvgraft.cli import main as cli
from kvgraft.fit import gather

# Files may not grow beyond this any more, as if the disk were full. (Python ignores the signal
# that goes with it.)
room, where, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
gather.CHECKPOINT_EVERY = 4
calls = []

def fill_up():
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

def counted(call, name, n):
    def wrapped(*args, **named):
        calls.append(name)
        if where == name and calls.count(name) == n:
            fill_up()
        return call(*args, **named)
    return wrapped

gather.capture = counted(gather.capture, "reading", 11)
gather.solve_mapper = counted(gather.solve_mapper, "solving", 1)
settings = ("--sequences 10 --seq-len 48 --stride 1 --k 2 --head-mapping full "
            "--weight-format float32 --lambda 1")
status = cli.main(
    ["fit", *settings.split(), "--source", folder + "/source", "--target", folder + "/target",
     "--text", folder + "/text.txt", *sys.argv[4:]]
)
print(len(calls) - calls.count("solving"), "model runs")
sys.exit(status)
"""


@pytest.mark.parametrize(
    "room, where, saved, runs_left, advice",
    [
        # Of 20 model runs. Five sequences are kept when the rows of the next find no room, and
        # eight when moments, which are larger, do not.
        pytest.param(30_000, "reading", (0, 4), 10, "Free some space", id="rows"),
        pytest.param(90_000, "reading", (0, 4), 4, "Free some space", id="moments"),
        pytest.param(3_000, "solving", (1, 0), 0, "was there before is unchanged", id="mapper"),
    ],
)
def test_the_disk_fills_up(folder, pair, tmp_path, room, where, saved, runs_left, advice):
    """A clear error, the last save intact, and a fit that goes on from it."""
    script = tmp_path / "run.py"
    script.write_text(FULL_DISK)
    work, out = tmp_path / "work", tmp_path / "out"

    def fit_again(room, where):
        command = [sys.executable, script, room, where, folder, "--resume", work, "--out", out]
        return subprocess.run([str(a) for a in command], capture_output=True, text=True)

    failed = fit_again(room, where)
    assert failed.returncode == 1, failed.stderr
    assert "Traceback" not in failed.stderr and "Cannot write" in failed.stderr
    assert advice in failed.stderr
    assert not out.exists()
    state = json.loads((work / "state.json").read_text())
    assert (state["pass"], state["done"]) == saved
    assert not [name for name in os.listdir(work) if "part-" in name and name.startswith("part-")]
    sizes = {name: (work / name).stat().st_size for name in state["moments"]}
    assert sizes and all(sizes.values())
    assert {n for n in os.listdir(work) if n.startswith("moments-")} == set(sizes)

    done = fit_again(0, "nowhere")
    assert done.returncode == 0, done.stderr
    assert not work.exists()
    n_runs = int(done.stdout.splitlines()[-1].split()[0])
    assert n_runs == runs_left
    got = Mapper.load(out)
    for m in got.layers:
        got.load_layer(m.target_layer)
    same_maps(got, fit_mapper(*pair, folder / "text.txt", CONFIG), 1e-3)


def test_a_save_that_stops_half_way_leaves_the_one_before_it(tmp_path):
    """And takes up no room: on a full disk every byte counts."""

    class Part:
        def __init__(self, content: str | None) -> None:
            self.content = content

        def save(self, path: Path) -> None:
            if self.content is None:
                raise FitError("Cannot write: the disk is full.")
            path.write_text(self.content)

    work = FitCheckpoint(tmp_path / "work", {"n_passes": 1})
    work.checkpoint(0, 50, [Part("old"), Part("old")])
    with pytest.raises(FitError, match="disk is full"):
        work.checkpoint(0, 100, [Part("new"), Part(None)])
    assert work.done == 50
    assert [path.read_text() for path in work.moments_of(0)] == ["old", "old"]
    assert len(os.listdir(tmp_path / "work")) == 3  # these two and the state
    again = FitCheckpoint(tmp_path / "work", {"n_passes": 1})
    assert (again.done, again.moments_of(0)) == (50, work.moments_of(0))
    again.checkpoint(0, 100, [Part("new"), Part("new")])
    assert [path.read_text() for path in again.moments_of(0)] == ["new", "new"]
    assert len(os.listdir(tmp_path / "work")) == 3


def test_full_disk_is_seen_before_work(folder, monkeypatch):
    monkeypatch.setattr(
        gather_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})
    )
    with pytest.raises(FitError, match="GB of disk"):
        fit_mapper(
            folder / "source",
            folder / "target",
            folder / "text.txt",
            replace(CONFIG, sequential=True),
        )


# ------------------------------------------------------------------ what it refuses


def test_different_tokenizers_are_refused(folder, tmp_path):
    save_model(tmp_path / "other", added=("<tool>",))
    with pytest.raises(TokenizerMismatchError, match="<tool>"):
        fit_mapper(folder / "source", tmp_path / "other", folder / "text.txt", CONFIG)


def test_nan_from_a_model_is_named(folder, pair):
    broken = load_model(folder / "target")
    layer = broken.model.model.layers[1].self_attn
    layer.v_proj.weight = layer.v_proj.weight * float("nan")
    with pytest.raises(FitError, match="target model's values of layer 1 hold .* not finite"):
        fit_mapper(pair[0], broken, folder / "text.txt", CONFIG)


def test_models_that_cannot_be_mapped_are_refused(folder, pair):
    class NoCache(nn.Module):
        pass

    broken = replace(load_model(folder / "target"), model=NoCache())
    with pytest.raises(UnsupportedModelError):
        fit_mapper(pair[0], broken, folder / "text.txt", CONFIG)


def test_too_little_text_is_refused(folder, pair, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(FitError, match="11 tokens"):
        fit_mapper(*pair, tmp_path / "short.txt", CONFIG)
    text = read_text(folder / "text.txt", tokenizer(), sequences=4, seq_len=8)
    with pytest.raises(FitError, match="leaves none of 8"):
        fit_mapper(*pair, text, replace(CONFIG, skip=8))


def test_more_source_layers_than_there_are(folder, pair, tmp_path):
    """As VeloxQuant does, all are taken; but not without a word."""
    config = replace(CONFIG, k=9, k_values=2)
    with pytest.warns(UserWarning, match="^k is 9, and the source has 3 layers") as seen:
        mapper = fit_mapper(*pair, folder / "text.txt", config)
    assert [Path(w.filename).name for w in seen if "k is 9" in str(w.message)] == [
        "test_pipeline.py"
    ]
    assert (mapper.fit["k"], mapper.fit["k_values"]) == (3, 2)
    assert mapper.layers[0].keys.sources == (0, 1, 2)
