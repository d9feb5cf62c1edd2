"""A fit's working folder: what survives a kill.

Two kinds of files. Every so many sequences the moments are written, and
``state.json`` then points to them. In between, the rows of each sequence are
written as the model cached them; when the fit goes on, they are multiplied
again. So at most the sequence that was being read is lost, without writing
gigabytes of moments after each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvgraft.errors import FitError, FormatError
from kvgraft.fit.capture import CachedRows
from kvgraft.fit.moments import Moments
from kvgraft.option_names import named

__all__ = ["FitCheckpoint"]

FORMAT_VERSION = 1
_ROWS = re.compile(r"rows-\w+-\d{6}\.safetensors")
_MOMENTS = re.compile(r"moments-\d+-\d{6}-\w+-\d+\.safetensors")


class FitCheckpoint:
    """The folder of one fit.

    Args:
        path: The folder; made if it is not there.
        identity: JSON-ready facts about the fit; a folder of another fit is
            refused.

    Raises:
        FitError: If the folder belongs to another fit, holds something else, or
            cannot be written.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._identity = json.loads(json.dumps(identity))
        self._state: dict[str, Any] = {"pass": 0, "done": 0, "moments": []}
        try:
            path.mkdir(parents=True, exist_ok=True)
            found = path / "state.json"
            if found.exists():
                self._read_state(found)
            elif any(not name.endswith(".part") for name in os.listdir(path)):
                raise FitError(
                    f"{path} is not empty and holds no unfinished fit. Give an empty or new "
                    "folder to resume from."
                )
            else:
                self._write_state()
        except OSError as error:
            raise FitError(f"Cannot use {path} as a working folder: {error.strerror}.") from error

    def _read_state(self, found: Path) -> None:
        try:
            state = json.loads(found.read_text(encoding="utf-8"))
            version, identity = state["format_version"], state["identity"]
        except (ValueError, KeyError) as error:
            raise FitError(f"{found} is damaged ({error}). Start in a new folder.") from error
        if version != FORMAT_VERSION:
            raise FitError(f"{found} is of version {version}. Start in a new folder.")
        if identity != self._identity:
            differing = sorted(
                key
                for key in {*identity, *self._identity}
                if identity.get(key) != self._identity.get(key)
            )
            raise FitError(
                f"{self.path} holds another fit; what differs: "
                f"{', '.join(_in_words(differing))}. Resume with the same models, text and "
                "settings, or start in a new folder."
            )
        self._state = state

    def _write_state(self) -> None:
        state = {**self._state, "format_version": FORMAT_VERSION, "identity": self._identity}
        part = self.path / "state.json.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path / "state.json")

    @property
    def current_pass(self) -> int:
        """The pass that is under way; earlier ones are complete."""
        return int(self._state["pass"])

    @property
    def done(self) -> int:
        """Sequences of the current pass that are in the saved moments."""
        return int(self._state["done"])

    def moments_of(self, index: int) -> list[Path]:
        """Files of a pass's saved moments, in the order in which they were given."""
        return [self.path / n for n in self._state["moments"] if n.startswith(f"moments-{index}-")]

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
            # On a full disk every byte counts; the older moments stand.
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            raise
        others = [n for n in self._state["moments"] if not n.startswith(f"moments-{index}-")]
        self._state["moments"] = [*others, *names]
        self._state["pass"] = index + 1 if complete else index
        self._state["done"] = 0 if complete else done
        try:
            self._write_state()
        except OSError as error:
            raise FitError(f"Cannot write {self.path}: {error.strerror}.") from error
        self.clean(keep=set(self._state["moments"]))

    def clean(self, keep: set[str]) -> None:
        """Remove moments that no state points to, and rows that moments hold by now."""
        for name in os.listdir(self.path):
            journal = re.fullmatch(r"rows-pair(\d+)-(\d{6})\.safetensors", name)
            stale = bool(_MOMENTS.fullmatch(name)) and name not in keep
            if journal is not None:
                at = (int(journal[1]), int(journal[2]))
                stale = at < (self.current_pass, self.done)
            if name.startswith("rows-source-"):
                stale = self.current_pass >= self._identity["n_passes"]
            if stale:
                (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete what the fit put here, and the folder if nothing else is in it."""
        for name in os.listdir(self.path):
            ours = _ROWS.fullmatch(name.removeprefix("part-")) or _MOMENTS.fullmatch(name)
            if ours or name == "state.json" or name.endswith(".part"):
                (self.path / name).unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:
            pass  # something that is not ours is in it

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
        name = self._rows_name(label, index)
        part = self.path / f"part-{name}"  # mlx insists on the ending
        try:
            mx.save_safetensors(str(part), arrays)
            os.replace(part, self.path / name)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            raise FitError(
                f"Cannot write {self.path / name} ({error}). Free some space; what was saved "
                "before is kept, and the fit can be resumed."
            ) from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def load_rows(self, label: str, index: int) -> list[CachedRows] | None:
        """Rows that :meth:`save_rows` wrote; ``None`` if there are none."""
        path = self.path / self._rows_name(label, index)
        if not path.exists():
            return None
        try:
            arrays = mx.load(str(path))
        except RuntimeError as error:
            raise FormatError(f"{path} is damaged ({error}). Start in a new folder.") from error
        assert isinstance(arrays, dict)
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


def _in_words(differing: Sequence[str]) -> list[str]:
    """What a user calls the parts of a fit's identity."""
    words = {
        "passes": f"what is gathered ({named('head_mapping')}, {named('memory_limit')})",
        "n_passes": f"what is gathered ({named('head_mapping')}, {named('memory_limit')})",
        "text": f"text ({named('sequences')}, {named('seq_len')})",
        "structure": f"what is gathered ({named('head_mapping')}, {named('memory_limit')})",
        **{s: named(s) for s in ("stride", "skip", "token_weights", "sequential")},
    }
    return list(dict.fromkeys(words.get(key, key) for key in differing))
