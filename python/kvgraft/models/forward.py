"""Running a model: prefill, extend a cache, score a continuation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.models.vocabulary import check_tokens

__all__ = ["continuation_nll", "prefill", "extend_cache"]

Cache = list[Any]
"""An mlx-lm prompt cache: one cache object per entry."""


def prefill(model: Module, tokens: Sequence[int], *, step: int = 2048) -> list[Any]:
    """Read ``tokens`` with ``model`` and return the filled mlx-lm prompt cache.

    Args:
        model: mlx-lm model.
        tokens: Token ids, at least one.
        step: Tokens per forward pass, as in ``mlx_lm.generate``.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> from mlx_lm import load
        >>> model, tokenizer = load(str(bundled("models/large")))
        >>> tokens = tokenizer.encode("Once upon a time there was a small dog in a big house.")
        >>> cache = kvgraft.prefill(model, tokens[:-1])
        >>> len(cache), cache[0].offset == len(tokens) - 1
        (6, True)
    """
    cache: list[Any] = make_prompt_cache(model)
    extend_cache(model, tokens, cache, step=step)
    return cache


def extend_cache(
    model: Module,
    tokens: Sequence[int],
    cache: list[Any],
    *,
    step: int = 2048,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Let ``model`` read more tokens on top of a cache, in place.

    Args:
        model: mlx-lm model.
        tokens: Token ids.
        cache: Its prompt cache.
        step: Tokens per forward pass.
        on_step: Called after each pass with the tokens read so far.

    Raises:
        TokenIdError: Before any work, if the model does not have all of them.
    """
    check_tokens(model, tokens)
    for start in range(0, len(tokens), step):
        part = list(tokens[start : start + step])
        model(mx.array([part]), cache=cache)
        mx.eval([entry.state for entry in cache])
        if on_step is not None:
            on_step(start + len(part))


def continuation_nll(model: Any, cache: Cache | None, tokens: Sequence[int]) -> np.ndarray:
    """NLL of ``tokens[1:]`` when ``model`` reads ``tokens`` on top of ``cache``.

    Args:
        model: mlx-lm model.
        cache: Prompt cache of everything before ``tokens[0]``; it is advanced.
            ``None`` starts a fresh sequence.
        tokens: Token ids, at least two.

    Returns:
        ``[len(tokens) - 1]`` float32, nats.

    Raises:
        TokenIdError: If the model does not have all of them.
    """
    check_tokens(model, tokens)
    ids = mx.array([list(tokens)])
    logits = model(ids[:, :-1], cache=cache)[0].astype(mx.float32)
    picked = mx.take_along_axis(logits, ids[0, 1:, None], axis=-1)[:, 0]
    loss = mx.logsumexp(logits, axis=-1) - picked
    return np.array(loss)
