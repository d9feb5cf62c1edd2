"""Reading a model's cache geometry from the live model, and proving it.

Configurations lie: model files ignore keys of them, hold RoPE modules that a
layer never uses, or scale keys by a factor named elsewhere. So the rotation is
taken from the modules that run, and then proved. The model reads one token at
several positions through recording caches. A single token sees only itself, so
nothing but RoPE may make its keys depend on the position: every cache must give
``K_p = R_p K_0`` for one of the rotations found, and ``V_p = V_0``. This needs
no knowledge of which attribute belongs to which cache, no tokenizer and no
data, and the same call shows heads, head_dim and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvgraft.errors import UnsupportedModelError
from kvgraft.models.cache_classes import UNSUPPORTED, is_from_mlx_lm
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec
from kvgraft.models.rope_candidates import RopeCandidate, rope_candidates

__all__ = ["CacheProbe", "probe_table", "read_geometry"]

POSITIONS = (0, 1, 37, 1000)
"""Where the token is read. Position 0 is the reference; 1000 turns slow pairs too."""

TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
"""Largest relative error of a key for a rotation to be accepted.

Where the model does nothing but rotate, the error is exactly 0, because the
probe calls the same primitive in the same dtype. The room is for a weightless
norm after RoPE, which commutes with the rotation up to rounding.
"""

_TOKENS = (5, 11, 23, 1)  # tried in turn, in case the embedding of one is all zeros
_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_FLOOR = 1e-3  # of the largest key: pairs smaller than this are not held to their own size

_UNSUPPORTED_CACHES = {
    **UNSUPPORTED,
    "CacheList": "several caches per layer (an indexer or recurrent state beside the keys)",
}


@dataclass(frozen=True)
class CacheProbe:
    """What the probe found out about one cache.

    Attributes:
        index: Position in the model's cache list.
        cache_class: Class that the model makes for it.
        rope: Class of the module whose rotation fits, ``"none"`` for keys
            without rotation, ``None`` if nothing fits.
        layer: The geometry, or ``None`` if the cache can't be mapped.
        dtype: dtype of the keys and values that the model writes.
        error: Largest relative error of the keys over the probed positions,
            for the best rotation; ``None`` if the model was not run.
        reason: Why the cache can't be mapped; ``None`` if it can.
    """

    index: int
    cache_class: str
    rope: str | None = None
    layer: LayerGeometry | None = None
    dtype: str | None = None
    error: float | None = None
    reason: str | None = None


def read_geometry(model: Any) -> ModelGeometry:
    """Read and prove the geometry of a model's cache.

    Runs one token through the model five times or so and leaves no trace on it.

    Args:
        model: A live mlx-lm model.

    Returns:
        The geometry, one entry per cache. Where keys and values differ in
        dtype, ``dtype`` is the wider one.

    Raises:
        UnsupportedModelError: With the reason, if any cache of the model can't
            be mapped: multi-head latent attention, recurrent state, a learned
            norm after RoPE, learned positions, unknown cache classes, or keys
            that fit no rotation found in the model.
    """
    rows = probe_table(model)
    name = _model_type(model)
    if not rows:
        raise UnsupportedModelError(f"{name} makes no caches, so there is nothing to map.")
    bad = [row for row in rows if row.reason is not None]
    if bad:
        which = "every cache" if len(bad) == len(rows) else f"cache {bad[0].index} of {len(rows)}"
        raise UnsupportedModelError(
            f"{name} cannot be mapped: {bad[0].reason} ({which}, {bad[0].cache_class}). "
            "Re-prefill when switching to or from this model."
        )
    layers = tuple(row.layer for row in rows if row.layer is not None)
    dtypes = {row.dtype for row in rows}
    wide = next(iter(dtypes)) if len(dtypes) == 1 else "float32"
    return ModelGeometry(layers, wide or "float32", name)


def probe_table(model: Any) -> list[CacheProbe]:
    """Probe every cache of a model and say what was measured, good or bad.

    Unlike :func:`read_geometry` this does not raise for a model that can't be
    mapped: its rows say why.

    Raises:
        UnsupportedModelError: If no cache list can be made for the object at
            all, so that it is not an mlx-lm language model.
    """
    caches = _make_caches(model)
    classes = [type(cache).__name__ for cache in caches]
    windows = [getattr(cache, "max_size", None) for cache in caches]
    reasons = [_class_reason(cache) for cache in caches]
    if any(reasons):
        # Other caches of such a model may be fine, but running it needs the
        # model's own objects.
        return [CacheProbe(i, c, reason=r) for i, (c, r) in enumerate(zip(classes, reasons))]
    if _has_latent_attention(model):
        reason = "multi-head latent attention: its cache holds latents, not per-head keys"
        return [CacheProbe(i, c, reason=reason) for i, c in enumerate(classes)]

    candidates = rope_candidates(model)
    with _no_dropout(model):
        try:
            recorded = _record_all(model, len(caches), candidates)
        except Exception as error:  # whatever the model's own code raises
            reason = (
                f"it could not read one token through a recording cache "
                f"({type(error).__name__}: {error})"
            )
            return [CacheProbe(i, c, reason=reason) for i, c in enumerate(classes)]
    return [
        _judge(
            i, classes[i], windows[i], {p: calls[i] for p, calls in recorded.items()}, candidates
        )
        for i in range(len(caches))
    ]


class _Recorder:
    """A cache that says it is at ``offset``, remembers what it is given and forgets the past.

    It hands back zeros as values: attention then adds nothing, and the hidden
    states of later layers cannot depend on the position through rounding,
    attention sinks or position-scaled queries. What is recorded stays exact.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.start_position = 0
        self.calls: list[tuple[mx.array, mx.array]] = []
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.calls.append((keys, values))
        self.keys, self.values = keys, mx.zeros_like(values)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None


