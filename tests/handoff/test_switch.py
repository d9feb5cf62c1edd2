"""Moving a running generation from one model to another."""

from __future__ import annotations

import gc
import logging
import threading
from itertools import islice

import mlx.core as mx
import pytest
import zoo
from identity import identity_mapper
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvgraft.cache import is_mapped, n_tokens
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, HandoffError, MemoryLimitError, TruncatedFileError
from kvgraft.handoff import Generation, GenerationState, MemoryLimit, Span, switch
from kvgraft.mapper.quality import Quality
from kvgraft.models.forward import prefill
from kvgraft.models.handle import ModelHandle

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46, 26, 43, 38]
ARCH = "qwen3"


def model(seed: int = 1):
    return zoo.make(ARCH, seed=seed)


def handle(seed: int = 1) -> ModelHandle:
    return ModelHandle(lambda: model(seed), name=f"seed {seed}")


def plain(model, n: int, *, seed: int | None = None, **options) -> list[int]:
    """What mlx_lm generates when nobody interrupts it."""
    if seed is not None:
        mx.random.seed(seed)
    if zoo.MLX_LM < (0, 32):  # its processors see only the last token of a prompt
        options["logits_processors"] = [
            lambda seen, logits, p=p: p(mx.array(PROMPT[:-1] + seen.tolist()), logits)
            for p in options.get("logits_processors", ())
        ]
    steps = generate_step(mx.array(PROMPT), model, max_tokens=n, **options)
    return [int(token) for token, _ in steps]


def logprobs(logits: mx.array) -> mx.array:
    return logits[0, -1] - mx.logsumexp(logits[0, -1])


def options(kind: str) -> dict:
    return {
        "greedy": {},
        "sampled": {"sampler": make_sampler(temp=1.0)},
        "top-p and penalty": {
            "sampler": make_sampler(temp=1.2, top_p=0.95),
            "logits_processors": make_logits_processors(
                repetition_penalty=1.7, repetition_context_size=12
            ),
        },
    }[kind]


# ------------------------------------------------------------------ one model, no switch


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
def test_a_generation_emits_what_mlx_lm_does(kind):
    net = model()
    want = plain(net, 20, seed=5, **options(kind))
    mx.random.seed(5)
    run = Generation.start(net, PROMPT, max_tokens=20, **options(kind))
    assert list(run) == want
    assert run.state.tokens == PROMPT + want


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
def test_stopping_and_resuming_leaves_no_trace(kind):
    net = model()
    want = plain(net, 20, seed=5, **options(kind))
    mx.random.seed(5)
    run = Generation.start(net, PROMPT, **options(kind))
    got = list(islice(run, 7))
    state = run.stop()
    mx.random.seed(99)  # what happens in between doesn't count
    with pytest.raises(HandoffError, match="stopped"):
        next(run)
    got += islice(Generation(state), 13)
    assert got == want


# ------------------------------------------------------------------------- exact switches


@pytest.mark.parametrize("kind", ["greedy", "sampled", "top-p and penalty"])
@pytest.mark.parametrize("after", [1, 9])
def test_an_exact_map_gives_the_uninterrupted_run(kind, after):
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 20, seed=5, **options(kind))
    mx.random.seed(5)
    run = Generation.start(source, PROMPT, **options(kind))
    got = list(islice(run, after))
    done = switch(run.stop(), handle(), mapper)
    assert done.report.reason is None
    assert done.report.mapped == len(PROMPT) + after - 1 and done.report.tail == 1
    assert done.state.n_mapped == done.report.mapped
    got += islice(Generation(done.state), 20 - after)
    assert got == want


@pytest.mark.parametrize(("head", "tail"), [(0, 1), (5, 1), (0, 6), (4, 3), (7, 50), (500, 1)])
def test_head_and_tail_with_an_exact_map(head, tail):
    source = handle()
    want = plain(source.load(), 20)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 6))
    done = switch(run.stop(), handle(), identity_mapper(model()), head=head, tail=tail)
    n, report = len(PROMPT) + 6, done.report
    assert report.head + report.mapped + report.tail == n
    if report.reason is None:
        assert (report.head, report.tail) == (head, tail)
    else:
        assert "nothing is left to map" in report.reason and not is_mapped(done.state.cache)
    assert n_tokens(done.state.cache) == n - 1
    got += islice(Generation(done.state), 14)
    assert got == want


