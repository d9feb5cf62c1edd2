"""A generation that stops and continues without a trace."""

from __future__ import annotations

import threading
from itertools import islice

import mlx.core as mx
import pytest
from conversations import PROMPT, handle, model, plain, sampling
from identity import identity_mapper
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from kvgraft.errors import HandoffError
from kvgraft.handoff import Generation, GenerationState, switch


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
def test_a_generation_emits_what_mlx_lm_does(kind):
    net = model()
    want = plain(net, 20, seed=5, **sampling(kind))
    mx.random.seed(5)
    run = Generation.start(net, PROMPT, max_tokens=20, **sampling(kind))
    assert list(run) == want
    assert run.state.tokens == PROMPT + want


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
def test_stopping_and_resuming_leaves_no_trace(kind):
    net = model()
    want = plain(net, 20, seed=5, **sampling(kind))
    mx.random.seed(5)
    run = Generation.start(net, PROMPT, **sampling(kind))
    got = list(islice(run, 7))
    state = run.stop()
    mx.random.seed(99)  # what happens in between doesn't count
    with pytest.raises(HandoffError, match="stopped"):
        next(run)
    got += islice(Generation(state), 13)
    assert got == want


def test_nan_logits_from_a_mapped_cache_are_never_emitted():
    """Finite rows can still overflow inside the target."""
    source = handle()
    want = plain(source.load(), 12, seed=3, sampler=make_sampler(temp=1.0))
    mx.random.seed(3)
    run = Generation.start(source, PROMPT, sampler=make_sampler(temp=1.0))
    got = list(islice(run, 5))
    done = switch(run.stop(), handle(), identity_mapper(source.load()))
    done.state.cache[0].values[..., 2, :] = float("nan")
    run = Generation(done.state)
    got += islice(run, 7)
    assert got == want
    assert "NaN" in run.events[0] and run.state.n_mapped == 0


def test_an_error_of_the_sampler_leaves_the_random_sequence_whole():
    sampler = make_sampler(temp=1.0)
    want = plain(model(), 10, seed=7, sampler=sampler)
    calls = iter(range(100))

    def failing(x):
        if next(calls) == 4:
            raise RuntimeError("no luck")
        return sampler(x)

    source = handle()
    source.load()  # making it draws random numbers
    mx.random.seed(7)
    run = Generation.start(source, PROMPT, sampler=failing)
    got = list(islice(run, 3))
    with pytest.raises(RuntimeError, match="no luck"):
        next(run)
    got += list(islice(run, 2))  # simply trying again
    assert got + list(islice(Generation(run.stop()), 5)) == want


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stopping_in_another_thread_keeps_the_state(kind):
    want = plain(model(), 8, seed=7, **sampling(kind))
    source = handle()
    source.load()
    run = Generation.start(source, PROMPT, **sampling(kind))
    got: list[int] = []

    def begin():
        mx.random.seed(7)  # each thread has a sequence of its own
        got.extend(islice(run, 3))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    state = run.stop()
    assert got + list(islice(Generation(state), 5)) == want


def test_a_size_limit_is_kept_by_a_re_prefill():
    m = model()
    cache = make_prompt_cache(m, max_kv_size=12)
    m(mx.array([PROMPT]), cache=cache)
    state = GenerationState.of(handle(), PROMPT, cache)  # holds all: back by one is not possible
    run = Generation(state)
    next(run)
    assert "cannot be cut" in run.events[0]
    assert [entry.max_size for entry in run.stop().cache] == [12, 12]
    done = switch(state, handle(), None)
    assert {type(e).__name__ for e in done.state.cache} == {"RotatingKVCache"}
