"""A whole switch in a process that the system holds to a limit.

Run by the tests as ``python hard_limit.py FOLDER MODE``. ``MODE`` is ``prepare``
(write the weights of two models), ``switch`` (hand over within a limit that is
smaller than both models together) or ``both`` (the same with both in memory).
Prints JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from itertools import islice
from pathlib import Path

import mlx.core as mx
from identity import identity_mapper
from mlx_lm.models import qwen3

from kvgraft.handoff import Generation, MemoryLimit, SwitchOptions, switch
from kvgraft.models.handle import ModelHandle

PROMPT = list(range(3, 200))
# Nearly all of the weights are one embedding, which costs memory but no time.
ARGS = dict(
    model_type="qwen3", hidden_size=512, num_hidden_layers=4, intermediate_size=1024,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
    vocab_size=60_000, max_position_embeddings=2048, rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip


def empty() -> qwen3.Model:
    return qwen3.Model(qwen3.ModelArgs.from_dict(ARGS))


def load(path: Path) -> qwen3.Model:
    model = empty()
    model.load_weights(str(path))
    model.eval()
    return model


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(folder: Path, mode: str) -> dict[str, int | str | None]:
    if mode == "prepare":
        mx.random.seed(0)
        model = empty()
        for name in ("one", "two"):
            model.save_weights(str(folder / f"{name}.safetensors"))
        return {}
    size = (folder / "one.safetensors").stat().st_size
    one = ModelHandle(lambda: load(folder / "one.safetensors"), name="one", nbytes=size)
    two = ModelHandle(lambda: load(folder / "two.safetensors"), name="two", nbytes=size)
    mapper = identity_mapper(one.load())
    run = Generation.start(one, PROMPT)
    want = [next(run) for _ in range(3)]
    state = run.stop()
    mx.clear_cache()
    # One model is in memory. Room for half of another, on top of what there is.
    limit = virtual_bytes() + size // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    limit = MemoryLimit(mx.get_active_memory() + size // 2)
    done = switch(
        state,
        two,
        mapper,
        SwitchOptions(keep_source=True) if mode == "both" else SwitchOptions(memory_limit=limit),
    )
    more = list(islice(Generation(done.state), 3))
    return {
        "model": size,
        "limit": limit.limit,
        "peak": done.report.peak_bytes,
        "planned": done.report.plan.peak if done.report.plan else None,
        "mapped": done.report.mapped,
        "tokens": len(want) + len(more),
        "reason": done.report.reason,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