# Rings of 8 that wrap while reading (18 tokens) or only while generating (5 tokens).
@pytest.mark.parametrize("length", [5, 18])
@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("arch", ["gemma3_text", "olmo3", "gpt_oss"])
def test_sliding_layers_go_on_exactly(arch, length, head):
    net = zoo.make(arch, seed=1)
    mapper = identity_mapper(net)
    steps = generate_step(mx.array(PROMPT[:length]), net, max_tokens=20)
    want = [int(token) for token, _ in steps]
    run = Generation.start(zoo.make(arch, seed=1), PROMPT[:length])
    got = list(islice(run, 6))
    done = switch(run.stop(), zoo.make(arch, seed=1), mapper, head=head)
    assert done.report.reason is None and done.report.head == head
    got += islice(Generation(done.state), 14)
    assert got == want


def test_a_ring_that_wrapped_goes_back_by_one_token_only():
    net = zoo.make("gemma3_text", seed=1)
    want = plain(net, 12)
    run = Generation.start(net, PROMPT)
    got = list(islice(run, 6))
    done = switch(run.stop(), zoo.make("gemma3_text", seed=1), identity_mapper(net), tail=4)
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
        done = switch(state, model(), mapper, tail=3, keep_source=True)
        if mapper is not None:
            assert (done.report.mapped, done.report.tail) == (len(PROMPT) - 3, 3)
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
    done = switch(GenerationState.of(net, PROMPT, cache), target, None, keep_source=True)
    assert {type(entry).__name__ for entry in done.state.cache} == {"KVCache"}
    assert "not quantised any more" in done.report.warnings[0]


def test_head_rows_are_the_targets_own_and_the_others_are_not():
    source, target = handle(1), model(2)
    run = Generation.start(source, PROMPT)
    next(run)
    done = switch(run.stop(), target, identity_mapper(model(1)), head=5, tail=4)
    native = prefill(target, PROMPT)
    for mapped, own in zip(done.state.cache, native, strict=True):
        assert mx.allclose(mapped.keys[..., :5, :], own.keys[..., :5, :], atol=1e-5)
        assert not mx.allclose(mapped.keys[..., 5:15, :], own.keys[..., 5:15, :], atol=1e-2)
    assert done.state.spans == [Span(5, 0), Span(10, 1), Span(3, 0)]


def test_the_pending_token_of_the_source_is_never_emitted():
    """The target chooses, from its own logits after the last emitted token."""
    source, target = model(1), model(2)
    state = GenerationState.of(source, PROMPT, prefill(source, PROMPT))
    done = switch(state, target, identity_mapper(source), head=len(PROMPT) - 2)
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


def test_a_conversation_of_one_token():
    net = model()
    want = int(mx.argmax(net(mx.array([[5]]))[0, -1]))
    state = GenerationState.of(net, [5], prefill(net, [5]))
    done = switch(state, model(), identity_mapper(net))
    assert "nothing is left to map" in done.report.reason
    assert next(Generation(done.state)) == want


def test_a_loop_of_ones_own_goes_on_from_cache_and_unread_tokens():
    net = model()
    want = plain(net, 6)
    state = GenerationState.of(net, PROMPT, prefill(net, PROMPT[:-1]))
    after = switch(state, model(), identity_mapper(net), tail=4).state
    assert after.unread == PROMPT[-1:]
    steps = generate_step(
        mx.array(after.unread), after.handle.load(), max_tokens=6, prompt_cache=after.cache
    )
    assert [int(token) for token, _ in steps] == want


# ------------------------------------------------------------------------------- memory


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
    assert alive == [False] and done.report.warnings == []
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
    done = switch(state, handle(), identity_mapper(source.load()), keep_source=True)
    assert source.is_loaded
    assert got + list(islice(Generation(done.state), 8)) == want
    assert got + list(islice(Generation(state), 8)) == want


def test_too_small_a_budget_is_refused_before_anything_is_released():
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 6)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 2))
    state = run.stop()
    live = handle()
    live.load()
    with pytest.raises(MemoryLimitError, match="does not fit"):
        switch(state, live, mapper, memory_limit=MemoryLimit(10_000))
    assert source.is_loaded
    assert got + list(islice(Generation(state), 4)) == want


