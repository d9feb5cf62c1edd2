"""A fit's working folder: what survives an interruption.

Two kinds of files. Every so many sequences the moments are written, and
``state.json`` then points to them. In between, the rows of each sequence are
written as the model cached them; when the fit is resumed, they are multiplied
again. So at most the sequence that was being read is lost, without writing
gigabytes of moments after each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from kvgraft.errors import FitError, KvgraftError
from kvgraft.files.checkpoint import CheckpointFolder
from kvgraft.fit.capture import CachedRows
from kvgraft.fit.moments import Moments
from kvgraft.option_names import named

__all__ = ["FitCheckpoint"]

_ROWS = re.compile(r"rows-\w+-\d{6}\.safetensors")
_PASS_ROWS = re.compile(r"rows-pair(\d+)-(\d{6})\.safetensors")
_MOMENTS = re.compile(r"moments-\d+-\d{6}-\w+-\d+\.safetensors")


class FitCheckpoint(CheckpointFolder):
    """The folder of one fit; see :class:`CheckpointFolder`.

    Args:
        path: The folder; made if it is not there.
        identity: JSON-ready facts about the fit, ``n_passes`` among them; a folder of
            another fit is refused.

    Raises:
        FitError: If the folder belongs to another fit, holds something else, or
            cannot be written.
    """

    operation: ClassVar[str] = "fit"
    settings: ClassVar[str] = "models, text and settings"
    state_name: ClassVar[str] = "state.json"
    error: ClassVar[type[KvgraftError]] = FitError

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        super().__init__(path, identity, {"pass": 0, "done": 0, "moments": []})

    def is_own(self, name: str) -> bool:
        """See :meth:`CheckpointFolder.is_own`."""
        return bool(_ROWS.fullmatch(name) or _MOMENTS.fullmatch(name))

    def describe_difference(self, key: str) -> str:
        """See :meth:`CheckpointFolder.describe_difference`."""
        gathered = f"what is gathered ({named('head_mapping')}, {named('memory_limit')})"
        words = {
            **dict.fromkeys(("passes", "n_passes", "structure"), gathered),
            "text": f"text ({named('sequences')}, {named('seq_len')})",
            **{s: named(s) for s in ("stride", "skip", "token_weights", "sequential")},
        }
        return words.get(key, key)

    @property
    def current_pass(self) -> int:
        """The pass that is under way; earlier ones are complete."""
        return int(self.state["pass"])

    @property
    def done(self) -> int:
        """Sequences of the current pass that are in the saved moments."""
        return int(self.state["done"])

    def moments_of(self, index: int) -> list[Path]:
        """Files of a pass's saved moments, in the order in which they were given."""
        return [self.path / n for n in self.state["moments"] if n.startswith(f"moments-{index}-")]

    def checkpoint(
        self, index: int, done: int, parts: Sequence[Moments], *, complete: bool = False
    ) -> None:
        """Save the moments of a pass.

        Args:
            index: The pass.
            done: Sequences of it that they hold.
            parts: The moments.
            complete: The pass is over.

        Raises:
            FitError: If they cannot be written. What was saved before is kept.
        """
        names = []
        try:
            for n, part in enumerate(parts):
                names.append(f"moments-{index}-{done:06d}-part-{n}.safetensors")
                part.save(self.path / names[-1])
        except FitError:
            # Make room on a full disk; the older moments are still valid.
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            raise
        others = [n for n in self.state["moments"] if not n.startswith(f"moments-{index}-")]
        self.state["moments"] = [*others, *names]
        self.state["pass"] = index + 1 if complete else index
        self.state["done"] = 0 if complete else done
        self.save_state()
        self._delete_stale()

    def _delete_stale(self) -> None:
        """Delete moments that the state does not point to, and rows that moments contain."""
        kept = set(self.state["moments"])
        for name in os.listdir(self.path):
            stale = bool(_MOMENTS.fullmatch(name)) and name not in kept
            rows = _PASS_ROWS.fullmatch(name)
            if rows is not None:
                stale = (int(rows[1]), int(rows[2])) < (self.current_pass, self.done)
            if name.startswith("rows-source-"):
                stale = self.current_pass >= self.identity["n_passes"]
            if stale:
                (self.path / name).unlink(missing_ok=True)

    def save_rows(self, label: str, index: int, *sides: CachedRows) -> None:
        """Write the rows of one sequence, in the dtypes that the models cached them in.

        Raises:
            FitError: If they cannot be written.
        """
        arrays: dict[str, mx.array] = {}
        for n, side in enumerate(sides):
            arrays |= {f"{n}.keys.{i}": x for i, x in enumerate(side.keys)}
            arrays |= {f"{n}.values.{i}": x for i, x in enumerate(side.values)}
            if side.sensitivity is not None:
                arrays[f"{n}.sensitivity"] = side.sensitivity
        self.write_arrays(self._rows_name(label, index), arrays)

    def load_rows(self, label: str, index: int) -> list[CachedRows] | None:
        """Rows that :meth:`save_rows` wrote; ``None`` if there are none.

        Raises:
            FormatError: If the file is damaged.
        """
        arrays = self.read_arrays(self._rows_name(label, index))
        if arrays is None:
            return None
        sides = []
        for n in range(1 + max(int(key.split(".", 1)[0]) for key in arrays)):
            count = sum(1 for key in arrays if key.startswith(f"{n}.keys."))
            sides.append(
                CachedRows(
                    [arrays[f"{n}.keys.{i}"] for i in range(count)],
                    [arrays[f"{n}.values.{i}"] for i in range(count)],
                    arrays.get(f"{n}.sensitivity"),
                )
            )
        return sides

    def has_rows(self, label: str, index: int) -> bool:
        """Whether :meth:`save_rows` wrote the rows of a sequence."""
        return (self.path / self._rows_name(label, index)).exists()

    @staticmethod
    def _rows_name(label: str, index: int) -> str:
        return f"rows-{label}-{index:06d}.safetensors"
