"""Looking at a model's attention while it reads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

__all__ = ["Seen", "attention_cosines", "watched_attention"]

_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Seen:
    """One call of one layer's attention.

    Attributes:
        layer: Index in the cache list.
        queries: ``[heads, new tokens, head_dim]``.
        keys: ``[kv heads, tokens, head_dim]``, with the new tokens' last.
        values: ``[kv heads, tokens, value_dim]``.
        scale: Factor of the logits.
        sinks: Extra logits per head, or ``None``.
    """

    layer: int
    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    sinks: mx.array | None = None


@contextmanager
def watched_attention(
    model: Any, cache: Sequence[Any], see: Callable[[Seen], None]
) -> Iterator[bool]:
    """Show ``see`` what each layer's attention is given while ``model`` reads.

    Args:
        model: mlx-lm model.
        cache: The prompt cache that it is going to be called with.
        see: Called once per layer and call of the model; arrays are lazy.

    Yields:
        Whether the model's attention can be looked at: whether its modules call
        mlx-lm's attention function.
    """
    index = {id(entry): i for i, entry in enumerate(cache)}
    modules = [
        sys.modules[name]
        for name in {type(m).__module__ for m in model.modules()}
        if hasattr(sys.modules.get(name), _NAME)
    ]
    originals = [getattr(module, _NAME) for module in modules]

    def watching(original: Any) -> Any:
        signature = inspect.signature(original)

        def attention(*args: Any, **named: Any) -> Any:
            # Models pass cache and scale by position or by name.
            given = signature.bind(*args, **named).arguments
            layer = index.get(id(given.get("cache")))
            keys = given["keys"]
            if layer is not None and isinstance(keys, mx.array):
                see(
                    Seen(
                        layer,
                        given["queries"][0],
                        keys[0],
                        given["values"][0],
                        float(given["scale"]),
                        given.get("sinks"),
                    )
                )
            return original(*args, **named)

        return attention

    try:
        for module, original in zip(modules, originals):
            setattr(module, _NAME, watching(original))
        yield bool(modules)
    finally:
        for module, original in zip(modules, originals):
            setattr(module, _NAME, original)


def attention_cosines(seen: Seen, keys: mx.array, values: mx.array) -> mx.array:
    """Cosine of a layer's attention output with mapped against native keys and values.

    Queries and the new tokens' own keys and values are native in both, so it is
    this layer's map alone that is looked at (the number that predicts retention
    in Heo et al., arXiv:2608.03893, section 5).

    Args:
        seen: What the layer saw in a native run.
        keys: ``[kv heads, prefix, head_dim]`` mapped keys of the prefix.
        values: ``[kv heads, prefix, value_dim]`` mapped values.

    Returns:
        ``[heads]`` means over the new tokens. Lazy.
    """
    prefix = keys.shape[1]

    def joined(mapped: mx.array, native: mx.array) -> mx.array:
        return mx.concatenate([mapped.astype(native.dtype), native[:, prefix:]], axis=1)

    native = _attend(seen, seen.keys, seen.values)
    mapped = _attend(seen, joined(keys, seen.keys), joined(values, seen.values))
    dot = (native * mapped).sum(axis=-1)
    norms = mx.sqrt((native**2).sum(axis=-1) * (mapped**2).sum(axis=-1))
    return (dot / mx.maximum(norms, 1e-20)).mean(axis=-1).reshape(-1)


def _attend(seen: Seen, keys: mx.array, values: mx.array) -> mx.array:
    """``[kv heads, queries per head, new tokens, value_dim]`` float32."""
    n_kv, n_tokens = keys.shape[0], keys.shape[1]
    q = seen.queries.astype(mx.float32)
    new = q.shape[1]
    q = q.reshape(n_kv, -1, new, q.shape[2])
    k, v = keys.astype(mx.float32)[:, None], values.astype(mx.float32)[:, None]
    logits = seen.scale * (q @ k.swapaxes(-1, -2))
    at = mx.arange(n_tokens - new, n_tokens)
    logits = mx.where(mx.arange(n_tokens)[None] <= at[:, None], logits, -mx.inf)
    if seen.sinks is not None:
        extra = seen.sinks.astype(mx.float32).reshape(n_kv, -1, 1, 1)
        extra = mx.broadcast_to(extra, (*logits.shape[:-1], 1))
        attention = mx.softmax(mx.concatenate([logits, extra], axis=-1), axis=-1)[..., :-1]
    else:
        attention = mx.softmax(logits, axis=-1)
    return attention @ v
