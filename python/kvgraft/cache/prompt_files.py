"""mlx-lm's prompt-cache files, read whichever mlx-lm wrote them.

The two layouts do not load into each other's mlx-lm:

* Up to 0.31 the tensors are the rows in use, and the counters are strings in
  the header: ``0.<layer>`` the counters, ``1.<key>`` the user's metadata,
  ``2.<layer>`` the class.
* From 0.32 on the tensors are whole buffers followed by the counters as arrays,
  and the header has ``0.<key>`` the user's metadata, ``1.<layer>`` the class,
  ``2.<n>.0`` and ``2.<n>.1`` the name and kind of what was no array.

A buffer has room behind the tokens in use, and what was trimmed away is still
there: 0.32 saves it. Here only the rows in use are written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from kvgraft.cache import Provenance, compact, mark, provenance_of
from kvgraft.errors import (
    ArtifactWriteError,
    CacheError,
    CacheFileNotFoundError,
    FormatError,
    MapperNotFoundError,
    UnsupportedCacheError,
)
from kvgraft.files.atomic import check_space, dry_run, replacing_file
from kvgraft.files.recognise import describe_tensors
from kvgraft.files.safetensors import Header, read_header

__all__ = [
    "PromptFile",
    "check_destination",
    "is_prompt_file",
    "read_prompt_file",
    "write_prompt_file",
]

PROVENANCE_KEY = "kvgraft_provenance"
"""Metadata key of a mapped cache's :class:`~kvgraft.cache.Provenance`, as JSON."""

TOKENS_KEY = "kvgraft_tokens"
"""Metadata key of the token ids that the cache was made of, as a JSON list."""


@dataclass(frozen=True)
class PromptFile:
    """A prompt-cache file's content.

    Attributes:
        cache: Cache objects of the installed mlx-lm, evaluated; marked if the
            file says that they were mapped.
        metadata: The user's metadata: ``model`` and ``tokenizer_config`` in
            files of ``mlx_lm.cache_prompt``.
        layout: ``"0.31"`` or ``"0.32"``: the mlx-lm whose layout it is.
        tokens: Token ids of the text, if the file holds them.
    """

    cache: list[Any]
    metadata: dict[str, str]
    layout: str
    tokens: tuple[int, ...] | None

    @property
    def model(self) -> str | None:
        """The model that the cache belongs to, as it was typed."""
        return self.metadata.get("model")

    @property
    def provenance(self) -> Provenance | None:
        """The mark of a mapped cache; ``None`` for a native one."""
        return provenance_of(self.cache)


