"""Row weights: tokens that the target attends to count for more.

An error in a cached value matters by how much attention its token gets, an
error in a key by how much a change of that attention moves the output. To first
order, for one query with attention a and output o = Σ a_i v_i::

    |∂o/∂v_i|² = a_i² d            |∂o/∂k_i|² = a_i² |v_i - o|² |q|² s²

with s the scale of the attention. CacheBridge (Qu et al., arXiv:2609.00891)
weights the rows of its regression by such sensitivities, taken at a few dozen
boundaries between a prefix and the first token after it, and shrinks them until
enough rows count. Its weights differ by layer and head; here, where one set of
moments serves all layers, they are averaged: each layer counts the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.features import KINDS
from kvgraft.models.attention_hook import AttentionCall, attention_weights, capture_attention
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = [
    "N_BOUNDARIES",
    "boundaries",
    "recorded_sensitivities",
    "row_weights",
    "shrink",
]

N_BOUNDARIES = 32
"""Queries per sequence at which attention is captured."""

_FIRST = 12


def boundaries(seq_len: int, count: int = N_BOUNDARIES) -> NDArray[np.int32]:
    """Positions of the queries: log-spaced, from 12 to the last token.

    Each stands for a hand-off before it: the query is the first token that the
    target reads itself.
    """
    first = min(_FIRST, max(1, seq_len // 2))
    spaced = np.geomspace(first, seq_len - 1, count)
    return np.unique(np.round(spaced)).astype(np.int32)


@contextmanager
def recorded_sensitivities(
    model: Any, cache: list[Any], geometry: ModelGeometry, seq_len: int
) -> Iterator[list[tuple[mx.array, mx.array]]]:
    """Record the sensitivities of the keys and values of one prefill.

    Args:
        model: The target.
        cache: The caches that the prefill fills.
        geometry: Geometry of the target.
        seq_len: Tokens of the prefill, which must be one call of the model.

    Yields:
        A list that holds, after the call, one ``([seq_len], [seq_len])`` pair
        for the keys and the values of each instrumented layer; lazy.

    Raises:
        FitError: If the model does not call mlx-lm's attention function, so that
            it cannot be instrumented.
    """
    found: list[tuple[mx.array, mx.array]] = []
    at = mx.array(boundaries(seq_len))

    def receive(call: AttentionCall) -> None:
        found.append(_sensitivities(call, at, geometry.layers[call.layer].window))

    with capture_attention(model, cache, receive):
        yield found
    if not found:
        raise FitError(
            f"The attention of {geometry.model_type} cannot be instrumented: it does not call "
            f"mlx-lm's scaled_dot_product_attention. Give {named('token_weights', 'uniform')}."
        )


def _sensitivities(
    call: AttentionCall, at: mx.array, window: int | None
) -> tuple[mx.array, mx.array]:
    """``[T]`` sums over heads and boundaries, for keys and for values."""
    n_kv, n_tokens = call.keys.shape[0], call.keys.shape[1]
    scale = call.scale
    q = call.queries[:, at].astype(mx.float32)
    q = q.reshape(n_kv, -1, *q.shape[1:])  # [kv heads, queries per head, boundaries, D]
    k, v = call.keys.astype(mx.float32)[:, None], call.values.astype(mx.float32)[:, None]
    logits = scale * (q @ k.swapaxes(-1, -2))
    positions = mx.arange(n_tokens)
    visible = positions[None] <= at[:, None]
    if window is not None:
        visible = mx.logical_and(visible, positions[None] > at[:, None] - window)
    logits = mx.where(visible, logits, -mx.inf)
    attention = attention_weights(logits, call.sinks)
    out = attention @ v
    # The token at the boundary is read natively: it has no error to weigh.
    squared = mx.where(positions[None] < at[:, None], attention**2, 0.0)
    by_value = squared.sum(axis=(0, 1, 2))
    distance = (
        (v**2).sum(axis=-1)[..., None, :]
        - 2 * (out @ v.swapaxes(-1, -2))
        + (out**2).sum(axis=-1, keepdims=True)
    )
    strength = (q**2).sum(axis=-1, keepdims=True) * scale**2
    by_key = (squared * mx.maximum(distance, 0.0) * strength).sum(axis=(0, 1, 2))
    return by_key, by_value


def shrink(sensitivity: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """Mix sensitivities with uniform weights until enough rows count.

    Args:
        sensitivity: ``[n]``, not negative.
        floor: Smallest effective share of the rows (Kish), between 0 and 1.

    Returns:
        ``[n]`` weights with a mean of 1.
    """
    n = len(sensitivity)
    total = float(sensitivity.sum())
    if not np.isfinite(total) or total <= 0:
        return np.ones(n)
    raw = sensitivity * (n / total)
    # With weights 1 + m (raw - 1) the effective share is 1 / (1 + m² var).
    variance = float(((raw - 1.0) ** 2).mean())
    mix = 1.0 if variance == 0 else min(1.0, ((1.0 / floor - 1.0) / variance) ** 0.5)
    return np.asarray(1.0 + mix * (raw - 1.0))


def row_weights(sensitivity: mx.array, floor: float) -> dict[str, NDArray[np.float64]]:
    """Weights of the rows of one sequence, by kind; see :func:`shrink`.

    Args:
        sensitivity: ``[2, rows]``, of keys and values.
        floor: Smallest effective share of the rows.
    """
    raw = np.array(sensitivity).astype(np.float64)
    return {kind: shrink(x, floor) for kind, x in zip(KINDS, raw, strict=True)}
