"""lm-evaluation-harness on mapped caches."""

from __future__ import annotations

import math
import os

import pytest
from eval_problems import identity
from fit_problems import prose, save_model

from kvgraft.errors import PairMismatchError
from kvgraft.mapper.quality import Quality
from kvgraft.models.forward import prefill

if not os.environ.get("KVGRAFT_CI"):  # an optional extra; build machines have it
    pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from mlx_lm.evaluate import MLXLM  # noqa: E402

from kvgraft.evaluate.lm_eval import MappedLM  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("harness")
    save_model(path / "model")
    save_model(path / "deeper", seed=1, num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def native(folder):
    return MLXLM(str(folder / "model"), use_chat_template=False)


def grafted(folder, mapper=None, **options):
    mapper = identity(folder / "model") if mapper is None else mapper
    model = folder / "model"
    return MappedLM(model, model, mapper, use_chat_template=False, **options)


CONTEXT = prose(40)
PAIRS = [(CONTEXT, " river stone"), (CONTEXT, " lamp"), ("a", "c"), (prose(9), " quiet harbour")]


def scores(lm):
    return lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS])


@pytest.mark.parametrize("ends", [(0, 1), (0, 5), (4, 1), (3, 7)])
def test_a_perfect_map_scores_as_the_model_itself(folder, native, ends):
    got, want = scores(grafted(folder, native_start=ends[0], native_end=ends[1])), scores(native)
    for (a, greedy_a), (b, greedy_b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, abs=1e-3) and greedy_a == greedy_b


def test_a_bad_map_shows(folder, native):
    mapper = identity(folder / "model")
    for m in mapper.layers:
        m.values.weight = m.values.weight * -3.0
    got, want = scores(grafted(folder, mapper)), scores(native)
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, want)) > 0.01
    assert got[2][0] == pytest.approx(want[2][0], abs=1e-3), "too short to be handed over"


def test_replies_stop_where_the_task_says(folder):
    lm = grafted(folder)
    ask = lambda **options: lm.generate_until(  # noqa: E731
        [Instance("generate_until", {}, (CONTEXT, options), 0)]
    )[0]
    whole = ask(until=[], max_gen_toks=12)
    cache = prefill(lm._model, lm.tokenizer.encode(CONTEXT, add_special_tokens=False)[:-1])
    assert cache[0].offset > 0 and whole
    cut = whole[len(whole) // 2]
    assert ask(until=[cut, ""], max_gen_toks=12) == whole[: whole.index(cut)]
    assert ask(until=cut, max_gen_toks=12) == whole[: whole.index(cut)]
    assert lm.tokenizer.decode(lm.tokenizer.encode(ask(max_gen_toks=3))) in whole


def test_the_policy_is_the_mappers(folder):
    mapper = identity(folder / "model")
    mapper.quality = Quality.from_record({"verdict": "ship", "policy": {"head": 4, "tail": 32}})
    lm = grafted(folder, mapper)
    assert (lm._native_start, lm._native_end) == (4, 32)
    assert math.isfinite(scores(lm)[0][0])


def test_another_pair_is_refused(folder):
    with pytest.raises(PairMismatchError):
        MappedLM(folder / "deeper", folder / "model", identity(folder / "model"))