def test_a_budget_for_reading_but_not_for_mapping_reads():
    source, target = handle(), handle()
    size = target.load() and target.nbytes
    mapper = identity_mapper(source.load())
    run = Generation.start(source, PROMPT)
    next(run)
    state = run.stop()
    # What the plan can't know of: everything else that these tests hold.
    memory_limit = MemoryLimit(0)
    probe = switch(
        state, target, mapper, keep_source=True, memory_limit=MemoryLimit(1 << 40)
    ).report
    read = probe.plan.stages[1].nbytes - size
    assert read > 0
    memory_limit = MemoryLimit(probe.plan.peak - 1)
    done = switch(state, target, mapper, keep_source=True, memory_limit=memory_limit)
    assert "mapping would take" in done.report.reason


def test_exceeding_the_limit_while_mapping_reads_instead():
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 9)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 3))
    readings = iter([10, 5000, 5000])
    memory_limit = MemoryLimit(1 << 40, observe=lambda: (1 << 41) if next(readings) > 100 else 0)
    done = switch(run.stop(), handle(), mapper, memory_limit=memory_limit)
    assert "while mapping layer 1" in done.report.reason
    assert not is_mapped(done.state.cache)
    assert got + list(islice(Generation(done.state), 6)) == want


# ----------------------------------------------------------------------------- fallback


def _fails(case: str, mapper):
    if case == "no mapper":
        return None, "no mapper"
    if case == "absent file":
        return "/nowhere/mapper", "nowhere"
    if case == "other pair":
        return identity_mapper(zoo.make("llama linear")), "other models"
    if case == "verdict":
        mapper.quality = Quality.from_record(
            {"verdict": "do not ship", "reasons": ["worse than no context"]}
        )
        return mapper, "worse than no context"
    if case == "nan":
        mapper.layers[-1].values.weight = mapper.layers[-1].values.weight * float("nan")
        return mapper, "NaN"
    if case == "no weights":
        mapper.layers[-1].unload()
        return mapper, "no weights"
    if case == "damaged file":  # seen only when the last layer is read

        class Store:
            def fill(self, layer):
                raise TruncatedFileError("the file ends early")

            def read_ahead(self, layer):
                pass

        last, mapper.store = mapper.layers[-1], Store()
        for part in (last.keys, last.values):
            part.on_disk = part.storage
        last.unload()
        return mapper, "ends early"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    ["no mapper", "absent file", "other pair", "verdict", "nan", "no weights", "damaged file"],
)
def test_whatever_prevents_mapping_reads_again_and_says_so(case, caplog):
    source = handle()
    want = plain(source.load(), 12)
    mapper, reason = _fails(case, identity_mapper(source.load()))
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 5))
    with caplog.at_level(logging.WARNING, logger="kvgraft.handoff"):
        done = switch(run.stop(), handle(), mapper)
    assert reason in done.report.reason
    assert reason in caplog.text
    assert done.report.mapped == 0 and not is_mapped(done.state.cache)
    assert "read" in done.report.seconds
    assert got + list(islice(Generation(done.state), 7)) == want


def test_a_bad_verdict_can_be_overruled():
    source = handle()
    mapper = identity_mapper(source.load())
    mapper.quality = Quality.from_record({"verdict": "do not ship", "reasons": ["too bad"]})
    run = Generation.start(source, PROMPT)
    next(run)
    done = switch(run.stop(), handle(), mapper, force=True)
    assert done.report.mapped and "too bad" in done.report.warnings[0]


def test_the_mappers_policy_is_the_default():
    source = handle()
    mapper = identity_mapper(source.load())
    policy = {"head": 3, "tail": 5}
    mapper.quality = Quality.from_record(
        {"verdict": "ship with warning", "reasons": ["recall drops"], "policy": policy}
    )
    run = Generation.start(source, PROMPT)
    next(run)
    report = switch(run.stop(), handle(), mapper).report
    assert (report.head, report.tail) == (3, 5)
    assert "recall drops" in report.warnings[0]


def test_a_source_cache_that_cannot_be_read_is_no_obstacle():
    source = model()
    want = plain(source, 6)
    cache = make_prompt_cache(source)
    source(mx.array([PROMPT]), cache=cache)
    cache = [entry.to_quantized(group_size=32, bits=8) for entry in cache]
    cache[0].keys = None
    state = GenerationState.of(source, PROMPT, cache)
    done = switch(state, model(), identity_mapper(source))
    assert done.report.reason is not None
    assert list(islice(Generation(done.state), 6)) == want


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


# -------------------------------------------------------------------------------- drift


