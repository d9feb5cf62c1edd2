"""Put a file or folder in place whole, or not at all.

What is written goes to a hidden sibling first, is flushed to disk, and takes
its name in one step. Until then the path holds what it held before; a process
that dies leaves it so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvgraft.errors import ArtifactWriteError, KvgraftError

__all__ = [
    "check_space",
    "dry_run",
    "remove_leftovers",
    "replacing_file",
    "replacing_folder",
    "write_json",
    "write_text",
]

_MARK = ".kvgraft-tmp-"


@contextlib.contextmanager
def replacing_folder(
    path: str | os.PathLike[str],
    check: Callable[[Path], None],
    ours: Callable[[str], bool],
) -> Iterator[Path]:
    """Build a folder in the block; it becomes ``path`` when the block ends well.

    An existing folder is replaced. Files in it that are not part of what is
    replaced (a ``.git``, a report) move over to the new folder.

    Args:
        path: Where the folder is to be. Its parents are made.
        check: Called with an existing folder that isn't empty; raises if it
            must not be replaced.
        ours: Whether a file of this name belongs to what is replaced.

    Yields:
        The folder to fill.

    Raises:
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    target = Path(os.path.realpath(path))
    with _explained(target):
        if target.exists() and not target.is_dir():
            raise ArtifactWriteError(
                f"{target} is a file; a folder is to be written there. Choose another path."
            )
        if _holds_files(target):
            check(target)
        with _workspace(target, ours) as work:
            fresh = work / "new"
            fresh.mkdir()
            yield fresh
            _sync(fresh)
            if _holds_files(target):
                _swap(fresh, target)
                try:
                    _move_others(fresh, target, ours)
                except OSError:
                    _swap(fresh, target)  # what was moved already follows, see _discard
                    raise
            else:
                os.rename(fresh, target)
            _settle(target.parent)


@contextlib.contextmanager
def replacing_file(
    path: str | os.PathLike[str], check: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Like :func:`replacing_folder`, for one file; the block creates the yielded path.

    Args:
        path: Where the file is to be. Its parents are made.
        check: Called with an existing file; raises if it must not be replaced.

    Yields:
        Where to write; a name with the same suffix. It is flushed to disk afterwards.

    Raises:
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    target = Path(os.path.realpath(path))
    with _explained(target):
        if target.is_dir():
            raise ArtifactWriteError(
                f"{target} is a folder; a file is to be written there. Choose another path."
            )
        if target.exists() and check is not None:
            check(target)
        with _workspace(target, lambda name: True) as work:
            fresh = work / f"new{target.suffix}"
            yield fresh
            _sync(fresh)
            os.replace(fresh, target)
            _settle(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file with :func:`replacing_file`.

    Raises:
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    with replacing_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = None) -> None:
    """Write a JSON file with :func:`replacing_file`; NaN and infinity are a ``ValueError``.

    Raises:
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


class _DryRun(Exception):
    """Leaves a replacement before anything is replaced."""


def dry_run(replacing: contextlib.AbstractContextManager[Path]) -> None:
    """Raise what a replacement would raise about the place alone, and change nothing.

    For a check before hours of work::

        dry_run(replacing_file(path, check))
    """
    with contextlib.suppress(_DryRun), replacing:
        raise _DryRun


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of replacements of files in ``folder``.

    A replacement of a path does so for that path by itself.
    """
    for entry in list(os.scandir(folder)):
        name, mark, _ = entry.name.partition(_MARK)
        if mark and name.startswith("."):
            _remove_stale(folder / name[1:], lambda name: True)


def check_space(folder: Path, needed: int) -> None:
    """Refuse before any work when the disk can't hold ``needed`` more bytes.

    Raises:
        ArtifactWriteError: With both numbers.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _write_error(
            errno.ENOSPC,
            f"The disk of {folder.parent} has {free / 1e9:.2f} GB free; {needed / 1e9:.2f} GB "
            "are needed. Free some space, or choose another path. Nothing was changed.",
        )


@contextlib.contextmanager
def _workspace(target: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """A hidden folder beside ``target``, removed at the end with all that is left in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target, ours)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
    handle = os.open(work, os.O_RDONLY)
    try:
        # Locked while we work: another save can tell this folder from a stale one.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
    finally:
        os.close(handle)
        _discard(work, target, ours)


def _remove_stale(target: Path, ours: Callable[[str], bool]) -> None:
    """Remove what a killed process left beside ``target``."""
    prefix = f".{target.name}{_MARK}"
    for name in [e.name for e in os.scandir(target.parent) if e.name.startswith(prefix)]:
        path = target.parent / name
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # someone is writing it right now
        else:
            _discard(path, target, ours)
        finally:
            os.close(handle)


def _discard(work: Path, target: Path, ours: Callable[[str], bool]) -> None:
    """Delete a work folder; files of the user that a swap brought there are moved back first."""
    leftover = work / "new"
    if leftover.is_dir() and target.is_dir():
        try:
            _move_others(leftover, target, ours)
        except OSError:
            return  # rather leave it than lose them
    shutil.rmtree(work, ignore_errors=True)


def _move_others(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    """Move over what the user kept in the old folder."""
    for path in old.iterdir():
        if not ours(path.name) and not (new / path.name).exists():
            os.rename(path, new / path.name)


def _holds_files(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _swap(fresh: Path, target: Path) -> None:
    """Exchange two folders; at every moment ``target`` is the old or the new one."""
    if _exchange(fresh, target):
        return
    # Some file systems can't. The name is free for an instant, and what was
    # there is kept under a name that nothing deletes.
    previous = target.with_name(f".{target.name}.previous")
    os.rename(target, previous)
    try:
        os.rename(fresh, target)
    except BaseException:
        os.rename(previous, target)
        raise
    os.rename(previous, fresh)


def _exchange(a: Path, b: Path) -> bool:
    """The system's atomic exchange of two names; ``False`` where there is none."""
    libc = ctypes.CDLL(None)
    first, second = os.fsencode(a), os.fsencode(b)
    try:
        if sys.platform == "darwin":
            rename_swap = ctypes.c_uint(0x2)
            return bool(libc.renamex_np(first, second, rename_swap) == 0)
        at_fdcwd, rename_exchange = -100, ctypes.c_uint(0x2)
        return bool(libc.renameat2(at_fdcwd, first, at_fdcwd, second, rename_exchange) == 0)
    except AttributeError:
        return False


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _settle(folder: Path) -> None:
    """Flush a new name. It is in place already, and not every file system can do this."""
    with contextlib.suppress(OSError):
        _sync(folder)


@contextlib.contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn operating-system errors into ones that say what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, KvgraftError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full. Free some space, or choose another path"
        elif error.errno == errno.EFBIG:
            what = "no larger file is allowed there. Free some space, or choose another path"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "writing there is not permitted. Choose another path, or change the permissions"
        else:
            what = f"{error.strerror or error}"
        raise _write_error(
            error.errno, f"Cannot write {target}: {what}. What was there before is unchanged."
        ) from error


def _write_error(number: int | None, message: str) -> ArtifactWriteError:
    error = ArtifactWriteError(message)
    error.errno = number
    return error
