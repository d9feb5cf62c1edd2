"""Running a model over calibration text and taking the keys and values it caches.

One call per sequence and no chunks: a sliding-window cache keeps every position
of its first call and loses them with the second. Only the caches are evaluated;
MLX is lazy, so the logits are never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.features import FeatureRows
from kvgraft.fit.token_weights import recorded_sensitivities
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.rope import RopeTable, rotate_pairs
from kvgraft.models.vocabulary import check_tokens
from kvgraft.option_names import named

__all__ = ["CachedRows", "FeatureExtractor", "capture", "row_positions"]


@dataclass(frozen=True)
class CachedRows:
    """Some tokens' keys and values as the model cached them.

    Attributes:
        keys: One ``[n_kv_heads, rows, key_dim]`` array per cache, in the
            model's dtype, keys post-RoPE.
        values: One ``[n_kv_heads, rows, value_dim]`` array per cache.
        sensitivity: ``[2, rows]`` float32: how much errors of the keys and of the
            values matter to the target; ``None`` if it was not captured.
    """

    keys: list[mx.array]
    values: list[mx.array]
    sensitivity: mx.array | None = None


def row_positions(seq_len: int, stride: int, skip: int = 0) -> NDArray[np.int32]:
    """Positions of the rows that are taken from a sequence.

    Neighbouring tokens are much alike; the paper takes every fourth (section
    3.1). ``skip`` leaves out the first tokens, whose keys are attention sinks.

    Raises:
        FitError: If that leaves none.
    """
    if stride < 1 or not 0 <= skip < seq_len:
        raise FitError(
            f"Cannot take rows with {named('stride')} {stride} and {named('skip')} {skip} of "
            f"{seq_len} tokens."
        )
    return np.arange(skip, seq_len, stride, dtype=np.int32)


def capture(
    model: Any,
    tokens: Sequence[int] | NDArray[np.int32],
    positions: NDArray[np.int32],
    *,
    attention_geometry: ModelGeometry | None = None,
) -> CachedRows:
    """Prefill one sequence and take rows out of the caches.

    The work is queued, not waited for: on a GPU it runs while the caller does
    something else.

    Args:
        model: A live mlx-lm model.
        tokens: ``[n]`` token ids.
        positions: ``[rows]`` positions to take, ascending.
        attention_geometry: The model's geometry, to capture its attention too and
            return sensitivities.

    Raises:
        FitError: If the caches are not what they should be, or the attention
            cannot be instrumented.
        TokenIdError: If the model does not have all of the tokens.
    """
    from mlx_lm.models.cache import make_prompt_cache

    n_tokens = len(tokens)
    check_tokens(model, tokens)
    cache = make_prompt_cache(model)
    ids = mx.array(np.asarray(tokens, dtype=np.int32))[None]
    at = mx.array(positions)
    sensitivity = None
    if attention_geometry is None:
        model(ids, cache=cache)
    else:
        with recorded_sensitivities(model, cache, attention_geometry, n_tokens) as layers:
            model(ids, cache=cache)
        # Each layer counts the same, however large its keys are.
        by_kind = [mx.stack([layer[kind][at] for layer in layers]) for kind in (0, 1)]
        shares = [x / mx.maximum(x.sum(axis=1, keepdims=True), 1e-30) for x in by_kind]
        sensitivity = mx.stack([x.mean(axis=0) for x in shares])
    keys, values = [], []
    for i, entry in enumerate(cache):
        k, v = _arrays(entry, i, n_tokens)
        keys.append(k[0][:, at])
        values.append(v[0][:, at])
    extra = [] if sensitivity is None else [sensitivity]
    mx.async_eval([*keys, *values, *extra])  # type: ignore[no-untyped-call]
    return CachedRows(keys, values, sensitivity)


def _arrays(entry: Any, layer: int, n_tokens: int) -> tuple[mx.array, mx.array]:
    """All tokens of a cache after one call of the model.

    A sliding-window cache drops the front of the text with later calls. After the
    first call it holds all of it, in order.
    """
    keys, values = getattr(entry, "keys", None), getattr(entry, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        raise FitError(
            f"Cache {layer} ({type(entry).__name__}) holds no plain keys and values after a "
            "prefill; this model cannot be fitted."
        )
    if keys.shape[2] < n_tokens or values.shape[2] < n_tokens:
        raise FitError(
            f"Cache {layer} ({type(entry).__name__}) kept {keys.shape[2]} of {n_tokens} tokens. "
            f"Use calibration sequences that fit into it (a smaller {named('seq_len')})."
        )
    return keys[:, :, :n_tokens], values[:, :, :n_tokens]


class FeatureExtractor:
    """Turns cached rows into features: float32, RoPE off the keys, checked.

    Args:
        geometry: Geometry of the model the rows come from.
        positions: ``[rows]`` their positions.
        who: ``"source"`` or ``"target"``, for messages.
        content_space: Take RoPE off. The paper does; without it the map holds
            only near the positions it was fitted on (section 3.3).
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        positions: NDArray[np.int32],
        who: str,
        *,
        content_space: bool = True,
    ) -> None:
        self._geometry = geometry
        self._who = who
        self._tables: list[RopeTable | None] = [None] * len(geometry.layers)
        if content_space and len(positions):
            made: dict[Any, RopeTable | None] = {}
            for i, layer in enumerate(geometry.layers):
                layer.rope.check_positions(int(positions[-1]))
                if layer.rope not in made:
                    made[layer.rope] = layer.rope.table(mx.array(positions), inverse=True)
                self._tables[i] = made[layer.rope]

    def start(self, rows: CachedRows) -> CachedRows:
        """Queue the work on some rows; :meth:`finish` waits for it.

        Separate, so that a GPU can process the next sequence while the CPU multiplies
        this one.

        Raises:
            FitError: If the model has another number of caches than its geometry.
        """
        if len(rows.keys) != len(self._geometry.layers):
            raise FitError(
                f"The {self._who} model filled {len(rows.keys)} caches, its geometry has "
                f"{len(self._geometry.layers)}."
            )
        stripped = [rotate_pairs(k, t) for k, t in zip(rows.keys, self._tables, strict=True)]
        plain = [v.astype(mx.float32) for v in rows.values]
        mx.async_eval([*stripped, *plain])  # type: ignore[no-untyped-call]
        return CachedRows(stripped, plain, rows.sensitivity)

    def finish(self, rows: CachedRows) -> FeatureRows:
        """The features of rows that :meth:`start` returned.

        Raises:
            FitError: If the model produced NaN or infinity.
        """
        return FeatureRows(
            [self._check(x, i, "keys") for i, x in enumerate(rows.keys)],
            [self._check(x, i, "values") for i, x in enumerate(rows.values)],
        )

    def __call__(self, rows: CachedRows) -> FeatureRows:
        """:meth:`start` and :meth:`finish` in one."""
        return self.finish(self.start(rows))

    def _check(self, x: mx.array, layer: int, kind: str) -> NDArray[np.float32]:
        out = np.array(x)
        # The sum is finite unless an entry isn't (or entries are extremely large);
        # it needs no temporary array.
        if not np.isfinite(out.sum(dtype=np.float64)):
            bad = int((~np.isfinite(out)).sum())
            raise FitError(
                f"The {self._who} model's {kind} of layer {layer} hold {bad} values that are "
                f"not finite, out of {out.size}. The fit cannot use them: the model's "
                f"{self._geometry.dtype} may overflow (load it as bfloat16 or float32), or its "
                "weights may be damaged."
            )
        return out
