"""Read a JSON file, or a file's digest, with messages that say what to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvgraft.errors import FormatError, GeometryError, MapperNotFoundError, PairMismatchError

__all__ = ["interpreting", "read_json", "read_json_file", "sha256_of"]


@contextmanager
def interpreting(where: str, advice: str = "Get the artifact again.") -> Iterator[None]:
    """Turn what goes wrong while parsed JSON is interpreted into errors that say what to do.

    Args:
        where: What is interpreted, for messages.
        advice: What to do, for messages.

    Raises:
        FormatError: If an entry is missing, of another kind, or contradicts others.
    """
    try:
        yield
    except (FormatError, PairMismatchError):
        raise
    except KeyError as error:
        raise FormatError(f"{where} lacks the entry {error}. {advice}") from error
    except GeometryError as error:
        raise FormatError(f"{where} contradicts itself: {error} {advice}") from error
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise FormatError(f"{where} can't be read: {error}. {advice}") from error


def read_json(text: str | bytes, where: str) -> Any:
    """Parse JSON, refusing what ``json`` lets through: repeated keys.

    Raises:
        FormatError: Naming ``where`` if it isn't JSON or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where} is not valid JSON ({error}). The file is damaged or was edited; "
            "copy it again from where it came from."
        ) from error


def read_json_file(path: Path) -> Any:
    """Read and parse a JSON file; see :func:`read_json`.

    Raises:
        MapperNotFoundError: If it isn't there.
        FormatError: If it can't be read or isn't JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MapperNotFoundError(
            f"{path} is missing. The copy or download is incomplete: get it again."
        ) from error
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error.strerror}.") from error
    return read_json(data, str(path))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    buffer = bytearray(4 << 20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()
