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
from kvgraft.cache.map import map_cache
from kvgraft.cache.prompt_files import (
    PromptFile,
    check_destination,
    read_prompt_file,
    write_prompt_file,
)
from kvgraft.errors import CacheError, FormatError, KvgraftError, PairMismatchError
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.forward import extend_cache, prefill
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
        n_mapped: Of these, how many were mapped; the target read the others.
        seconds: Time of mapping and of reading natively, without loading.
        notes: What is worth knowing and not wrong.
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
    head: int | None = None,
    tail: int | None = None,
    force: bool = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    trust_remote_code: bool = False,
) -> FileTransfer:
    """Map a prompt-cache file of the source into one of the target.

    The source model is not needed. The target is, to see that it is the one
    that the mapper was fitted for and in which dtype it writes; its weights are
    read when it reads a token.

    Args:
        source: A file of ``mlx_lm.cache_prompt``.
        out: Where to write; not the same file.
        mapper: Mapper for this pair.
        target: The target model, as it is to stand in the file:
            ``mlx_lm.generate`` loads it by this name.
        prompt: The text that was cached, where the file doesn't hold its token
            ids; see :func:`prompt_tokens`.
        head: So many of the first tokens are read by the target itself. Default:
            what the mapper's evaluation recommends, if the token ids are known.
        tail: So many of the last tokens of the file are read by the target
            itself. Default: likewise; the evaluation counts the token that
            follows, which the target always reads, as one of them.
        force: Map even if the mapper's measured verdict is "do not ship".
        kv_bits: Quantise the result, as ``--kv-bits`` does.
        kv_group_size: Numbers that share a scale when quantised.
        trust_remote_code: Let the target's tokenizer run code of its own.

    Raises:
        CacheError: If the file's cache cannot be mapped, or ``head`` or
            ``tail`` need token ids that are not known.
        PairMismatchError: If the file or the target is not what the mapper was
            fitted for.
        KvgraftError: As :func:`kvgraft.cache.prompt_files.read_prompt_file` and
            :func:`kvgraft.cache.prompt_files.write_prompt_file`.
    """
    if min(head or 0, tail or 0) < 0:
        raise CacheError(
            f"{named('head')} and {named('tail')} are numbers of tokens, not "
            f"{min(head or 0, tail or 0)}."
        )
    if Path(out).exists() and Path(source).exists() and Path(out).samefile(source):
        raise CacheError(
            f"{os.fspath(out)} is the source's file, which would be lost. Write to another one."
        )
    notes = _check_verdict(mapper, force)
    check_destination(out)
    given = read_prompt_file(source)
    snapshot = read_cache(given.cache, mapper.source)
    before = given.provenance
    if before is not None:
        notes.append(
            f"the file was itself mapped, from {before.source}; errors of both maps add up"
        )
    loaded = load_model(
        target,
        tokenizer_config={"trust_remote_code": True} if trust_remote_code else None,
        lazy=True,
    )
    notes += _check_source(given, mapper, loaded.tokenizer)
    geometry = read_geometry(loaded.model)
    notes += check_pair(mapper, target=geometry, target_model=loaded.identity())

    tokens = given.tokens
    if prompt is not None:
        tokens = prompt_tokens(loaded.tokenizer, prompt, snapshot.offset)
    n = snapshot.offset
    if tokens is not None and len(tokens) != n:
        raise CacheError(f"The file holds {n} tokens and the ids of {len(tokens)}; it is damaged.")
    if tokens is not None:
        _check_text(snapshot, tokens)
    head, tail = _ends(mapper, head, tail, tokens, n, notes)
    if head + tail:
        if tokens is None:
            raise CacheError(
                "The target reads the head and the tail from token ids, which the file does not "
                f"hold. Give the text that was cached ({named('prompt')}), or leave out "
                f"{named('head')} and {named('tail')}."
            )
        if head + tail >= n:
            raise CacheError(
                f"Head and tail take all of the {n} tokens: nothing is left to map. Use "
                "mlx_lm.cache_prompt with the target instead."
            )

    start = time.perf_counter()
    first = prefill(loaded.model, tokens[:head]) if head and tokens else None
    cache = map_cache(
        given.cache,
        mapper,
        loaded.model,
        target_geometry=geometry,
        n_tokens=n - tail,
        head=first,
        consume=True,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )
    if tail and tokens:
        extend_cache(loaded.model, tokens[n - tail :], cache)
    seconds = time.perf_counter() - start
    written = write_prompt_file(
        out,
        cache,
        model=target,
        tokenizer_config=_tokenizer_config(given),
        tokens=tokens,
    )
    return FileTransfer(written, n, n - head - tail, seconds, tuple(notes))


def _check_verdict(mapper: Mapper, force: bool) -> list[str]:
    """Refuse a mapper that was measured to be worse than reading again."""
    refusal = mapper.quality.refusal()
    if refusal and not force:
        raise PairMismatchError(
            f"This mapper should not be used: {refusal} Read the prompt with the target instead "
            f"(mlx_lm.cache_prompt), or insist with {named('force', True)}."
        )
    return mapper.quality.warnings()


def _ends(
    mapper: Mapper,
    head: int | None,
    tail: int | None,
    tokens: Sequence[int] | None,
    n: int,
    notes: list[str],
) -> tuple[int, int]:
    """How many tokens the target reads itself, where the user leaves it open."""
    wanted = mapper.quality.native_start, mapper.quality.native_end - 1
    if tokens is None and head is None and tail is None:
        if any(wanted):
            notes.append(
                f"its evaluation recommends a head of {wanted[0]} and a tail of {wanted[1]}; give "
                f"the text ({named('prompt')})"
            )
        return 0, 0
    found = wanted[0] if head is None else head, wanted[1] if tail is None else tail
    if head is None and tail is None and sum(found) >= n:
        notes.append("the text is shorter than the recommended head and tail; all of it is mapped")
        return 0, 0
    return found


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
    """Refuse token ids that are not those of the cache, as far as repetitions tell.

    The values of the first layer come from the token alone, so that a token which
    occurs twice has them twice. Ids of another text of the same length do not
    repeat at the same places.
    """
    _, values = snapshot.rows[0].pair()
    positions = [int(p) for p in np.array(snapshot.held[0].positions)]
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
    """Compare the file's model with the mapper's source, as far as it is here."""
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
