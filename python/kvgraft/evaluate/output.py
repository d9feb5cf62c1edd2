"""Write results: into the artifact, and as a report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from kvgraft.evaluate.report import build, to_markdown
from kvgraft.evaluate.report_html import to_html
from kvgraft.evaluate.summary import stored_quality
from kvgraft.files import atomic
from kvgraft.mapper.layout import REPORT
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality

__all__ = ["can_draw", "default_folder", "is_writable_artifact", "store", "write_results"]

RESULTS = "eval.json"


def is_writable_artifact(path: Path) -> bool:
    """Whether ``path`` is kvgraft's own format, which has room for the verdict."""
    return path.is_file() or (path / "mapper_config.json").is_file()


def default_folder(path: Path, inside: bool) -> Path:
    """Where results go: ``eval`` in the artifact's folder, or a folder beside it."""
    if inside and path.is_dir():
        return path / REPORT
    return path.parent / f"{path.stem if path.is_file() else path.name}-eval"


def store(mapper: Mapper, path: Path, results: dict[str, Any]) -> None:
    """Write verdict, recommended native tokens and numbers into the artifact.

    ``mapper_config.json``, the configuration in the weights' header, the model
    card and the checksums are replaced in one step; the weights do not change.

    Raises:
        ArtifactWriteError: If that is not permitted, or the disk is full.
    """
    mapper.quality = Quality.from_record(stored_quality(results))
    mapper.save(path)


def write_results(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write the report: ``eval.json``, ``report.md`` with its figures, ``report.html``.

    Each file is replaced in one step, the numbers first. Without matplotlib there are no
    figures, and the report says so.

    Args:
        folder: Where; made if it is not there.
        results: What :func:`kvgraft.evaluate.summary.summarise` returned.

    Raises:
        ArtifactWriteError: If writing there is not permitted.
    """
    numbers = _write(folder / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")
    figures = _draw(results) if can_draw() else {}
    for name, svg in figures.items():
        _write(folder / "figures" / f"{name}.svg", svg)
    report = build(results, figures)
    return [
        _write(folder / "report.html", to_html(report)),
        _write(folder / "report.md", to_markdown(report)),
        numbers,
    ]


def can_draw() -> bool:
    """Whether matplotlib is installed, which only the figures need."""
    return importlib.util.find_spec("matplotlib") is not None


def _draw(results: dict[str, Any]) -> dict[str, str]:
    from kvgraft.evaluate.plots import draw_all

    return draw_all(results)


def _write(path: Path, text: str) -> Path:
    atomic.write_text(path, text)
    return path
