"""A generation at rest: its cache, its unread tokens and what was mapped."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import islice

import mlx.core as mx
import pytest
from conversations import PROMPT, ends, handle, model, plain
from identity import identity_mapper
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from kvgraft.cache import MappedRange
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError
from kvgraft.handoff import Generation, GenerationState, switch
from kvgraft.models.forward import prefill


def test_a_state_from_another_loop_may_hold_less_than_all_tokens():
    source = model()
    want = plain(source, 8)
    for held in (len(PROMPT), len(PROMPT) - 1, 4):
        state = GenerationState.of(source, PROMPT, prefill(source, PROMPT[:held]))
        done = switch(state, model(), identity_mapper(source))
        assert done.report.mapped == min(held, len(PROMPT) - 1)
        assert list(islice(Generation(done.state), 8)) == want
    with pytest.raises(CacheError, match="whole conversation"):
        GenerationState.of(source, PROMPT[:3], prefill(source, PROMPT))


def test_a_loop_of_ones_own_continues_from_cache_and_unread_tokens():
    net = model()
    want = plain(net, 6)
    state = GenerationState.of(net, PROMPT, prefill(net, PROMPT[:-1]))
    after = switch(state, model(), identity_mapper(net), ends(end=4)).state
    assert after.unread == PROMPT[-1:]
    steps = generate_step(
        mx.array(after.unread), after.handle.load(), max_tokens=6, prompt_cache=after.cache
    )
    assert [int(token) for token, _ in steps] == want


def test_a_marked_cache_counts_as_mapped():
    m = model()
    mapped = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m)
    state = GenerationState.of(handle(), PROMPT, mapped)
    assert (
        state.mapped_ranges == (MappedRange(0, len(PROMPT) - 1, 1),)
        and state.n_mapped == len(PROMPT) - 1
    )
    # Its rows are not mapped a second time, and can be repaired.
    done = switch(state, handle(), identity_mapper(m))
    assert done.report.mapped == 0
    head = prefill(m, PROMPT[:4])
    behind = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m, start_cache=head)
    state = GenerationState.of(handle(), PROMPT, behind)
    assert state.mapped_ranges == (MappedRange(4, len(PROMPT) - 1, 1),)
    run = Generation(state)
    assert run.repair(chunk=64)


def test_a_state_is_replaced_and_not_changed():
    m = model()
    state = GenerationState.of(m, PROMPT, make_prompt_cache(m, max_kv_size=40))
    assert state.max_kv_size == 40 and state.n_cached == 0
    assert state.with_cache(None).max_kv_size == 40  # kept for the re-prefill
    state = state.with_cache(prefill(m, PROMPT))
    assert state.rewound(len(PROMPT)) is state
    assert state.rewound(5).n_cached == 5
    assert state.rewound(0).cache is None
    before = list(state.tokens)
    next(Generation(state))
    assert state.tokens == before
    with pytest.raises(FrozenInstanceError):
        state.tokens = []


def test_a_rewound_state_knows_what_is_still_mapped():
    m = model()
    mapped = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m)
    state = GenerationState.of(m, PROMPT, mapped).rewound(4)
    run = Generation(state)
    next(run)
    assert run.stop().mapped_ranges == (MappedRange(0, 4, 1),)
    mapped = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m)
    trim_prompt_cache(mapped, 2)  # mlx-lm's own leaves the mark as it is
    assert GenerationState.of(m, PROMPT, mapped).n_mapped == len(PROMPT) - 3
