"""What ``verify`` finds."""

from __future__ import annotations

import json

import pytest

from kvgraft.errors import (
    ChecksumError,
    FormatError,
    MapperNotFoundError,
)
from kvgraft.mapper.mapper import open_mapper
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.verify import verify_artifact


def test_one_altered_byte_is_found_by_verify(folder):
    path = folder / "mapper.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert open_mapper(folder).layers  # headers are intact
    report = verify_artifact(folder)
    assert not report.ok
    assert {f.name: f.status for f in report.files}["mapper.safetensors"] == "altered"
    assert "NOT OK" in str(report) and "mapper.safetensors was altered" in str(report)
    with pytest.raises(ChecksumError, match="mapper.safetensors was altered"):
        open_mapper(folder, verify=True)


def test_an_altered_index_is_found_by_verify(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["files"]["mapper_config.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(index))
    assert [type(e) for e in verify_artifact(folder).errors] == [ChecksumError]


def test_a_missing_index_is_an_error_of_verify_only(folder):
    (folder / "index.json").unlink()
    open_mapper(folder)
    report = verify_artifact(folder)
    assert [type(e) for e in report.errors] == [MapperNotFoundError]


def test_weights_that_the_index_leaves_out(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    del index["files"]["mapper.safetensors"]
    path.write_text(json.dumps(index))
    report = verify_artifact(folder)
    assert not report.ok and "mapper.safetensors is not listed" in str(report)


def test_an_edited_card_is_no_damage(folder):
    with open(folder / "README.md", "a") as file:
        file.write("license: mit\n")
    report = open_mapper(folder, verify=True) and verify_artifact(folder)
    assert report.ok and "edited" in {f.status for f in report.files}
    (folder / "README.md").unlink()
    assert open_mapper(folder).layers


def test_verify_of_good_artifacts(folder, tmp_path):
    report = verify_artifact(folder)
    assert report.ok and report.kind == "folder"
    assert {f.status for f in report.files} == {"ok"} and len(report.files) == 3
    assert "OK" in str(report) and "org/large" in str(report) and "never evaluated" in str(report)
    mapper = open_mapper(folder)
    mapper.quality = Quality.from_record({"verdict": "ship"})
    mapper.save(tmp_path / "a.safetensors")
    report = verify_artifact(tmp_path / "a.safetensors")
    assert report.ok and "no checksum" in str(report) and "never evaluated" not in str(report)
    assert open_mapper(folder, verify=True).layers


def test_checksum_names_that_lead_elsewhere(folder):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["files"]["../../etc/passwd"] = {"size": 1, "sha256": ""}
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match="no part of a mapper"):
        open_mapper(folder)
