"""A mapped cache replaced by a native one in the background."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import islice

import mlx.core as mx
import pytest
from conversations import PROMPT, handle, logprobs, model, plain
from identity import identity_mapper

from kvgraft.cache import is_mapped
from kvgraft.handoff import Generation, MemoryLimit, switch
from kvgraft.models.forward import prefill


@pytest.mark.parametrize("chunk", [4, 100])
def test_repair_ends_in_the_native_cache(chunk):
    source, target = handle(1), model(2)
    run = Generation.start(source, PROMPT)
    list(islice(run, 4))
    done = switch(run.stop(), target, identity_mapper(model(1)))
    run = Generation(done.state)
    assert run.repair(chunk=chunk)
    n = 0
    while run.repairing:
        next(run)
        n += 1
    assert n == (1 if chunk == 100 else 8)
    tokens = list(run.state.tokens)
    assert run.state.n_mapped == 0 and not is_mapped(run.state.cache)
    # The next token was chosen before the swap; those after it are the native ones.
    tokens.append(next(run))
    want = logprobs(target(mx.array([tokens])))
    token = next(run)
    assert mx.allclose(run.logprobs, want, atol=1e-4)
    assert token == int(mx.argmax(want))
    native = prefill(target, run.state.tokens)
    for got, own in zip(run.stop().cache, native, strict=True):
        n = own.offset
        assert mx.allclose(got.keys[..., :n, :], own.keys[..., :n, :], atol=1e-4)


def test_repair_needs_room_and_something_to_repair():
    run = Generation.start(handle(), PROMPT)
    next(run)
    assert not run.repair()
    done = switch(run.stop(), handle(), identity_mapper(model()))
    run = Generation(done.state)
    assert not run.repair(memory_limit=MemoryLimit(1000))
    assert "does not fit" in run.events[0]


def test_a_pending_repair_does_not_keep_its_model_in_memory():
    run = Generation.start(handle(), PROMPT)
    next(run)
    target = handle()
    run = Generation(switch(run.stop(), target, identity_mapper(model())).state)
    assert run.repair(chunk=2)
    next(run)
    state = run.stop()
    assert run.pending_repair is not None
    assert switch(state, handle(), None).report.warnings == () and not target.is_loaded


def test_a_repair_is_resumed_with_what_the_conversations_share():
    run = Generation.start(handle(), PROMPT)
    next(run)
    run = Generation(switch(run.stop(), handle(), identity_mapper(model())).state)
    assert run.repair(chunk=4)
    list(islice(run, 3))
    state, pending = run.stop(), run.pending_repair
    assert pending.n_read == 12
    changed = replace(state.rewound(6), tokens=[*PROMPT[:6], 11, *PROMPT[6:]])
    run = Generation(changed, repair=pending)
    assert run.repairing and pending.n_read == 6
    native = model()
    while run.repairing:
        next(run)
    tokens = [*run.state.tokens, next(run)]
    next(run)
    want = logprobs(native(mx.array([tokens])))
    assert mx.allclose(run.logprobs, want, atol=1e-4)
    # Nothing mapped is left to repair.
    assert not Generation(state.with_cache(None), repair=pending).repairing


def test_a_failing_repair_leaves_the_generation_alone(monkeypatch):
    source = handle()
    want = plain(source.load(), 12)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 4))
    done = switch(run.stop(), handle(), identity_mapper(source.load()))
    run = Generation(done.state)
    assert run.repair(chunk=4)

    def fail(tokens):
        raise MemoryError("no more")

    monkeypatch.setattr(run.pending_repair, "advance", fail)
    got += islice(run, 8)
    assert got == want and "no more" in run.events[0]
    gc.collect()
