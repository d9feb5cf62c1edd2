"""An evaluation's working folder: what survives an interruption.

One file per unit of work (a document, a task), written beside and renamed, so
that an evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvgraft.errors import EvaluationError

__all__ = ["EvalCheckpoint"]

_IDENTITY = "evaluation.json"
SourceLayers = dict[int, tuple[mx.array, mx.array]]


class EvalCheckpoint:
    """The folder of one evaluation.

    Args:
        path: The folder; made if it is not there.
        identity: JSON-ready facts; a folder of another evaluation is refused.

    Raises:
        EvaluationError: If the folder belongs to something else or cannot be
            written.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        wanted = json.loads(json.dumps(identity))
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = path / _IDENTITY
            if found.exists():
                have = json.loads(found.read_text(encoding="utf-8"))
                wrong = sorted(k for k in {*have, *wanted} if have.get(k) != wanted.get(k))
                if wrong:
                    raise EvaluationError(
                        f"{path} holds another evaluation: {', '.join(wrong)} differ. Resume with "
                        "the same mapper, models, text and settings, or start in a new folder."
                    )
            elif any(path.iterdir()):
                raise EvaluationError(
                    f"{path} is not empty and holds no unfinished evaluation. Give an empty or "
                    "new folder to resume from."
                )
            else:
                self._write(_IDENTITY, wanted)
        except (OSError, ValueError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"Cannot use {path} as a working folder: {error}.") from error

    def read(self, name: str) -> Any:
        """A unit's result, or ``None`` if it isn't done."""
        path = self.path / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, name: str, result: Any) -> None:
        """Keep a unit's result."""
        self._write(f"{name}.json", result)

    def keep_cache(self, name: str, layers: SourceLayers) -> None:
        """Keep captured keys and values, ``{layer: ([B, H, N, D], …)}``, as they are."""
        arrays = {}
        for i, (keys, values) in layers.items():
            arrays[f"{i}.keys"], arrays[f"{i}.values"] = keys, values
        part = self.path / f"{name}.part.safetensors"
        mx.save_safetensors(str(part), arrays)
        os.replace(part, self.path / f"{name}.safetensors")

    def cache(self, name: str) -> SourceLayers:
        """What :meth:`keep_cache` kept."""
        arrays: Any = mx.load(str(self.path / f"{name}.safetensors"))
        layers = sorted({int(key.split(".")[0]) for key in arrays})
        found = {i: (arrays[f"{i}.keys"], arrays[f"{i}.values"]) for i in layers}
        mx.eval(found)
        return found

    def drop_cache(self, name: str) -> None:
        """Give the disk space of a capture back."""
        (self.path / f"{name}.safetensors").unlink(missing_ok=True)

    def empty(self) -> None:
        """Remove everything that this evaluation wrote."""
        for file in self.path.iterdir():
            if file.suffix in (".json", ".safetensors", ".part"):
                file.unlink()

    def _write(self, name: str, data: Any) -> None:
        part = self.path / f"{name}.part"
        part.write_text(json.dumps(data), encoding="utf-8")
        os.replace(part, self.path / name)
