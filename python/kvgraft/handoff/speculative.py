"""Speculative decoding with a draft model that never reads the conversation.

A small draft model proposes tokens and the target verifies each of them
(Leviathan et al., arXiv:2211.17192), so the text is the target's own whatever
the draft model proposes. Here the target's cache is mapped into the draft
model's, so that the draft model need not prefill. A poor map lowers the share of
accepted proposals, never the quality of the text.

mlx-lm takes one list with the target's caches and then the draft model's, both
holding the same tokens::

    from mlx_lm import stream_generate
    from kvgraft.handoff.speculative import joint_cache

    cache = joint_cache(target_cache, mapper, target, draft)
    stream_generate(target, tokenizer, rest, draft_model=draft, prompt_cache=cache)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from kvgraft.cache.map import map_prompt
from kvgraft.errors import CacheError, NothingToMapError, UnsupportedModelError
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry

__all__ = ["acceptance", "check_models", "draft_cache", "joint_cache", "speculate"]


def check_models(target: Module, draft: Module) -> None:
    """Raise unless mlx-lm can decode speculatively with these models.

    Raises:
        UnsupportedModelError: If a model has other than one cache per layer, by
            which mlx-lm splits the joint list, or caches that can't be trimmed.
    """
    for role, model in (("target", target), ("draft", draft)):
        entries = make_prompt_cache(model)
        layers = getattr(model, "layers", None)
        if layers is None or len(layers) != len(entries):
            raise UnsupportedModelError(
                f"The {role} model has {len(entries)} caches for "
                f"{'unknown' if layers is None else len(layers)} layers. mlx-lm's speculative "
                "decoding needs one per layer; generate without a draft model."
            )
        if not can_trim_prompt_cache(entries):
            kinds = sorted({type(e).__name__ for e in entries if not e.is_trimmable()})
            raise UnsupportedModelError(
                f"The {role} model uses {', '.join(kinds)}, which cannot take rejected tokens "
                "back. Generate without a draft model."
            )


def draft_cache(
    target_cache: Sequence[Any],
    mapper: Mapper,
    draft: Module,
    *,
    tokens: Sequence[int] | None = None,
    native_end: int = 1,
    draft_geometry: ModelGeometry | None = None,
) -> list[Any]:
    """Make the draft model's cache out of the target's.

    Args:
        target_cache: The target's cache alone, without a draft model's; not
            changed.
        mapper: A mapper from the target to the draft model.
        draft: The draft model.
        tokens: The tokens that the cache holds; needed if ``native_end`` is above 1.
        native_end: Tokens at the end that the draft model reads itself, the one that
            generation continues from (not in the cache) included. The draft model's
            proposals depend on these most.
        draft_geometry: Geometry of the draft model if it was read before.

    Returns:
        The draft model's cache, holding the same tokens.

    Raises:
        CacheError: If the target's cache can't be read, ``native_end`` is below 1, or
            ``tokens`` are not as many as it holds.
        PairMismatchError: If the mapper leads to another model.
    """
    try:
        return map_prompt(
            target_cache,
            mapper,
            draft,
            tokens,
            native_start=0,
            native_end=native_end,
            target_geometry=draft_geometry,
        ).cache
    except NothingToMapError:
        return prefill(draft, tokens or ())


def joint_cache(
    target_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    draft: Module,
    *,
    tokens: Sequence[int] | None = None,
    native_end: int = 1,
    draft_geometry: ModelGeometry | None = None,
) -> list[Any]:
    """The ``prompt_cache`` that mlx-lm's speculative decoding takes.

    The target's cache objects go in as they are: generation extends them. Give
    the prompt after them to ``stream_generate(..., draft_model=draft,
    prompt_cache=...)``, at least one token.

    Args:
        target_cache: The target's cache.
        mapper: A mapper from the target to the draft model.
        target: The target.
        draft: The draft model.
        tokens: See :func:`draft_cache`.
        native_end: See :func:`draft_cache`.
        draft_geometry: See :func:`draft_cache`.

    Raises:
        UnsupportedModelError: See :func:`check_models`.
        CacheError: See :func:`draft_cache`; or if the target's cache can't be
            trimmed.
        PairMismatchError: If the mapper leads to another model.
    """
    check_models(target, draft)
    if not can_trim_prompt_cache(list(target_cache)):
        raise CacheError(
            "The target's cache can't be trimmed (it was made with max_kv_size, or is a ring that "
            "wrapped), so rejected tokens could not be taken back. Generate without a draft model."
        )
    drafted = draft_cache(
        target_cache,
        mapper,
        draft,
        tokens=tokens,
        native_end=native_end,
        draft_geometry=draft_geometry,
    )
    return [*target_cache, *drafted]


def speculate(
    prompt: Sequence[int],
    target: Module,
    draft: Module,
    prompt_cache: list[Any],
    *,
    max_tokens: int = 256,
    num_draft_tokens: int = 3,
    stop: Iterable[int] = (),
    **options: Any,
) -> Iterator[tuple[int, bool]]:
    """Generate with :func:`joint_cache`, token by token.

    Args:
        prompt: The tokens after those in the cache, at least one.
        target: The target.
        draft: The draft model.
        prompt_cache: What :func:`joint_cache` returned.
        max_tokens: Most tokens to generate.
        num_draft_tokens: Tokens that the draft model proposes per round.
        stop: Tokens to end at; the last one is not given out.
        options: Passed on to mlx-lm's ``speculative_generate_step``, for example
            ``sampler``.

    Yields:
        ``(token, whether the draft model proposed it)``.
    """
    if not len(prompt):
        raise CacheError("At least one token of the prompt must be left for the models to read.")
    ends = set(stop)
    steps = speculative_generate_step(
        mx.array(list(prompt)),
        target,
        draft,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        prompt_cache=prompt_cache,
        **options,
    )
    for token, _, from_draft in steps:
        if token in ends:
            return
        yield int(token), bool(from_draft)


def acceptance(from_draft: Sequence[bool], num_draft_tokens: int) -> float:
    """Share of the draft model's proposals that the target accepted.

    Args:
        from_draft: For each token, whether it was a proposal.
        num_draft_tokens: Proposals per round.

    Returns:
        Accepted over proposed; a round ends with a token of the target. The
        last round is left out where it was cut off. NaN without a whole round.
    """
    accepted, rounds, current = 0, 0, 0
    for proposal in from_draft:
        if proposal:
            current += 1
        else:
            accepted += current
            rounds += 1
            current = 0
    return accepted / (rounds * num_draft_tokens) if rounds else float("nan")