def test_rows_mapped_too_often_are_read_again():
    mapper = identity_mapper(model())
    source = handle()
    want = plain(source.load(), 30)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 6))
    reports = []
    for _ in range(3):
        done = switch(run.stop(), handle(), mapper, max_mapped=1)
        reports.append(done.report)
        run = Generation(done.state)
        got += islice(run, 8)
    n = len(PROMPT)
    assert [r.head for r in reports] == [0, n + 5, n + 5 + 8 + 0]
    assert [r.mapped for r in reports] == [n + 5, 8, 8]
    assert "errors do not add up" in reports[1].warnings[0]
    assert got == want


def test_without_a_limit_generations_are_counted():
    mapper = identity_mapper(model())
    run = Generation.start(handle(), PROMPT)
    next(run)
    for n in (1, 2, 3):
        done = switch(run.stop(), handle(), mapper, max_mapped=None)
        assert done.state.spans[0].mapped == n
        run = Generation(done.state)
        next(run)


def test_a_cache_of_the_targets_own_is_used_as_head():
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
    assert (back.report.reused, back.report.head, back.report.mapped) == (n, n, 6)
    assert back.state.spans == [Span(n, 0), Span(6, 1)]
    got += islice(Generation(back.state), 8)
    assert got == want


# ------------------------------------------------------------------------------- repair


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

    monkeypatch.setattr(run.state.repair, "advance", fail)
    got += islice(run, 8)
    assert got == want and "no more" in run.events[0]
    gc.collect()


# ------------------------------------------------------------- what outlives a hand-off


def test_a_marked_cache_counts_as_mapped():
    m = model()
    mapped = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m)
    state = GenerationState.of(handle(), PROMPT, mapped)
    assert state.spans == [Span(len(PROMPT) - 1, 1)] and state.n_mapped == len(PROMPT) - 1
    # Its rows are not mapped a second time, and can be repaired.
    done = switch(state, handle(), identity_mapper(m))
    assert done.report.mapped == 0
    head = prefill(m, PROMPT[:4])
    behind = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m), m, start_cache=head)
    state = GenerationState.of(handle(), PROMPT, behind)
    assert state.spans == [Span(4, 0), Span(len(PROMPT) - 5, 1)]
    run = Generation(state)
    assert run.repair(chunk=64)


def test_a_marked_cache_of_the_targets_own_is_not_taken_for_a_native_one():
    m = model()
    lossy = map_cache(prefill(m, PROMPT[:-1]), identity_mapper(m, values=0.5), m)
    run = Generation.start(handle(), PROMPT)
    run.read()
    done = switch(run.stop(), handle(), None, own_cache=lossy)
    assert done.report.reused == 0
    assert list(islice(Generation(done.state), 6)) == plain(m, 6)


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
    want = plain(model(), 8, seed=7, **options(kind))
    source = handle()
    source.load()
    run = Generation.start(source, PROMPT, **options(kind))
    got: list[int] = []

    def begin():
        mx.random.seed(7)  # each thread has a sequence of its own
        got.extend(islice(run, 3))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    state = run.stop()
    assert got + list(islice(Generation(state), 5)) == want


def test_a_size_limit_is_kept_when_the_conversation_is_read_again():
    m = model()
    cache = make_prompt_cache(m, max_kv_size=12)
    m(mx.array([PROMPT]), cache=cache)
    state = GenerationState.of(handle(), PROMPT, cache)  # holds all: back by one is not possible
    run = Generation(state)
    next(run)
    assert "cannot go back" in run.events[0]
    assert [entry.max_size for entry in run.stop().cache] == [12, 12]
    done = switch(state, handle(), None)
    assert {type(e).__name__ for e in done.state.cache} == {"RotatingKVCache"}


def test_a_budget_too_small_for_a_target_of_unknown_shape_loses_nothing():
    source = handle()
    want = plain(source.load(), 4)
    state = Generation.start(source, PROMPT * 40).stop()
    state.tokens = PROMPT * 40
    target = handle()
    held = mx.get_active_memory()
    with pytest.raises(MemoryLimitError, match="The conversation is as it was"):
        switch(state, target, None, memory_limit=MemoryLimit(held + target_bytes() + 1000))
    assert not target.is_loaded
    state.tokens = list(PROMPT)
    assert list(islice(Generation(state), 4)) == want


def target_bytes() -> int:
    fresh = handle()
    fresh.load()
    size = fresh.nbytes
    assert size
    return size