def is_prompt_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a prompt-cache file at ``path``; only its header is read."""
    try:
        return _layout(read_header(path)) is not None
    except FormatError:
        return False


def read_prompt_file(path: str | os.PathLike[str]) -> PromptFile:
    """Read a prompt-cache file of any mlx-lm since 0.28.

    Rows behind the tokens in use are left out.

    Raises:
        CacheFileNotFoundError: If there is no such file.
        FormatError: If it is no prompt cache, damaged or cut short.
        UnsupportedCacheError: If it holds a kind of cache that kvgraft does not
            read, by name.
    """
    try:
        header = read_header(path)
    except MapperNotFoundError as error:
        raise CacheFileNotFoundError(
            f"There is no file {os.fspath(path)}. Make one with mlx_lm.cache_prompt."
        ) from error
    layout = _layout(header)
    if layout is None:
        what = describe_tensors(header.tensors, header.metadata)
        raise FormatError(
            f"{header.path} is no prompt cache of mlx-lm: {what} Make one with mlx_lm.cache_prompt."
        )
    group = {"0.31": "1.", "0.32": "0."}[layout]
    metadata = {k[2:]: v for k, v in header.metadata.items() if k.startswith(group)}
    try:
        states = _states(header, layout)
        cache = [_object(name, state) for name, state in states]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CacheError):
            raise
        raise FormatError(
            f"{header.path} looks like a prompt cache of mlx-lm {layout}, but its parts don't fit "
            f"together ({type(error).__name__}: {error}). Make it again with mlx_lm.cache_prompt."
        ) from error
    # Lazy arrays made in this thread fail in another, and the file may go away.
    mx.eval([part for entry in cache for part in _arrays(entry)])
    tokens = _tokens(metadata, header.path)
    provenance = _provenance(metadata, header.path)
    if provenance is not None:
        mark(cache, provenance)
    return PromptFile(cache, metadata, layout, tokens)


def write_prompt_file(
    path: str | os.PathLike[str],
    cache: Sequence[Any],
    *,
    model: str,
    tokenizer_config: str = "{}",
    metadata: Mapping[str, str] | None = None,
    tokens: Sequence[int] | None = None,
) -> Path:
    """Write a prompt cache for the installed mlx-lm, with its own function.

    Only rows in use are written, never what was trimmed away, and the file
    appears whole or not at all. The mark of a mapped cache is kept.

    Args:
        path: The file, ``*.safetensors``. An existing prompt cache is replaced;
            anything else is not.
        cache: The cache of one conversation.
        model: The model that it belongs to. ``mlx_lm.generate`` loads this one
            and refuses another ``--model``, comparing them as text.
        tokenizer_config: JSON that ``mlx_lm.generate`` passes to the tokenizer.
        metadata: More of it.
        tokens: Token ids of the text, to be kept in the file.

    Raises:
        ArtifactWriteError: If it cannot be written, or something else is there.
        CacheError: If the cache is empty or not what its counters say.
        UnsupportedCacheError: If it is of a kind that kvgraft does not read.
    """
    from mlx_lm.models.cache import save_prompt_cache

    path = Path(path)
    _check_name(path)
    written = compact(cache)
    said = {**(metadata or {}), "model": model, "tokenizer_config": tokenizer_config}
    said.pop(PROVENANCE_KEY, None)
    provenance = provenance_of(cache)
    if provenance is not None:
        said[PROVENANCE_KEY] = provenance.to_json()
    said.pop(TOKENS_KEY, None)
    if tokens is not None:
        said[TOKENS_KEY] = json.dumps([int(t) for t in tokens], separators=(",", ":"))
    arrays = [part for entry in written for part in _arrays(entry)]
    mx.eval(arrays)
    with replacing_file(path, _check_replaceable) as fresh:
        check_space(fresh.parent, sum(x.nbytes for x in arrays) + (1 << 20))
        try:
            save_prompt_cache(str(fresh), written, said)
        except RuntimeError as error:
            raise ArtifactWriteError(
                f"Cannot write {path} ({error}). What was there before is unchanged."
            ) from error
    return path


def check_destination(path: str | os.PathLike[str]) -> None:
    """Raise what :func:`write_prompt_file` would raise about the place alone, before any work.

    Raises:
        ArtifactWriteError: If the name is not ``*.safetensors``, something else
            is there, or writing there is not permitted.
    """
    _check_name(Path(path))
    dry_run(replacing_file(path, _check_replaceable))


def _check_name(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise ArtifactWriteError(
            f"A prompt cache is called *.safetensors, not {path.name}: mlx-lm opens no other name."
        )


def _check_replaceable(path: Path) -> None:
    if not is_prompt_file(path):
        raise ArtifactWriteError(
            f"{path} is there and is no prompt cache; it is not overwritten. Choose another path."
        )


# ------------------------------------------------------------------ the layouts


def _layout(header: Header) -> str | None:
    """Which mlx-lm's layout a file has; ``None`` if it is no prompt cache."""
    first = header.metadata.get("2.0")
    if first is None:
        return None
    name, layout = (header.metadata.get("1.0"), "0.32") if first == "" else (first, "0.31")
    known = name is not None and name.endswith(("Cache", "CacheList"))
    return layout if known and any(t.startswith("0") for t in header.tensors) else None


def _states(header: Header, layout: str) -> list[tuple[str, Any]]:
    """``(class, state as 0.32 has it)`` per layer."""
    classes_at, info_at = ("1.", None) if layout == "0.32" else ("2.", "0.")
    named = {int(k[2:]): v for k, v in header.metadata.items() if k.startswith(classes_at)}
    classes = [named[i] for i in range(len(named))]
    for layer, name in enumerate(classes):
        _builder(name, str(layer))
    loaded = mx.load(str(header.path), format="safetensors")
    assert isinstance(loaded, dict)
    arrays: dict[str, Any] = dict(loaded)
    if info_at is None:
        _restore_scalars(arrays, header.metadata)
        return list(zip(classes, _as_list(tree_unflatten(list(arrays.items()))), strict=True))
    states = _as_list(tree_unflatten(list(arrays.items())))
    info = tree_unflatten([(k[2:], v) for k, v in header.metadata.items() if k.startswith(info_at)])
    return [
        (name, _modern(name, state, counters))
        for name, state, counters in zip(classes, states, _as_list(info), strict=True)
    ]


def _restore_scalars(arrays: dict[str, Any], metadata: Mapping[str, str]) -> None:
    """Turn back what 0.32 stored as arrays because it was a number, a text or nothing."""
    n = 1
    while f"2.{n}.0" in metadata:
        key, kind = metadata[f"2.{n}.0"], metadata[f"2.{n}.1"]
        if kind == "scalar":
            arrays[key] = arrays[key].item()
        elif kind == "string":
            arrays[key] = "".join(chr(i) for i in arrays[key].tolist())
        elif kind == "none":
            arrays[key] = None
        else:
            raise ValueError(f"{key} is a {kind}")
        n += 1


