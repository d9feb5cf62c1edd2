"""Moving a running generation from one model to another."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest
import zoo
from conversations import PROMPT, ends, handle, logprobs, model, plain, sampling
from identity import identity_mapper
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import MappedRange, is_mapped, n_tokens
from kvgraft.cache.map import map_cache
from kvgraft.errors import ArgumentError, HandoffError
from kvgraft.handoff import Generation, GenerationState, MemoryLimit, SwitchOptions, switch
from kvgraft.models.forward import prefill


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
@pytest.mark.parametrize("after", [1, 9])
def test_an_exact_map_gives_the_uninterrupted_run(kind, after):
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 20, seed=5, **sampling(kind))
    mx.random.seed(5)
    run = Generation.start(source, PROMPT, **sampling(kind))
    got = list(islice(run, after))
    done = switch(run.stop(), handle(), mapper)
    assert done.report.reason is None
    assert done.report.mapped == len(PROMPT) + after - 1 and done.report.native_end == 1
    assert done.state.n_mapped == done.report.mapped
    got += islice(Generation(done.state), 20 - after)
    assert got == want


@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 1), (0, 6), (4, 3), (7, 50), (500, 1)])
def test_native_start_and_end_with_an_exact_map(start, end):
    source = handle()
    want = plain(source.load(), 20)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 6))
    done = switch(run.stop(), handle(), identity_mapper(model()), ends(start, end))
    n, report = len(PROMPT) + 6, done.report
    assert report.native_start + report.mapped + report.native_end == n
    if report.reason is None:
        assert (report.native_start, report.native_end) == (start, end)
    else:
        assert "nothing is left to map" in report.reason and not is_mapped(done.state.cache)
    assert n_tokens(done.state.cache) == n - 1
    got += islice(Generation(done.state), 14)
    assert got == want


# Rings of 8 that wrap while reading (18 tokens) or only while generating (5 tokens).
@pytest.mark.parametrize("length", [5, 18])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("arch", ["gemma3_text", "olmo3", "gpt_oss"])
def test_sliding_layers_continue_exactly(arch, length, start):
    net = zoo.make(arch, seed=1)
    mapper = identity_mapper(net)
    steps = generate_step(mx.array(PROMPT[:length]), net, max_tokens=20)
    want = [int(token) for token, _ in steps]
    run = Generation.start(zoo.make(arch, seed=1), PROMPT[:length])
    got = list(islice(run, 6))
    done = switch(run.stop(), zoo.make(arch, seed=1), mapper, ends(start))
    assert done.report.reason is None and done.report.native_start == start
    got += islice(Generation(done.state), 14)
    assert got == want


def test_a_ring_that_wrapped_goes_back_by_one_token_only():
    net = zoo.make("gemma3_text", seed=1)
    want = plain(net, 12)
    run = Generation.start(net, PROMPT)
    got = list(islice(run, 6))
    done = switch(run.stop(), zoo.make("gemma3_text", seed=1), identity_mapper(net), ends(end=4))
    assert "cannot go back" in done.report.reason
    got += islice(Generation(done.state), 6)
    assert got == want


@pytest.mark.parametrize("size", [12, 100])
def test_a_cache_of_limited_size_stays_so(size):
    net = model()
    cache = make_prompt_cache(net, max_kv_size=size)
    steps = generate_step(mx.array(PROMPT), net, max_tokens=12, prompt_cache=cache)
    want = [int(token) for token, _ in steps]
    cache = make_prompt_cache(net, max_kv_size=size)
    steps = generate_step(mx.array(PROMPT), net, max_tokens=12, prompt_cache=cache)
    got = [int(token) for token, _ in islice(steps, 5)]
    steps.close()
    done = switch(GenerationState.of(net, PROMPT + got, cache), model(), identity_mapper(net))
    assert done.report.reason is None
    assert {entry.max_size for entry in done.state.cache} == {size}
    got += islice(Generation(done.state), 7)
    assert got == want


def test_a_quantised_cache_is_handed_over():
    net = model()
    cache = [entry.to_quantized(group_size=32, bits=8) for entry in prefill(net, PROMPT)]
    for mapper in (identity_mapper(net), None):
        # Mapped or read again, it stays as small as it was.
        state = GenerationState.of(net, PROMPT, cache)
        done = switch(state, model(), mapper, SwitchOptions(native_end=3, keep_source=True))
        if mapper is not None:
            assert (done.report.mapped, done.report.native_end) == (len(PROMPT) - 3, 3)
        assert {type(entry).__name__ for entry in done.state.cache} == {"QuantizedKVCache"}
        assert {(e.bits, e.group_size) for e in done.state.cache} == {(8, 32)}
        assert is_mapped(done.state.cache) == (mapper is not None)
        run = Generation(done.state)
        next(run)
        assert mx.allclose(run.logprobs, logprobs(net(mx.array([PROMPT]))), atol=0.2)


def test_a_target_that_cannot_be_quantised_gets_floats():
    net = model()
    cache = [entry.to_quantized(group_size=32, bits=8) for entry in prefill(net, PROMPT)]
    tiny = zoo.Tiny("qwen3", {"head_dim": 24})
    target = zoo.make(tiny, seed=2)
    done = switch(
        GenerationState.of(net, PROMPT, cache), target, None, SwitchOptions(keep_source=True)
    )
    assert {type(entry).__name__ for entry in done.state.cache} == {"KVCache"}
    assert "no longer quantized" in done.report.warnings[0]


def test_native_rows_are_the_targets_own_and_the_others_are_not():
    source, target = handle(1), model(2)
    run = Generation.start(source, PROMPT)
    next(run)
    done = switch(run.stop(), target, identity_mapper(model(1)), ends(5, 4))
    native = prefill(target, PROMPT)
    for mapped, own in zip(done.state.cache, native, strict=True):
        assert mx.allclose(mapped.keys[..., :5, :], own.keys[..., :5, :], atol=1e-5)
        assert not mx.allclose(mapped.keys[..., 5:15, :], own.keys[..., 5:15, :], atol=1e-2)
    assert done.state.mapped_ranges == (MappedRange(5, 15, 1),)


def test_the_pending_token_of_the_source_is_never_emitted():
    """The target chooses, from its own logits after the last emitted token."""
    source, target = model(1), model(2)
    state = GenerationState.of(source, PROMPT, prefill(source, PROMPT))
    done = switch(state, target, identity_mapper(source), ends(len(PROMPT) - 2))
    run = Generation(done.state)
    next(run)
    cache = prefill(source, PROMPT[:-1])
    own = prefill(target, PROMPT[: len(PROMPT) - 2])
    for entry, native in zip(cache, own, strict=True):
        entry.keys[..., : len(PROMPT) - 2, :] = native.keys[..., : len(PROMPT) - 2, :]
        entry.values[..., : len(PROMPT) - 2, :] = native.values[..., : len(PROMPT) - 2, :]
    want = logprobs(target(mx.array([PROMPT[-1:]]), cache=cache))
    pending = logprobs(source(mx.array([PROMPT])))
    assert mx.allclose(run.logprobs, want, atol=1e-4)
    assert not mx.allclose(run.logprobs, pending, atol=1e-1)


def test_a_conversation_of_one_token():
    net = model()
    want = int(mx.argmax(net(mx.array([[5]]))[0, -1]))
    state = GenerationState.of(net, [5], prefill(net, [5]))
    done = switch(state, model(), identity_mapper(net))
    assert "nothing is left to map" in done.report.reason
    assert next(Generation(done.state)) == want


def test_the_source_is_gone_before_the_target_is_loaded():
    source = handle()
    mapper = identity_mapper(source.load())
    alive = []

    def load():
        alive.append(source.is_loaded)
        return model()

    run = Generation.start(source, PROMPT)
    next(run)
    done = switch(run.stop(), load, mapper)
    assert alive == [False] and done.report.warnings == ()
    assert set(done.report.seconds) == {"release", "load", "map"}


def test_a_source_that_others_hold_is_reported():
    held = model()
    run = Generation.start(held, PROMPT)
    next(run)
    done = switch(run.stop(), handle(), identity_mapper(held))
    assert done.report.reason is None
    assert "still in memory" in done.report.warnings[0]


def test_keep_source_leaves_the_source_able_to_go_on():
    source = handle()
    want = plain(source.load(), 12)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 4))
    state = run.stop()
    keep = SwitchOptions(keep_source=True)
    done = switch(state, handle(), identity_mapper(source.load()), keep)
    assert source.is_loaded
    assert got + list(islice(Generation(done.state), 8)) == want
    assert got + list(islice(Generation(state), 8)) == want


def test_exceeding_the_limit_while_mapping_re_prefills():
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 9)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 3))
    readings = iter([10, 5000, 5000])
    memory_limit = MemoryLimit(1 << 40, observe=lambda: (1 << 41) if next(readings) > 100 else 0)
    done = switch(run.stop(), handle(), mapper, SwitchOptions(memory_limit=memory_limit))
    assert "while mapping layer 1" in done.report.reason
    assert not is_mapped(done.state.cache)
    assert got + list(islice(Generation(done.state), 6)) == want


def test_a_target_that_cannot_be_loaded_loses_nothing():
    source = handle()
    want = plain(source.load(), 12)
    mapper = identity_mapper(source.load())
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 5))
    state = run.stop()

    def broken():
        raise OSError("disk on fire")

    with pytest.raises(HandoffError, match="disk on fire"):
        switch(state, broken, mapper)
    assert not source.is_loaded
    done = switch(state, handle(), mapper)
    assert done.report.mapped == len(PROMPT) + 4
    assert got + list(islice(Generation(done.state), 7)) == want


def test_rows_mapped_too_often_are_re_prefilled():
    mapper = identity_mapper(model())
    source = handle()
    want = plain(source.load(), 30)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 6))
    reports = []
    for _ in range(3):
        done = switch(run.stop(), handle(), mapper, SwitchOptions(max_mapped=1))
        reports.append(done.report)
        run = Generation(done.state)
        got += islice(run, 8)
    n = len(PROMPT)
    assert [r.native_start for r in reports] == [0, n + 5, n + 5 + 8 + 0]
    assert [r.mapped for r in reports] == [n + 5, 8, 8]
    assert "errors do not add up" in reports[1].warnings[0]
    assert got == want


def test_without_a_limit_mappings_are_counted():
    mapper = identity_mapper(model())
    run = Generation.start(handle(), PROMPT)
    next(run)
    for n in (1, 2, 3):
        done = switch(run.stop(), handle(), mapper, SwitchOptions(max_mapped=None))
        assert done.state.mapped_ranges[0].times == n
        run = Generation(done.state)
        next(run)


def test_a_cache_of_the_targets_own_is_the_native_start():
    """Back and forth: what the target read before it left is neither read nor mapped."""
    one, two = handle(1), handle(1)
    want = plain(one.load(), 20)
    mapper = identity_mapper(one.load())
    run = Generation.start(one, PROMPT)
    got = list(islice(run, 5))
    state = run.stop()
    kept = prefill(one.load(), state.tokens)
    done = switch(state, two, mapper)
    run = Generation(done.state)
    got += islice(run, 7)
    back = switch(run.stop(), one, mapper, own_cache=kept)
    n = len(PROMPT) + 5
    assert (back.report.reused, back.report.native_start, back.report.mapped) == (n, n, 6)
    assert back.state.mapped_ranges == (MappedRange(n, n + 6, 1),)
    got += islice(Generation(back.state), 8)
    assert got == want


def test_a_marked_cache_of_the_targets_own_is_not_taken_for_a_native_one():
    m = model()
    lossy = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m, values=0.5), m)
    run = Generation.start(handle(), PROMPT)
    run.read()
    done = switch(run.stop(), handle(), None, own_cache=lossy)
    assert done.report.reused == 0
    assert list(islice(Generation(done.state), 6)) == plain(m, 6)


def test_options_out_of_range_are_refused():
    for wrong in ({"native_start": -1}, {"native_end": 0}, {"max_mapped": 0}, {"prefill_step": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            SwitchOptions(**wrong)


def test_a_failure_while_mapping_is_timed_and_reported():
    source = handle()
    mapper = identity_mapper(source.load())
    mapper.layers[-1].values.weight = mapper.layers[-1].values.weight * float("nan")
    run = Generation.start(source, PROMPT)
    next(run)
    report = switch(run.stop(), handle(), mapper, ends(4, 3)).report
    assert set(report.seconds) == {"release", "load", "map", "prefill"}
    assert (report.native_start, report.mapped, report.native_end) == (0, 0, len(PROMPT) + 1)
    assert report.describe().splitlines()[0].endswith(f"re-prefill: {report.reason}")
