"""From one model's prompt-cache file to another's, without the source model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvgraft.cache import CacheSnapshot, read_cache
from kvgraft.cache.map import check_native_ends, map_prompt, split_prompt
from kvgraft.cache.prompt_files import (
    PromptFile,
    check_destination,
    read_prompt_file,
    write_prompt_file,
)
from kvgraft.errors import (
    CacheError,
    FormatError,
    KvgraftError,
    NothingToMapError,
    PairMismatchError,
)
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.loading import identify, load_model, resolve_model
from kvgraft.models.probe import read_geometry
from kvgraft.option_names import named

__all__ = ["FileTransfer", "prompt_tokens", "transfer_file"]

# Relative distance of two tokens' values in the first layer below which they are
# taken for the same token. In Qwen2.5-Coder 0.5B and SmolLM2 135M the same token
# is at 0, also in caches of 8, 4 and 2 bits, and neighbours at 0.48 or more.
_SAME_TOKEN = 0.3


@dataclass(frozen=True)
class FileTransfer:
    """What :func:`transfer_file` did.

    Attributes:
        path: The file that was written.
        n_tokens: Tokens in it.
        n_mapped: Mapped tokens; the target read the others itself.
        seconds: Time of mapping and of native prefill, without loading.
        notes: What the user should know.
    """

    path: Path
    n_tokens: int
    n_mapped: int
    seconds: float
    notes: tuple[str, ...]


def transfer_file(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    mapper: Mapper,
    target: str,
    *,
    prompt: str | None = None,
    native_start: int | None = None,
    native_end: int | None = None,
    force: bool = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    trust_remote_code: bool = False,
) -> FileTransfer:
    """Map a prompt-cache file of the source into one of the target.

    The source model is not needed. The target is, to check it against the mapper and
    for the dtype that it writes.

    Args:
        source: A file of ``mlx_lm.cache_prompt``.
        out: Where to write; another file.
        mapper: Mapper for this pair.
        target: The target model by the name that the file will hold, and
            ``mlx_lm.generate`` will load.
        prompt: The text that was cached, where the file doesn't hold its token
            ids; see :func:`prompt_tokens`.
        native_start: Tokens at the start that the target reads itself. Default: what
            the mapper's evaluation recommends, if the token ids are known.
        native_end: Tokens at the end that the target reads itself. The one that
            generation continues from, which is not in the file, counts: 1 maps the
            whole file. Default likewise.
        force: Map even if the mapper's measured verdict is "do not ship".
        kv_bits: Quantise the result, as ``--kv-bits`` does.
        kv_group_size: Numbers that share a scale when quantised.
        trust_remote_code: Let the target's tokenizer run code from its repository.

    Raises:
        CacheError: If the file's cache cannot be mapped, or ``native_start`` or
            ``native_end`` need token ids that are not known.
        NothingToMapError: If native start and end take the whole file.
        PairMismatchError: If the file or the target is not what the mapper was
            fitted for.
        KvgraftError: As :func:`kvgraft.cache.prompt_files.read_prompt_file` and
            :func:`kvgraft.cache.prompt_files.write_prompt_file`.
    """
    check_native_ends(native_start or 0, 1 if native_end is None else native_end)
    _check_other_file(source, out)
    notes = _check_verdict(mapper, force)
    check_destination(out)
    given = read_prompt_file(source)
    n = read_cache(given.cache, mapper.source).offset
    config = {"trust_remote_code": True} if trust_remote_code else None
    loaded = load_model(target, tokenizer_config=config, lazy=True)
    notes += _check_source(given, mapper, loaded.tokenizer)
    geometry = read_geometry(loaded.model)
    notes += check_pair(mapper, target=geometry, target_model=loaded.identity())
    tokens = _known_tokens(given, mapper, loaded.tokenizer, prompt, n)
    start, end = _native_ends(mapper, native_start, native_end, tokens, n, notes)
    started = time.perf_counter()
    try:
        done = map_prompt(
            given.cache, mapper, loaded.model, tokens, native_start=start, native_end=end,
            target_geometry=geometry, consume=True, kv_bits=kv_bits, kv_group_size=kv_group_size,
        )  # fmt: skip
    except NothingToMapError as error:
        raise NothingToMapError(
            f"{error} Use mlx_lm.cache_prompt with the target instead."
        ) from error
    seconds = time.perf_counter() - started
    kept = _tokenizer_config(given)
    path = write_prompt_file(out, done.cache, model=target, tokenizer_config=kept, tokens=tokens)
    return FileTransfer(path, n, done.mapped, seconds, tuple(notes))


def _check_other_file(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    if Path(out).exists() and Path(source).exists() and Path(out).samefile(source):
        raise CacheError(
            f"{os.fspath(out)} is the source's file, which would be lost. Write to another one."
        )


def _known_tokens(
    given: PromptFile, mapper: Mapper, tokenizer: Any, prompt: str | None, n: int
) -> tuple[int, ...] | None:
    """The ids of the file's ``n`` tokens, from ``prompt`` or the file; ``None`` if not known."""
    tokens = given.tokens if prompt is None else prompt_tokens(tokenizer, prompt, n)
    if tokens is None:
        return None
    if len(tokens) != n:
        raise CacheError(f"The file holds {n} tokens and the ids of {len(tokens)}; it is damaged.")
    _check_text(read_cache(given.cache, mapper.source), tokens)
    return tokens


