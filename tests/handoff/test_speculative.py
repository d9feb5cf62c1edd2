"""Speculative decoding from a mapped draft cache: always the target's own text."""

from __future__ import annotations

import math
from typing import Any

import mappers
import mlx.core as mx
import pytest
import zoo
from identity import identity_mapper
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import is_mapped
from kvgraft.cache.map import map_cache
from kvgraft.demo.data import Conversation, bundled
from kvgraft.errors import CacheError, GeometryError, PairMismatchError, UnsupportedModelError
from kvgraft.handoff.speculative import acceptance, draft_cache, joint_cache, speculate
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import prefill
from kvgraft.models.loading import LoadedModel, load_model

CONTEXT = Conversation.bundled().context[:560].rpartition("\n")[0]
QUESTION = "\nUser: What animal belongs to Vera?\nAssistant:"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def pair() -> dict[str, LoadedModel]:
    """The demo pair in float32, where no two tokens tie."""
    loaded = {name: load_model(bundled(f"models/{name}")) for name in ("large", "small")}
    for model in loaded.values():
        model.model.set_dtype(mx.float32)
    return loaded


@pytest.fixture(scope="module")
def mapper() -> Mapper:
    return Mapper.load(bundled("mapper"))


@pytest.fixture(scope="module")
def ids(pair) -> tuple[list[int], list[int]]:
    encode = pair["large"].tokenizer.encode
    return encode(CONTEXT), encode(QUESTION, add_special_tokens=False)


def greedy(model: Any, prompt: list[int], cache: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS, prompt_cache=cache)
    return [token for token, _ in steps]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_a_random_map_changes_nothing_either(pair, mapper, ids, num_draft_tokens):
    random = mappers.mapper(mapper.source, mapper.target)
    target = pair["large"].model
    plain = greedy(target, ids[1], prefill(target, ids[0]))
    joint = joint_cache(prefill(target, ids[0]), random, target, pair["small"].model)
    out = list(
        speculate(ids[1], target, pair["small"].model, joint, max_tokens=MAX_TOKENS,
                  num_draft_tokens=num_draft_tokens)
    )  # fmt: skip
    assert [token for token, _ in out] == plain


def test_a_perfect_map_has_every_proposal_accepted():
    model = zoo.make("qwen3", seed=1)
    tokens = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7] * 3
    joint = joint_cache(prefill(model, tokens), identity_mapper(model), model, model)
    out = list(speculate([1, 2], model, model, joint, max_tokens=20, num_draft_tokens=3))
    assert acceptance([proposal for _, proposal in out], 3) == 1.0
    assert [t for t, _ in out] == greedy(model, [1, 2], prefill(model, tokens))[:20]


def test_mlx_lm_takes_the_joint_list(pair, mapper, ids):
    large, small = pair["large"], pair["small"]
    own = prefill(large.model, ids[0])
    joint = joint_cache(own, mapper, large.model, small.model)
    assert joint[: len(own)] == own and not is_mapped(own) and is_mapped(joint[len(own) :])
    text = "".join(
        reply.text
        for reply in stream_generate(
            large.model, large.tokenizer, ids[1], draft_model=small.model, prompt_cache=joint,
            max_tokens=MAX_TOKENS,
        )
    )  # fmt: skip
    plain = prefill(large.model, ids[0])
    expected = stream_generate(
        large.model, large.tokenizer, ids[1], prompt_cache=plain, max_tokens=MAX_TOKENS
    )
    assert text == "".join(reply.text for reply in expected)


def test_generation_ends_before_a_stop_token(pair, mapper, ids):
    target = pair["large"].model
    plain = greedy(target, ids[1], prefill(target, ids[0]))
    stop = plain[5]
    joint = joint_cache(prefill(target, ids[0]), mapper, target, pair["small"].model)
    out = list(speculate(ids[1], target, pair["small"].model, joint, stop=[stop]))
    assert [token for token, _ in out] == plain[: plain.index(stop)]


