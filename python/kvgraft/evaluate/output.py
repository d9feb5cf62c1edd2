"""What is done with results: into the artifact, and to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvgraft.evaluate.plots import draw_all
from kvgraft.evaluate.report import build, to_html, to_markdown
from kvgraft.evaluate.summary import stored_quality
from kvgraft.files import atomic
from kvgraft.mapper.layout import REPORT
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality

__all__ = ["default_folder", "is_writable_artifact", "store", "write_results"]

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
    """Put verdict, policy and numbers into the artifact.

    ``mapper_config.json``, the configuration in the weights' header, the model
    card and the checksums are written anew, all in one step; the weights stay
    what they are.

    Raises:
        ArtifactWriteError: If that is not permitted, or the disk is full.
    """
    mapper.quality = Quality.from_record(stored_quality(results))
    mapper.save(path)


def write_results(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write the report: ``eval.json``, ``report.md`` with its figures, ``report.html``.

    Each file is replaced in one step. The numbers come first: if the figures
    can't be drawn, they are there.

    Args:
        folder: Where; made if it is not there.
        results: What :func:`kvgraft.evaluate.summary.summarise` returned.

    Raises:
        ArtifactWriteError: If writing there is not permitted.
    """
    numbers = _write(folder / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")
    figures = draw_all(results)
    for name, svg in figures.items():
        _write(folder / "figures" / f"{name}.svg", svg)
    report = build(results, figures)
    return [
        _write(folder / "report.html", to_html(report)),
        _write(folder / "report.md", to_markdown(report)),
        numbers,
    ]


def _write(path: Path, text: str) -> Path:
    atomic.write_text(path, text)
    return path
