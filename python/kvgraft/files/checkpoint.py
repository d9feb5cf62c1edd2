"""A folder in which a long operation keeps its state, to be resumed after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from kvgraft.errors import ArtifactWriteError, FormatError, KvgraftError
from kvgraft.files import atomic

__all__ = ["CheckpointFolder"]

FORMAT_VERSION = 1


class CheckpointFolder:
    """The state of one operation, in files that are replaced whole.

    A new or empty folder is taken. One that holds the state of the same operation is
    continued; any other is refused. A subclass says what the operation is, and which
    files are its own.

    Args:
        path: The folder; made if it is not there.
        identity: What must be the same for the operation to be resumed, JSON-ready.
        state: What is known of its progress at the beginning, JSON-ready; see
            :meth:`save_state`.

    Attributes:
        path: The folder.
        state: Progress, as it was saved last.

    Raises:
        KvgraftError: Of the subclass's kind, if the folder belongs to another operation,
            holds something else, or cannot be written.
    """

    operation: ClassVar[str]
    """What is resumed, such as ``"fit"``; for messages."""

    settings: ClassVar[str]
    """What its identity is made of, in words."""

    state_name: ClassVar[str]
    """The file that holds identity and progress."""

    error: ClassVar[type[KvgraftError]]

    def __init__(
        self, path: Path, identity: Mapping[str, Any], state: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.state: dict[str, Any] = dict(state or {})
        try:
            path.mkdir(parents=True, exist_ok=True)
            atomic.remove_leftovers(path)
            found = path / self.state_name
            if found.exists():
                self._resume(found)
            elif any(path.iterdir()):
                raise self.error(
                    f"{path} is not empty and holds no unfinished {self.operation}. Give an empty "
                    "or new folder to resume from."
                )
            else:
                self.save_state()
        except OSError as error:
            raise self.error(
                f"Cannot use {path} as a working folder: {error.strerror or error}."
            ) from error

    def _resume(self, found: Path) -> None:
        try:
            stored = dict(json.loads(found.read_text(encoding="utf-8")))
            version, identity = stored["format_version"], dict(stored["identity"])
        except (ValueError, KeyError, TypeError) as error:
            raise self.error(f"{found} is damaged ({error}). Start in a new folder.") from error
        if version != FORMAT_VERSION:
            raise self.error(f"{found} is of version {version}. Start in a new folder.")
        keys = {*identity, *self.identity}
        wrong = sorted(key for key in keys if identity.get(key) != self.identity.get(key))
        if wrong:
            names = dict.fromkeys(map(self.describe_difference, wrong))
            raise self.error(
                f"{self.path} holds another {self.operation}; what differs: {', '.join(names)}. "
                f"Resume with the same {self.settings}, or start in a new folder."
            )
        self.state = {k: v for k, v in stored.items() if k not in ("format_version", "identity")}

    def describe_difference(self, key: str) -> str:
        """What a user calls the part ``key`` of the identity."""
        return key

    def is_own(self, name: str) -> bool:
        """Whether the operation writes files of this name, beside :attr:`state_name`."""
        raise NotImplementedError

    def save_state(self) -> None:
        """Write :attr:`state`, after the files that it refers to.

        Raises:
            KvgraftError: Of the subclass's kind, if it cannot be written.
        """
        state = {**self.state, "format_version": FORMAT_VERSION, "identity": self.identity}
        self.write_json(self.state_name, state)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file, which may hold NaN.

        Raises:
            KvgraftError: Of the subclass's kind, if it cannot be written.
        """
        with self._writing(name):
            atomic.write_text(self.path / name, json.dumps(value))

    def write_arrays(self, name: str, arrays: dict[str, mx.array]) -> None:
        """Replace a safetensors file.

        Raises:
            KvgraftError: Of the subclass's kind, if it cannot be written.
        """
        with self._writing(name), atomic.replacing_file(self.path / name) as fresh:
            mx.save_safetensors(str(fresh), arrays)

    def read_json(self, name: str) -> Any:
        """What :meth:`write_json` wrote; ``None`` if there is no such file.

        Raises:
            FormatError: If the file is damaged.
        """
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(f"{path} is damaged ({error}). Start in a new folder.") from error

    def read_arrays(self, name: str) -> dict[str, mx.array] | None:
        """What :meth:`write_arrays` wrote, lazily; ``None`` if there is no such file.

        Raises:
            FormatError: If the file is damaged.
        """
        path = self.path / name
        if not path.exists():
            return None
        try:
            arrays = mx.load(str(path))
        except RuntimeError as error:
            raise FormatError(f"{path} is damaged ({error}). Start in a new folder.") from error
        assert isinstance(arrays, dict)
        return arrays

    def empty(self) -> None:
        """Delete the operation's files; others and the folder stay."""
        atomic.remove_leftovers(self.path)
        for name in os.listdir(self.path):
            if name == self.state_name or self.is_own(name):
                (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the operation's files, and the folder if nothing else is in it."""
        self.empty()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except ArtifactWriteError as error:
            raise self.error(f"{error} The {self.operation} can be resumed.") from error
        except RuntimeError as error:  # what MLX raises
            raise self.error(
                f"Cannot write {self.path / name} ({error}). Free some space; what was saved "
                f"before is kept, and the {self.operation} can be resumed."
            ) from error