_Call = list[tuple[mx.array, mx.array]]


def _record_all(
    model: Any, n_caches: int, candidates: Sequence[RopeCandidate]
) -> dict[int, list[_Call]]:
    """Keys and values of one token by position and cache; position 0 comes first."""
    for token in _TOKENS:
        first = _record(model, n_caches, token, 0)
        if all(_usable(keys) for calls in first for keys, _ in calls):
            break
    limit = _position_limit(model)
    positions = {min(p, limit) for p in POSITIONS}
    for candidate in candidates:
        if candidate.spec.max_position is not None:
            # Also the last position at which the rotation is said to hold.
            heads = max((calls[0][0].shape[1] for calls in first if calls), default=1)
            last = candidate.for_heads(heads).max_position
            positions.add(max(0, (last or 1) - 1))
    recorded = {0: first}
    for position in sorted(positions - {0}):
        recorded[position] = _record(model, n_caches, token, position)
    return recorded


def _record(model: Any, n_caches: int, token: int, position: int) -> list[_Call]:
    recorders = [_Recorder(position) for _ in range(n_caches)]
    model(mx.array([[token]]), cache=recorders)
    calls = [recorder.calls for recorder in recorders]
    # Logits stay unevaluated: the vocabulary's matrix product is never run.
    mx.eval(calls)
    return calls


def _usable(keys: mx.array) -> bool:
    largest = mx.abs(keys).max()
    return bool(mx.logical_and(mx.isfinite(largest), largest > 0).item())


def _judge(
    index: int,
    cache_class: str,
    window: Any,
    calls: dict[int, _Call],
    candidates: Sequence[RopeCandidate],
) -> CacheProbe:
    """Decide which rotation one cache's keys carry."""
    row = CacheProbe(index, cache_class)
    first = calls[0]
    if not first:
        return replace(row, reason="the model never writes to this cache")
    if len(first) > 1:
        return replace(row, reason="the model writes several times per token to this cache")
    (k0, v0) = first[0]
    shapes_fit = k0.ndim == 4 and v0.ndim == 4 and k0.shape[:3] == v0.shape[:3]
    if not shapes_fit or (k0.shape[0], k0.shape[2]) != (1, 1):
        return replace(
            row,
            reason=f"keys {tuple(k0.shape)} and values {tuple(v0.shape)} are not "
            "[batch, heads, tokens, head_dim]",
        )
    if k0.dtype not in _NAMES or v0.dtype not in _NAMES:
        return replace(row, reason=f"keys are {k0.dtype} and values {v0.dtype}, not floats")
    dtype = _NAMES[k0.dtype] if k0.dtype == v0.dtype else "float32"
    row = replace(row, dtype=dtype)
    if not _usable(k0):
        return replace(row, reason="the keys are zero or not finite, so nothing can be proved")

    tolerance = TOLERANCE[_NAMES[k0.dtype]]
    turned = {p: call[0][0] for p, call in calls.items() if p != 0}
    heads, key_dim = k0.shape[1], k0.shape[3]
    fits = []
    for candidate in candidates:
        spec = candidate.for_heads(heads)
        if spec.dims <= key_dim:
            fits.append((_rotation_error(k0, turned, spec), spec, candidate.origin))
    # Of equals take no rotation first, then the one that admits a limit.
    fits.sort(key=lambda fit: (fit[0], fit[1].dims > 0, fit[1].max_position is None))
    error, spec, origin = fits[0]
    row = replace(row, error=error)

    drift = max(_relative(v0, call[0][1]) for call in calls.values())
    if drift > TOLERANCE[_NAMES[v0.dtype]]:
        return replace(row, reason=_why_values_move(k0, turned))
    if not error <= tolerance:  # also when it is NaN
        return replace(row, reason=_why_no_rotation(k0, turned))
    for other_error, other, other_origin in fits[1:]:
        if other_error == error and not _same_rotation(spec, other):
            return replace(
                row,
                reason=f"the rotations of {origin} and {other_origin} both fit, so the probe "
                "cannot tell which one this cache uses",
            )
    span = None if window is None else int(window)
    layer = LayerGeometry(heads, key_dim, v0.shape[3], spec, span)
    return replace(row, rope="none" if spec.dims == 0 else origin, layer=layer)