def test_the_draft_model_reads_the_native_end_itself(pair, mapper, ids):
    own = prefill(pair["large"].model, ids[0])
    draft = pair["small"].model
    n, tail = len(ids[0]), 10
    got = draft_cache(own, mapper, draft, tokens=ids[0], native_end=tail + 1)
    native = prefill(draft, ids[0])
    mapped = map_cache(own, mapper, draft)
    assert all(entry.offset == n for entry in got)
    # The first layer sees only the token, so there a native row is the native row.
    rows = [entry[0].keys[..., n - tail : n, :] for entry in (got, native, mapped)]
    assert mx.allclose(rows[0], rows[1], atol=1e-4)
    assert not mx.allclose(rows[0], rows[2], atol=1e-2)
    before = [entry[0].keys[..., : n - tail, :] for entry in (got, mapped)]
    assert mx.allclose(before[0], before[1], atol=1e-4)
    whole = draft_cache(own, mapper, draft, tokens=ids[0], native_end=n + 6)
    assert mx.allclose(whole[0].keys[..., :n, :], native[0].keys[..., :n, :], atol=1e-4)
    assert not is_mapped(whole)


@pytest.mark.parametrize("tokens", [None, [1, 2, 3]])
def test_a_native_end_needs_the_tokens(pair, mapper, ids, tokens):
    own = prefill(pair["large"].model, ids[0][:8])
    with pytest.raises(CacheError, match="8 tokens"):
        draft_cache(own, mapper, pair["small"].model, tokens=tokens, native_end=5)
    with pytest.raises(CacheError, match="at least 1"):
        draft_cache(own, mapper, pair["small"].model, native_end=0)


def test_the_wrong_way_round_is_refused(pair, mapper, ids):
    own = prefill(pair["small"].model, ids[0][:8])
    with pytest.raises(PairMismatchError):
        joint_cache(own, mapper, pair["small"].model, pair["large"].model)


@pytest.mark.parametrize(
    ("name", "reason"), [("lfm2", "take rejected tokens back"), ("gemma3n", "caches for")]
)
def test_models_that_cannot_go_back_are_refused(mapper, name, reason):
    model = zoo.make(name)
    with pytest.raises(UnsupportedModelError, match=reason):
        joint_cache(make_prompt_cache(model), mapper, model, model)


def test_a_cache_of_limited_size_is_refused(pair, mapper):
    cache = make_prompt_cache(pair["large"].model, max_kv_size=16)
    pair["large"].model(mx.array([list(range(1, 30))]), cache=cache)
    with pytest.raises(CacheError, match="max_kv_size"):
        joint_cache(cache, mapper, pair["large"].model, pair["small"].model)


def test_a_prompt_must_be_left(pair, mapper, ids):
    with pytest.raises(CacheError, match="At least one token"):
        next(speculate([], pair["large"].model, pair["small"].model, []))


def test_acceptance_counts_whole_rounds():
    assert acceptance([True, True, False, False, True], 2) == 2 / 4
    assert acceptance([False], 3) == 0
    assert math.isnan(acceptance([True, True], 3))
    assert math.isnan(acceptance([], 3))


def test_a_mapped_draft_cache_changes_no_token() -> None:
    # However poor the map is, each token is verified.
    tokens = [3, 14, 15, 9, 26, 5, 35]
    model, draft = zoo.make("qwen3"), zoo.make("qwen3", seed=1)
    want = [t for t, _ in generate_step(mx.array(tokens), model, max_tokens=8)]
    native = prefill(model, tokens[:-1])
    joint = native + map_cache(native, identity_mapper(model), draft)
    got = [
        token
        for token, *_ in speculative_generate_step(
            mx.array(tokens[-1:]), model, draft, prompt_cache=joint, max_tokens=8
        )
    ]
    assert got == want
    with pytest.raises(GeometryError, match="a draft model's cache is appended"):
        map_cache(joint, identity_mapper(model), model)
