"""Speculative decoding with a draft model that never reads the conversation.

A small draft model proposes tokens and the target verifies each of them
(Leviathan et al., arXiv:2211.17192), so the text is the target's own whatever
the draft model believes. Here the target's cache is mapped into the draft
model's, instead of letting the draft model read everything once more. That is
the one use of a mapper that loses nothing: a poor map costs accepted
proposals, never quality.

mlx-lm wants one list with the target's caches and then the draft model's, both
holding the same tokens::

    from mlx_lm import stream_generate
    from kvgraft.speculative import joint_cache

    cache = joint_cache(target_cache, mapper, target, draft)
    stream_generate(target, tokenizer, rest, draft_model=draft, prompt_cache=cache)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from kvgraft import cache as caches
from kvgraft.cache.map import map_cache
from kvgraft.errors import CacheError, UnsupportedModelError
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.forward import extend_cache, prefill
from kvgraft.models.geometry import ModelGeometry

__all__ = [
    "Arm",
    "Measurement",
    "acceptance",
    "check_models",
    "draft_cache",
    "joint_cache",
    "measure",
    "speculate",
]


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
    tail: int = 0,
    draft_geometry: ModelGeometry | None = None,
) -> list[Any]:
    """Make the draft model's cache out of the target's.

    Args:
        target_cache: The target's cache alone, without a draft model's; not
            changed.
        mapper: A mapper from the target to the draft model.
        draft: The draft model.
        tokens: The tokens that the cache holds; needed for ``tail``.
        tail: Tokens at the end that the draft model reads itself. The tokens
            that it proposes from depend on these most.
        draft_geometry: Geometry of the draft model if it was read before.

    Returns:
        The draft model's cache, holding the same tokens.

    Raises:
        CacheError: If the target's cache can't be read, or ``tokens`` are not
            as many as it holds.
        PairMismatchError: If the mapper leads to another model.
    """
    if tail < 0:
        raise CacheError(f"A tail of {tail} tokens makes no sense.")
    if tail == 0:
        return map_cache(target_cache, mapper, draft, target_geometry=draft_geometry)
    n = caches.read_cache(target_cache, mapper.source).offset
    if tokens is None or len(tokens) != n:
        raise CacheError(
            f"For a tail, the draft model needs the {n} tokens of the target's cache; "
            f"{'none' if tokens is None else len(tokens)} were given."
        )
    ids = list(tokens)
    if tail >= n:
        return prefill(draft, ids)
    cache = map_cache(
        target_cache, mapper, draft, target_geometry=draft_geometry, n_tokens=n - tail
    )
    extend_cache(draft, ids[n - tail :], cache)
    return cache


def joint_cache(
    target_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    draft: Module,
    *,
    tokens: Sequence[int] | None = None,
    tail: int = 0,
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
        tail: See :func:`draft_cache`.
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
        target_cache, mapper, draft, tokens=tokens, tail=tail, draft_geometry=draft_geometry
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


@dataclass(frozen=True)
class Arm:
    """What one way to decode took.

    Attributes:
        name: ``"plain"``, ``"prefilled"``, ``"mapped"`` or ``"garbage"``.
        tokens: Tokens that came out.
        prepare: Seconds to get the draft model's cache.
        decode: Seconds to generate, reading the prompt's rest included.
        acceptance: See :func:`acceptance`; NaN without a draft model.
        parted_at: Index of the first token that differs from plain greedy, and
            the gap between the target's two best logits there in the plain run;
            ``None`` if all are equal.
    """

    name: str
    tokens: tuple[int, ...]
    prepare: float
    decode: float
    acceptance: float
    parted_at: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the target's cache to the last token."""
        return self.prepare + self.decode


@dataclass(frozen=True)
class Measurement:
    """Ways to go on from one target cache, greedily.

    Attributes:
        n_context: Tokens in the target's cache.
        n_prompt: Tokens after it.
        num_draft_tokens: Proposals per round.
        arms: By name; see :class:`Arm`.
    """

    n_context: int
    n_prompt: int
    num_draft_tokens: int
    arms: dict[str, Arm]

    @property
    def saved(self) -> float:
        """Seconds that mapping saves over letting the draft model read the context."""
        return self.arms["prefilled"].prepare - self.arms["mapped"].prepare


def measure(
    context: Sequence[int],
    prompt: Sequence[int],
    target: Module,
    draft: Module,
    mapper: Mapper,
    *,
    max_tokens: int = 128,
    num_draft_tokens: int = 3,
    tail: int = 0,
) -> Measurement:
    """Compare plain greedy decoding with three draft caches: prefilled, mapped, garbage.

    Every arm starts from the target's own cache of ``context``, whose making is
    not counted. The garbage arm has the draft model read one token over and
    over: what is left of the acceptance there comes without the context.

    Args:
        context: Tokens that the target has in its cache.
        prompt: Tokens after them, at least one.
        target: The target.
        draft: The draft model.
        mapper: A mapper from the target to the draft model.
        max_tokens: Tokens to generate.
        num_draft_tokens: Proposals per round.
        tail: See :func:`draft_cache`.

    Raises:
        UnsupportedModelError: See :func:`check_models`.
        PairMismatchError: If the mapper leads to another model.
    """
    check_models(target, draft)
    ids, rest = list(context), list(prompt)
    # Once before the clock starts: kernels are compiled, files get into memory.
    _decode_plain(rest, target, prefill(target, ids[:8]), 2)
    draft_cache(prefill(target, ids[:8]), mapper, draft)
    own = prefill(target, ids)
    start = time.perf_counter()
    plain, logprobs = _decode_plain(rest, target, own, max_tokens)
    arms = {"plain": Arm("plain", tuple(plain), 0.0, time.perf_counter() - start, float("nan"))}

    def prefilled(cache: list[Any]) -> list[Any]:
        return prefill(draft, ids)

    def mapped(cache: list[Any]) -> list[Any]:
        return draft_cache(cache, mapper, draft, tokens=ids, tail=tail)

    def garbage(cache: list[Any]) -> list[Any]:
        return prefill(draft, [ids[0]] * len(ids))

    for name, make in (("prefilled", prefilled), ("mapped", mapped), ("garbage", garbage)):
        cache = prefill(target, ids)
        start = time.perf_counter()
        joint = [*cache, *make(cache)]
        prepared = time.perf_counter()
        out = list(
            speculate(rest, target, draft, joint, max_tokens=max_tokens,
                      num_draft_tokens=num_draft_tokens)
        )  # fmt: skip
        done = time.perf_counter()
        tokens = tuple(token for token, _ in out)
        at = next((i for i, (a, b) in enumerate(zip(plain, tokens)) if a != b), None)
        arms[name] = Arm(
            name,
            tokens,
            prepared - start,
            done - prepared,
            acceptance([proposal for _, proposal in out], num_draft_tokens),
            None if at is None else (at, _lead(logprobs[at])),
        )
    return Measurement(len(ids), len(rest), num_draft_tokens, arms)


def _decode_plain(
    prompt: Sequence[int], target: Module, cache: list[Any], max_tokens: int
) -> tuple[list[int], list[mx.array]]:
    """Greedy tokens, and the log probabilities that each was chosen from."""
    steps = generate_step(mx.array(list(prompt)), target, max_tokens=max_tokens, prompt_cache=cache)
    tokens, logprobs = [], []
    for token, out in steps:
        tokens.append(int(token))
        logprobs.append(out)
    return tokens, logprobs


def _lead(logprobs: mx.array) -> float:
    """How far the best token is ahead of the second best."""
    two = np.array(mx.topk(logprobs.astype(mx.float32), 2))
    return float(two.max() - two.min())