def _rotation_error(k0: mx.array, turned: dict[int, mx.array], spec: RopeSpec) -> float:
    """Largest relative error of ``R_p K_0`` over the positions that ``spec`` describes.

    Relative to each pair's own length, since keys of real models have entries
    hundreds of times larger than others, which would hide a wrong small pair.
    """
    size = _pair_norm(k0, spec)
    size = mx.maximum(size, _FLOOR * size.max())
    worst = 0.0
    for position, keys in turned.items():
        if spec.max_position is not None and position >= spec.max_position:
            continue
        # K_0 already carries the magnitude, so only the turn is left, done in
        # the model's dtype as the model does it.
        predicted = k0
        if spec.dims:
            predicted = mx.fast.rope(
                k0,
                spec.dims,
                traditional=spec.traditional,
                base=spec.base,
                scale=spec.scale,
                offset=position,
                freqs=None if spec.freqs is None else mx.array(spec.freqs, dtype=mx.float32),
            )
        wrong = _pair_norm(predicted.astype(mx.float32) - keys.astype(mx.float32), spec)
        worst = max(worst, _number((wrong / size).max()))
    return worst


def _pair_norm(x: mx.array, spec: RopeSpec) -> mx.array:
    """Length of each rotated pair, and size of each dimension that is not rotated."""
    x = x.astype(mx.float32)
    rotated, rest = x[..., : spec.dims], mx.abs(x[..., spec.dims :])
    if spec.dims == 0:
        return rest
    pairs = rotated.reshape(*x.shape[:-1], *((-1, 2) if spec.traditional else (2, spec.dims // 2)))
    norms = mx.sqrt(mx.square(pairs).sum(axis=-1 if spec.traditional else -2))
    return mx.concatenate([norms, rest], axis=-1)


def _relative(a: mx.array, b: mx.array) -> float:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return _number(mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-30))


def _same_rotation(a: RopeSpec, b: RopeSpec) -> bool:
    """Whether two specs turn keys alike, also where the probe did not look."""
    position = 50021
    for spec in (a, b):
        if spec.max_position is not None:
            position = min(position, spec.max_position - 1)
    row = mx.arange(1, max(a.dims, b.dims, 1) + 1, dtype=mx.float32)[None]
    at = mx.array([position])
    one, other = (spec.rotate(row, at) if spec.dims else row for spec in (a, b))
    return bool(mx.array_equal(one, other).item())


def _why_values_move(k0: mx.array, turned: dict[int, mx.array]) -> str:
    if all(_relative(k0, keys) == 0 for keys in turned.values()):
        return "its values depend on the position and its keys do not (latent attention)"
    return "its values depend on the position (learned absolute positions)"


def _why_no_rotation(k0: mx.array, turned: dict[int, mx.array]) -> str:
    def length(x: mx.array) -> mx.array:
        return mx.sqrt(mx.square(x.astype(mx.float32)).sum(axis=-1))

    change = max(_relative(length(k0), length(keys)) for keys in turned.values())
    if change > 1e-2:
        return (
            "the length of its keys depends on the position, so a learned norm or scale "
            "follows RoPE"
        )
    return "its keys turn with the position in a way that fits no RoPE found in the model"


def _class_reason(cache: Any) -> str | None:
    name = type(cache).__name__
    if name in ("KVCache", "RotatingKVCache") and is_from_mlx_lm(cache):
        return None
    if name in _UNSUPPORTED_CACHES:
        return _UNSUPPORTED_CACHES[name]
    return f"it uses the cache class {name}, which kvgraft does not know"


def _has_latent_attention(model: Any) -> bool:
    return any(hasattr(module, "kv_lora_rank") for module in model.modules())


def _make_caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    try:
        return list(make_prompt_cache(model))
    except (AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not an mlx-lm language model: no cache can be made for "
            f"it ({error})."
        ) from error


def _position_limit(model: Any) -> int:
    """Last position that is safe to ask for: a table of positions may end there."""
    args = getattr(model, "args", None)
    limit = max(POSITIONS)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "block_size"):
        value = getattr(args, name, None)
        if isinstance(value, int) and value > 2:
            limit = min(limit, value - 1)
    return limit


def _model_type(model: Any) -> str:
    name = getattr(model, "model_type", None) or getattr(
        getattr(model, "args", None), "model_type", None
    )
    return str(name) if name else type(model).__name__


def _number(x: mx.array) -> float:
    value: Any = x.item()
    return float(value)


@contextmanager
def _no_dropout(model: Any) -> Iterator[None]:
    """Dropout would make keys depend on chance; every flag is put back.

    ``model.eval()`` is not used: it makes some quantised layers convert their weights.
    """
    from mlx.nn.layers.dropout import Dropout, Dropout2d, Dropout3d

    active = [
        module
        for module in model.modules()
        if isinstance(module, (Dropout, Dropout2d, Dropout3d)) and module.training
    ]
    for module in active:
        module._training = False
    try:
        yield
    finally:
        for module in active:
            module._training = True
