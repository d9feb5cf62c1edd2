"""Capture the queries, keys and values of a model's attention while it runs.

mlx-lm models call a function ``scaled_dot_product_attention`` that their module has
imported. Inside :func:`capture_attention` that name is bound to a wrapper that reports
each call. Models with an attention of their own (Gemma 2) cannot be instrumented.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

__all__ = ["AttentionCall", "attention_weights", "can_capture", "capture_attention"]

_NAME = "scaled_dot_product_attention"
_PARAMETERS = {"queries", "keys", "values", "cache", "scale"}


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of one layer's attention, without the batch axis.

    Attributes:
        layer: Index in the cache list.
        queries: ``[heads, new tokens, head_dim]``.
        keys: ``[kv heads, tokens, head_dim]``, those of the new tokens last.
        values: ``[kv heads, tokens, value_dim]``.
        scale: Factor of the logits.
        sinks: ``[heads]`` extra logits, or ``None``.
    """

    layer: int
    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    sinks: mx.array | None = None


@contextmanager
def capture_attention(
    model: Any, cache: Sequence[Any], receive: Callable[[AttentionCall], None]
) -> Iterator[bool]:
    """Pass the arguments of each layer's attention to ``receive`` while ``model`` runs.

    Calls with a cache that is not in ``cache``, or with quantised keys, are left out.

    Args:
        model: mlx-lm model.
        cache: The prompt cache that the model is going to be called with.
        receive: Called once per layer and call of the model; arrays are lazy.

    Yields:
        Whether the model's modules have mlx-lm's attention function. That it is called
        as well is only known from the calls; see :func:`can_capture`.
    """
    index = {id(entry): i for i, entry in enumerate(cache)}
    originals = {module: getattr(module, _NAME) for module in _modules(model)}

    def capturing(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        signature = inspect.signature(original)

        def attention(*args: Any, **named: Any) -> mx.array:
            # Models pass cache and scale by position or by name.
            given = signature.bind(*args, **named).arguments
            layer = index.get(id(given.get("cache")))
            keys = given["keys"]
            if layer is not None and isinstance(keys, mx.array):
                queries, values = given["queries"][0], given["values"][0]
                scale, sinks = float(given["scale"]), given.get("sinks")
                receive(AttentionCall(layer, queries, keys[0], values, scale, sinks))
            return original(*args, **named)

        return attention

    try:
        for module, original in originals.items():
            setattr(module, _NAME, capturing(original))
        yield bool(originals)
    finally:
        for module, original in originals.items():
            setattr(module, _NAME, original)


def can_capture(model: Any) -> bool:
    """Whether a model's attention can be instrumented; runs the model on two tokens.

    Args:
        model: A live mlx-lm model.
    """
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    calls: list[AttentionCall] = []
    with capture_attention(model, cache, calls.append):
        model(mx.array([[0, 1]]), cache=cache)
    return bool(calls)


def attention_weights(logits: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax over the last axis, with the attention sinks in the denominator.

    Args:
        logits: ``[kv heads, queries per kv head, new tokens, tokens]`` float32.
        sinks: ``[heads]`` extra logits, or ``None``.
    """
    if sinks is None:
        return mx.softmax(logits, axis=-1)
    extra = sinks.astype(mx.float32).reshape(logits.shape[0], -1, 1, 1)
    extra = mx.broadcast_to(extra, (*logits.shape[:-1], 1))
    return mx.softmax(mx.concatenate([logits, extra], axis=-1), axis=-1)[..., :-1]


def _modules(model: Any) -> list[ModuleType]:
    """The modules of a model that have mlx-lm's attention function."""
    out = []
    for name in sorted({type(m).__module__ for m in model.modules()}):
        module = sys.modules.get(name)
        function = getattr(module, _NAME, None)
        if module is None or not callable(function):
            continue
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # a built-in of that name
            continue
        if parameters.keys() >= _PARAMETERS:
            out.append(module)
    return out
