"""The model card."""

from __future__ import annotations

from dataclasses import replace

import mappers
import yaml

from kvgraft.mapper.quality import Quality


def test_the_card_says_what_was_measured(tmp_path):
    mapper = mappers.mapper()
    mapper.save(tmp_path / "a")
    text = (tmp_path / "a/README.md").read_text()
    assert "**Not evaluated.**" in text
    mapper.quality = Quality.from_record(
        {"nll": {"native": 2.5, "mapped": 2.75}, "verdict": "ship | warn"}
    )
    mapper.save(tmp_path / "a")
    text = (tmp_path / "a/README.md").read_text()
    assert "Not evaluated" not in text
    assert "| nll.mapped | 2.75 |" in text and r"| verdict | ship \| warn |" in text


def test_the_cards_front_matter_is_what_the_hub_reads(tmp_path):
    mapper = mappers.mapper()
    mapper.target_model = replace(mapper.target_model, name="/home/me/small model")
    mapper.save(tmp_path / "a")
    _, front, _ = (tmp_path / "a/README.md").read_text().split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["library_name"] == "mlx" and "mlx" in data["tags"]
    assert data["base_model"] == ["org/large"]  # a local path is no base model
