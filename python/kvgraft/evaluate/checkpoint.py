"""An evaluation's working folder: one file per result, so that it can be resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from kvgraft.errors import EvaluationError, KvgraftError
from kvgraft.files.checkpoint import CheckpointFolder

__all__ = ["EvalCheckpoint", "SourceLayers"]

SourceLayers = dict[int, tuple[mx.array, mx.array]]
"""``{layer: (keys, values)}`` of a source, each ``[B, H, N, D]``."""

_OWN = re.compile(r"((source|target)-(document|task)-\d{4}|speed-\d{7})\.(json|safetensors)")


class EvalCheckpoint(CheckpointFolder):
    """The folder of one evaluation; see :class:`CheckpointFolder`.

    A result or a cache belongs to a unit of work, such as ``"source-document-0003"``,
    ``"target-task-0001"`` or ``"speed-0000064"``.

    Args:
        path: The folder; made if it is not there.
        identity: JSON-ready facts; a folder of another evaluation is refused.

    Raises:
        EvaluationError: If the folder belongs to something else or cannot be
            written.
    """

    operation: ClassVar[str] = "evaluation"
    settings: ClassVar[str] = "mapper, models, text and settings"
    state_name: ClassVar[str] = "evaluation.json"
    error: ClassVar[type[KvgraftError]] = EvaluationError

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        super().__init__(path, identity)

    def is_own(self, name: str) -> bool:
        """See :meth:`CheckpointFolder.is_own`."""
        return bool(_OWN.fullmatch(name))

    def read(self, unit: str) -> Any:
        """A unit's result, or ``None`` if it isn't done.

        Raises:
            FormatError: If the file is damaged.
        """
        return self.read_json(f"{unit}.json")

    def write(self, unit: str, result: Any) -> None:
        """Save a unit's result.

        Raises:
            EvaluationError: If it cannot be written.
        """
        self.write_json(f"{unit}.json", result)

    def keep_cache(self, unit: str, layers: SourceLayers) -> None:
        """Save captured keys and values.

        Raises:
            EvaluationError: If they cannot be written.
        """
        arrays = {}
        for i, (keys, values) in layers.items():
            arrays[f"{i}.keys"], arrays[f"{i}.values"] = keys, values
        self.write_arrays(f"{unit}.safetensors", arrays)

    def cache(self, unit: str) -> SourceLayers:
        """What :meth:`keep_cache` saved.

        Raises:
            FormatError: If the file is damaged.
            EvaluationError: If there is none.
        """
        arrays = self.read_arrays(f"{unit}.safetensors")
        if arrays is None:
            raise EvaluationError(f"{self.path} lacks the cache of {unit}. Start in a new folder.")
        layers = sorted({int(key.split(".")[0]) for key in arrays})
        found = {i: (arrays[f"{i}.keys"], arrays[f"{i}.values"]) for i in layers}
        mx.eval(found)
        return found