def _modern(name: str, state: Any, counters: Any) -> Any:
    """A layer's state as 0.32 has it, from 0.31's arrays and counters."""
    if name == "KVCache":
        return (*state, state[0].shape[2])
    if name == "QuantizedKVCache":
        return (*state, *map(int, counters))
    if name == "RotatingKVCache":
        keep, size, offset, newest = map(int, counters)
        return (*state, offset, keep, size, newest)
    if name == "BatchKVCache":
        return (*state, state[0].shape[2])
    if name == "BatchRotatingKVCache":
        size, offset, newest = map(int, counters[:3])
        return (*state, size, offset, newest, counters[3] == "True")
    assert name == "CacheList"
    names, inner = counters
    return [
        (_modern(n, s, c), n)
        for n, s, c in zip(names, _as_list(state), _as_list(inner), strict=True)
    ]


def _as_list(tree: Any) -> list[Any]:
    if not isinstance(tree, list):
        raise ValueError("layers are not numbered")
    return tree


# -------------------------------------------------------------------- the objects


def _object(name: str, state: Any) -> Any:
    return _builder(name, "0")(state)


def _builder(name: str, layer: str) -> Callable[[Any], Any]:
    """What makes a cache object of the installed mlx-lm out of a 0.32 state."""
    if name in _BUILDERS:
        return _BUILDERS[name]
    raise UnsupportedCacheError(
        f"Layer {layer} of the file is a {name}, which is not supported. Re-prefill the prompt "
        "with the target."
    )


def _kinds() -> Any:
    from mlx_lm.models import cache

    return cache


def _rows(x: Any, n: int) -> Any:
    """The first ``n`` rows, without the buffer behind them."""
    if isinstance(x, (list, tuple)):
        return tuple(_rows(part, n) for part in x)
    return x if x is None else mx.contiguous(x[..., :n, :])


def _plain(state: Any) -> Any:
    keys, values, offset = state
    made = _kinds().KVCache()
    made.keys, made.values, made.offset = _rows(keys, offset), _rows(values, offset), offset
    return made


def _quantized(state: Any) -> Any:
    keys, values, offset, group_size, bits = state
    made = _kinds().QuantizedKVCache(group_size=group_size, bits=bits)
    made.keys, made.values, made.offset = _rows(keys, offset), _rows(values, offset), offset
    return made


def _ring(state: Any) -> Any:
    keys, values, offset, keep, size, newest = state
    made = _kinds().RotatingKVCache(max_size=size, keep=keep)
    made.keys, made.values, made.offset, made._idx = keys, values, offset, newest
    return made


def _batch(state: Any) -> Any:
    keys, values, offset, padding, newest = state
    made = _kinds().BatchKVCache([0])
    made.keys, made.values, made.offset = _rows(keys, newest), _rows(values, newest), offset
    made.left_padding, made._idx = padding, newest
    return made


def _batch_ring(state: Any) -> Any:
    keys, values, offset, padding, size, total, newest, rotated = state
    made = _kinds().BatchRotatingKVCache(size, [0])
    made.keys, made.values, made.offset, made.left_padding = keys, values, offset, padding
    made._offset, made._idx, made.rotated = total, newest, bool(rotated)
    return made


def _list(state: Any) -> Any:
    return _kinds().CacheList(*(_object(name, inner) for inner, name in state))


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "KVCache": _plain,
    "QuantizedKVCache": _quantized,
    "RotatingKVCache": _ring,
    "BatchKVCache": _batch,
    "BatchRotatingKVCache": _batch_ring,
    "CacheList": _list,
}


def _arrays(entry: Any) -> list[mx.array]:
    """Every array of a cache object."""
    if hasattr(entry, "caches"):
        return [part for inner in entry.caches for part in _arrays(inner)]
    parts: list[Any] = []
    for x in (entry.keys, entry.values, entry.offset, getattr(entry, "left_padding", None)):
        parts += x if isinstance(x, (list, tuple)) else [x]
    return [x for x in parts if isinstance(x, mx.array)]


# ------------------------------------------------------------------ own metadata


def _tokens(metadata: Mapping[str, str], path: Path) -> tuple[int, ...] | None:
    text = metadata.get(TOKENS_KEY)
    if text is None:
        return None
    try:
        ids = json.loads(text)
        if not isinstance(ids, list) or not all(type(t) is int for t in ids):
            raise ValueError("not a list of numbers")
    except ValueError as error:
        raise FormatError(f"{path} has token ids that can't be read ({error}).") from error
    return tuple(ids)


def _provenance(metadata: Mapping[str, str], path: Path) -> Provenance | None:
    text = metadata.get(PROVENANCE_KEY)
    if text is None:
        return None
    try:
        return Provenance.from_json(text)
    except (ValueError, TypeError) as error:
        raise FormatError(
            f"{path} says that it was mapped, in a way that can't be read ({error})."
        ) from error