def _check_verdict(mapper: Mapper, force: bool) -> list[str]:
    """Refuse a mapper that was measured to be worse than a re-prefill."""
    refusal = mapper.quality.refusal()
    if refusal and not force:
        raise PairMismatchError(
            f"This mapper should not be used: {refusal} Re-prefill the prompt with the target "
            f"(mlx_lm.cache_prompt), or override with {named('force', True)}."
        )
    return mapper.quality.warnings()


def _native_ends(
    mapper: Mapper,
    native_start: int | None,
    native_end: int | None,
    tokens: Sequence[int] | None,
    n: int,
    notes: list[str],
) -> tuple[int, int]:
    """Native start and end as given, else as recommended where that is possible."""
    recommended = mapper.quality.native_ends()
    if native_start is None and native_end is None:
        if tokens is None:
            if recommended != (0, 1):
                notes.append(
                    f"the mapper's evaluation recommends a native start of {recommended[0]} and a "
                    f"native end of {recommended[1]} tokens; give the text ({named('prompt')})"
                )
            return 0, 1
        try:
            split_prompt(n, *recommended)
        except NothingToMapError:
            notes.append(
                "the text is shorter than the recommended native start and end; all of it is mapped"
            )
            return 0, 1
    start, end = mapper.quality.native_ends(native_start, native_end)
    if tokens is None and (start, end) != (0, 1):
        raise CacheError(
            "The target reads native start and end from token ids, which the file does not hold. "
            f"Give the text that was cached ({named('prompt')}), or leave out "
            f"{named('native_start')} and {named('native_end')}."
        )
    return start, end


def prompt_tokens(tokenizer: Any, prompt: str, n_tokens: int) -> tuple[int, ...]:
    """Token ids of a text as ``mlx_lm.cache_prompt`` makes them.

    As a user's message in the chat template that is left open, or as it is.

    Args:
        tokenizer: mlx-lm's tokenizer of either model.
        prompt: The text.
        n_tokens: Tokens in the cache. The rendering that gives as many is taken.

    Raises:
        CacheError: If none gives as many: it is not the text that was cached.
    """
    found: list[list[int]] = []
    if tokenizer.has_chat_template:
        found.append(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=False,
                continue_final_message=True,
            )
        )
    found.append(tokenizer.encode(prompt))
    for ids in found:
        if len(ids) == n_tokens:
            return tuple(int(t) for t in ids)
    raise CacheError(
        f"The prompt has {' or '.join(str(len(ids)) for ids in found)} tokens, the cache "
        f"{n_tokens}: it is not the text that was cached, or was cached in another way."
    )


def _check_text(snapshot: CacheSnapshot, tokens: Sequence[int]) -> None:
    """Refuse token ids that are not those of the cache, as far as repeated tokens show it.

    The values of the first layer come from the token alone, so that a token which
    occurs twice has them twice. Ids of another text of the same length do not
    repeat at the same places.
    """
    _, values = snapshot.rows[0].pair()
    positions = [int(p) for p in np.array(snapshot.token_ranges[0].positions)]
    rows = np.array(values[0].swapaxes(0, 1).flatten(1).astype(mx.float32))
    seen: dict[int, int] = {}
    for i, position in enumerate(positions):
        first = seen.setdefault(tokens[position], i)
        size = np.linalg.norm(rows[first])
        if np.linalg.norm(rows[i] - rows[first]) > _SAME_TOKEN * size:
            raise CacheError(
                f"These are not the token ids of the cache: tokens {positions[first]} and "
                f"{position} are the same in the text and not in the cache. It is another text of "
                f"{len(tokens)} tokens."
            )


def _check_source(given: PromptFile, mapper: Mapper, tokenizer: Any) -> list[str]:
    """Compare the file with the mapper's source, as far as possible without the source."""
    notes = []
    if given.provenance is not None:
        notes.append(
            f"the file was itself mapped, from {given.provenance.source}; errors of both maps add "
            "up"
        )
    return notes + _check_source_model(given, mapper, tokenizer)


def _check_source_model(given: PromptFile, mapper: Mapper, tokenizer: Any) -> list[str]:
    name = given.model
    if name is None:
        return ["the file doesn't say which model made it; only its shape was compared"]
    folder = _local(name)
    if folder is None:
        return [f"{name} is not on this machine; only the shape of its cache was compared"]
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    try:
        theirs = load_tokenizer(folder)
    except Exception as error:  # whatever transformers raises
        return [f"the tokenizer of {name} could not be read ({type(error).__name__})"]
    check_pair(mapper, source_model=identify(folder, None, theirs, name=name))
    if _template(theirs) != _template(tokenizer):
        return [
            "the two models have different chat templates: the cached text is in the source's, "
            "and what mlx_lm.generate adds is in the target's"
        ]
    return []


def _template(tokenizer: Any) -> str | None:
    template: str | None = getattr(tokenizer, "chat_template", None)
    return template


def _local(name: str) -> Path | None:
    """A model's folder, if it is on this machine; nothing is downloaded."""
    if Path(name).expanduser().is_dir():
        try:
            return resolve_model(name)
        except KvgraftError:
            return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # its error classes differ from release to release
        return None


def _tokenizer_config(given: PromptFile) -> str:
    """What ``mlx_lm.generate`` passes to the tokenizer: as for the source."""
    text = given.metadata.get("tokenizer_config", "{}")
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError:
        pass
    raise FormatError(f"The file's tokenizer_config is no JSON object: {text[:80]!r}.")
