"""Token ids beyond a model's vocabulary are refused by all that reads tokens."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import zoo

from kvgraft.errors import TokenIdError
from kvgraft.fit.capture import capture
from kvgraft.handoff import Generation, GenerationState
from kvgraft.models import vocabulary as tokens_module
from kvgraft.models.forward import continuation_nll, extend_cache, prefill
from kvgraft.models.vocabulary import check_tokens, vocabulary_size

SIZE = 264


@pytest.fixture(scope="module")
def model():
    return zoo.make(zoo.Tiny("qwen3", {"vocab_size": SIZE}))


READERS = {
    "prefill": lambda model, ids: prefill(model, ids),
    "extend_cache": lambda model, ids: extend_cache(model, ids, prefill(model, [1, 2])),
    "loss": lambda model, ids: continuation_nll(model, None, ids),
    "fit": lambda model, ids: capture(model, ids, np.arange(len(ids))),
    "generate": lambda model, ids: next(Generation.start(model, ids)),
    "generate on a cache": lambda model, ids: next(
        Generation(GenerationState.of(model, ids, prefill(model, ids[:1])))
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bad", [SIZE, -1, 10**6])
def test_ids_are_checked(reader, bad, model):
    READERS[reader](model, [3, SIZE - 1, 0])
    with pytest.raises(TokenIdError, match=rf"Token 2 has the id {bad}, .* from 0 to {SIZE - 1}"):
        READERS[reader](model, [3, SIZE - 1, bad, 5])


def test_what_cannot_be_known_is_let_through(model):
    assert vocabulary_size(model) == SIZE
    assert vocabulary_size(lambda ids, cache: None) is None
    check_tokens(object(), [10**9])
    check_tokens(model, [])


def test_a_model_that_is_gone_is_forgotten():
    one = zoo.make(zoo.Tiny("qwen3", {"vocab_size": 300}))
    key = id(one)
    assert vocabulary_size(one) == 300 and key in tokens_module._known
    del one
    gc.collect()
    assert key not in tokens_module._known
