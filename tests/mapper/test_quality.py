"""The typed quality record, and the warnings that follow from it."""

from __future__ import annotations

import json
import warnings

import mappers
import pytest

import kvgraft
from kvgraft.errors import FormatError, QualityWarning
from kvgraft.mapper import quality as quality_module
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.quality import DO_NOT_SHIP, SHIP, WARN, Quality


def test_a_record_is_read_and_kept():
    record = {"verdict": WARN, "reasons": ["a", "b"], "policy": {"head": 4, "tail": 16}, "kl": 0.5}
    quality = Quality.from_record(record)
    assert (quality.verdict, quality.reasons) == (WARN, ("a", "b"))
    assert (quality.native_start, quality.native_end) == (4, 16)
    assert quality.evaluated and quality.record == record


def test_an_empty_record_means_not_evaluated():
    assert Quality.from_record({}) == Quality()
    assert not Quality().evaluated and Quality().refusal() is None
    assert "never evaluated" in Quality().warnings()[0]


def test_native_end_counts_the_token_that_generation_continues_from():
    assert Quality.from_record({"policy": {"tail": 0}}).native_end == 1


@pytest.mark.parametrize("verdict", [SHIP, WARN, DO_NOT_SHIP, "of another version"])
def test_refusal_and_warnings(verdict):
    quality = Quality.from_record({"verdict": verdict, "reasons": ["Too bad."]})
    refusal, warned = quality.refusal(), quality.warnings()
    assert (refusal is not None) == (verdict == DO_NOT_SHIP)
    assert refusal is None or "Too bad." in refusal
    assert (warned == []) == (verdict == SHIP)
    assert warned == [] or "Too bad." in warned[0]


MALFORMED = [
    {"policy": {"head": -1}},
    {"policy": {"tail": "4"}},
    {"policy": {"tail": True}},
    {"policy": {"head": 1.5}},
    {"policy": [4, 16]},
    {"verdict": 3},
    {"reasons": "not a list"},
]


@pytest.mark.parametrize("record", MALFORMED)
def test_a_malformed_record_is_refused(tmp_path, record):
    with pytest.raises(FormatError):
        Quality.from_record(record)
    mapper = mappers.mapper()
    mapper.quality = Quality(record=record)  # as an edited file would hold it
    path = mapper.save(tmp_path / "a")
    assert json.loads((path / "mapper_config.json").read_text())["quality"] == record
    for load in (Mapper.load, kvgraft.load_mapper, open_mapper):
        with pytest.raises(FormatError, match=r"mapper_config\.json: the (policy|verdict|reasons)"):
            load(path)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(quality_module, "_warned", set())


def saved(tmp_path, record, name="m"):
    mapper = mappers.mapper()
    mapper.quality = Quality.from_record(record)
    return mapper.save(tmp_path / name)


@pytest.mark.parametrize(
    "record, words",
    [
        ({}, "never evaluated"),
        ({"verdict": WARN, "reasons": ["Exact recall is lost."]}, "Exact recall is lost"),
        ({"verdict": DO_NOT_SHIP, "reasons": ["It is worse."]}, "do not ship. It is worse."),
        ({"verdict": "of another version"}, "never evaluated"),
    ],
)
@pytest.mark.parametrize("load", [kvgraft.load_mapper, Mapper.load, kvgraft.KVMapper.load])
def test_opening_a_doubtful_mapper_warns_once(tmp_path, fresh, record, words, load):
    path = saved(tmp_path, record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_mapper(path)
    with pytest.warns(QualityWarning, match=words) as caught:
        load(path)
    assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvgraft.load_mapper(path)
        Mapper.load(path)
    with pytest.warns(QualityWarning):
        load(saved(tmp_path, record, "another"))


def test_opening_a_good_mapper_is_quiet(tmp_path, fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvgraft.load_mapper(saved(tmp_path, {"verdict": SHIP, "reasons": []}))
