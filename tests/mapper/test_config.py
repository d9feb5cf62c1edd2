"""``mapper_config.json`` against its schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import mappers
import mlx.core as mx
import pytest
from artifacts import assert_same_mapper

from kvgraft.errors import (
    FormatError,
    VersionError,
)
from kvgraft.mapper.config import from_config
from kvgraft.mapper.linear_map import Storage
from kvgraft.mapper.mapper import Mapper, open_mapper

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "mapper_config.schema.json").read_text())


@pytest.mark.parametrize(
    "mapper",
    [
        mappers.mapper(bits=4),
        mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True),
        replace(mappers.mapper(heads=[[1], [0]]), source_model=None, target_model=None),
    ],
)
def test_configurations_satisfy_the_schema(tmp_path, mapper):
    mapper.save(tmp_path / "a")
    config = json.loads((tmp_path / "a/mapper_config.json").read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(config, SCHEMA)


def test_the_documents_example_satisfies_the_schema_and_opens():
    text = (DOCS / "artifact.md").read_text()
    example = json.loads(re.findall(r"```json\n(.*?)```", text, re.S)[0])
    jsonschema.validate(example, SCHEMA)
    mapper = from_config(example, "the example", Mapper)
    assert mapper.layers[0].keys.storage == Storage("float16", 4, 32)
    assert mapper.source.layers[0].rope.freqs[-1] == math.inf


def _edits() -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
    def layer(c):
        return c["layers"][0]

    return [
        ("no format", lambda c: c.pop("format")),
        ("foreign format", lambda c: c.update(format="other")),
        ("no version", lambda c: c.pop("format_version")),
        ("version text", lambda c: c.update(format_version="1")),
        ("version true", lambda c: c.update(format_version=True)),
        ("no layers entry", lambda c: c.pop("layers")),
        ("zero layers", lambda c: c.update(layers=[])),
        ("no geometry", lambda c: c["source"].pop("geometry")),
        ("content_space text", lambda c: c.update(content_space="yes")),
        ("model dtype", lambda c: c["target"]["geometry"].update(dtype="int8")),
        ("no heads", lambda c: c["source"]["geometry"]["layers"][0].update(n_kv_heads=0)),
        ("odd dims", lambda c: c["source"]["geometry"]["layers"][0]["rope"].update(dims=7)),
        ("no base", lambda c: c["source"]["geometry"]["layers"][0]["rope"].pop("base")),
        ("negative layer", lambda c: layer(c).update(target_layer=-1)),
        ("no sources", lambda c: layer(c)["keys"].update(sources=[])),
        ("source text", lambda c: layer(c)["keys"].update(sources=["0", "1"])),
        ("shape of two", lambda c: layer(c)["keys"].update(shape=[2, 64])),
        ("empty group", lambda c: layer(c)["keys"].update(heads=[[], []])),
        ("weights dtype", lambda c: layer(c)["values"]["weights"].update(dtype="float8")),
        ("bits alone", lambda c: layer(c)["values"]["weights"].update(bits=4)),
        ("three bits", lambda c: layer(c)["values"]["weights"].update(bits=3, group_size=32)),
        ("score text", lambda c: layer(c).update(scores=[1])),
        ("fit a list", lambda c: c.update(fit=[])),
    ]


@pytest.mark.parametrize(("name", "edit"), _edits(), ids=[n for n, _ in _edits()])
def test_what_the_schema_refuses_the_reader_refuses(tmp_path, name, edit):
    mappers.mapper().save(tmp_path / "a")
    path = tmp_path / "a/mapper_config.json"
    config = json.loads(path.read_text())
    jsonschema.validate(config, SCHEMA)
    edit(config)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(config)
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError) as caught:
        open_mapper(tmp_path / "a")
    assert "mapper_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["layers"][0]["keys"].update(sources=[0, 7]), "contradicts itself"),
        (lambda c: c["layers"][1].update(target_layer=0), "contradicts itself: .* twice"),
        (lambda c: c["source"]["geometry"]["layers"][0]["rope"].update(dims=32), "more than its"),
        (lambda c: c.update(format_version=2), "version 2; this release reads 1. Upgrade"),
        (lambda c: c.update(format_version=0), "version 0; .* Fit or convert"),
    ],
)
def test_contradictions_and_versions(tmp_path, edit, message):
    mappers.mapper().save(tmp_path / "a")
    path = tmp_path / "a/mapper_config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    kind = VersionError if "version" in message else FormatError
    with pytest.raises(kind, match=message):
        open_mapper(tmp_path / "a")


def test_unknown_entries_are_ignored(tmp_path):
    mappers.mapper().save(tmp_path / "a.safetensors")
    arrays, metadata = mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)
    config = json.loads(metadata["config"])
    config["later"] = {"x": 1}
    config["layers"][0]["keys"]["later"] = 1
    mx.save_safetensors(
        str(tmp_path / "b.safetensors"), arrays, {**metadata, "config": json.dumps(config)}
    )
    assert_same_mapper(
        open_mapper(tmp_path / "a.safetensors"), open_mapper(tmp_path / "b.safetensors")
    )
