"""Whether a hand-off maps or re-prefills, and why."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from itertools import islice

import mlx.core as mx
import pytest
import zoo
from conversations import PROMPT, handle, model, plain, within
from identity import identity_mapper
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import is_mapped
from kvgraft.errors import MemoryLimitError, TruncatedFileError
from kvgraft.handoff import Generation, GenerationState, SwitchOptions, switch
from kvgraft.mapper.quality import Quality


def test_too_small_a_limit_is_refused_before_anything_is_released():
    source = handle()
    mapper = identity_mapper(source.load())
    want = plain(source.load(), 6)
    run = Generation.start(source, PROMPT)
    got = list(islice(run, 2))
    state = run.stop()
    live = handle()
    live.load()
    with pytest.raises(MemoryLimitError, match="does not fit"):
        switch(state, live, mapper, within(10_000))
    assert source.is_loaded
    assert got + list(islice(Generation(state), 4)) == want


def test_a_limit_for_prefill_but_not_for_mapping_re_prefills():
    source, target = handle(), handle()
    size = target.load() and target.nbytes
    mapper = identity_mapper(source.load())
    run = Generation.start(source, PROMPT)
    next(run)
    state = run.stop()
    gc.collect()  # the plan counts everything else that is in memory
    probe = switch(state, target, mapper, within(1 << 40, keep_source=True)).report
    read = probe.plan.stages[1].nbytes - size
    assert read > 0
    done = switch(state, target, mapper, within(probe.plan.peak - 1, keep_source=True))
    assert "mapping would take" in done.report.reason


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
def test_whatever_prevents_mapping_re_prefills_and_says_so(case, caplog):
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
    assert "prefill" in done.report.seconds
    assert got + list(islice(Generation(done.state), 7)) == want


def test_a_bad_verdict_can_be_overruled():
    source = handle()
    mapper = identity_mapper(source.load())
    mapper.quality = Quality.from_record({"verdict": "do not ship", "reasons": ["too bad"]})
    run = Generation.start(source, PROMPT)
    next(run)
    done = switch(run.stop(), handle(), mapper, SwitchOptions(force=True))
    assert done.report.mapped and "too bad" in done.report.warnings[0]


def test_what_the_evaluation_recommends_is_the_default():
    source = handle()
    mapper = identity_mapper(source.load())
    policy = {"head": 3, "tail": 5}
    mapper.quality = Quality.from_record(
        {"verdict": "ship with warning", "reasons": ["recall drops"], "policy": policy}
    )
    run = Generation.start(source, PROMPT)
    next(run)
    report = switch(run.stop(), handle(), mapper).report
    assert (report.native_start, report.native_end) == (3, 5)
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


def test_a_limit_too_small_for_a_target_of_unknown_shape_loses_nothing():
    source = handle()
    want = plain(source.load(), 4)
    state = Generation.start(source, PROMPT * 40).stop()
    target = handle()
    held = mx.get_active_memory()
    with pytest.raises(MemoryLimitError, match="The conversation is unchanged"):
        switch(state, target, None, within(held + target_bytes() + 1000))
    assert not target.is_loaded
    assert list(islice(Generation(replace(state, tokens=PROMPT)), 4)) == want


def target_bytes() -> int:
    fresh = handle()
    fresh.load()
    size = fresh.nbytes
    assert size
    return size
