"""A fit on keys and values that were captured elsewhere; no model is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from kvgraft.errors import FitError, GeometryError
from kvgraft.fit.capture import CachedRows, FeatureExtractor
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import common_heads
from kvgraft.fit.moments import Moments
from kvgraft.fit.solve import solve_mapper
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import ModelGeometry
from kvgraft.progress import Progress

__all__ = ["ArraysOf", "fit_arrays"]

Pair = tuple[mx.array, mx.array]
ArraysOf = Mapping[int, Pair] | Sequence[Pair]
"""``(keys, values)`` per layer."""


def fit_arrays(
    source_kv: ArraysOf,
    target_kv: ArraysOf,
    source_geometry: ModelGeometry,
    target_geometry: ModelGeometry,
    positions: mx.array | None = None,
    config: FitConfig | None = None,
    *,
    progress: Progress | None = None,
) -> Mapper:
    """Fit on keys and values that were captured before.

    Takes the arguments of ``veloxquant_mlx.transfer.fit_mapper``. All rows are used
    (``stride`` and ``skip`` do not apply) with the same weight, since there is no model
    whose attention could weigh them. The last of them, a share of ``config.heldout``,
    are held out.

    Args:
        source_kv: ``(keys, values)`` per source layer, ``[H, N, D]``, keys with
            RoPE.
        target_kv: The same tokens' ``(keys, values)`` per target layer.
        source_geometry: Geometry of the source.
        target_geometry: Geometry of the target.
        positions: ``[N]`` positions; default ``0 … N-1``.
        config: Settings; those about text are not used.
        progress: Called with (layers solved, layers in all).

    Raises:
        GeometryError: If the arrays do not fit the geometries.
        FitError: If there are too few rows, or they hold NaN.
    """
    cfg = FitConfig() if config is None else config
    geometries = source_geometry, target_geometry
    rows = (
        _as_rows(source_kv, source_geometry, "source"),
        _as_rows(target_kv, target_geometry, "target"),
    )
    counts = {int(x.shape[1]) for side in rows for x in (*side.keys, *side.values)}
    if len(counts) != 1:
        raise GeometryError(f"The layers hold different numbers of tokens: {sorted(counts)}.")
    n = counts.pop()
    at = np.arange(n, dtype=np.int32) if positions is None else np.array(positions, dtype=np.int32)
    if at.shape != (n,):
        raise GeometryError(f"{n} tokens need {n} positions, got an array of {at.shape}.")
    n_held = max(1, round(cfg.heldout * n))
    if n - n_held < 2:
        raise FitError(f"{n} tokens are too few to fit on and to hold some out.")
    structure = cfg.structure
    if structure == "auto":
        matched = common_heads(source_geometry, target_geometry) is not None
        structure = "heads" if cfg.head_mapping == "local" and matched else "full"
    fitted, heldout = (
        Moments(*geometries, structure=structure, dtype=dtype) for dtype in ("float64", "float32")
    )
    for moments, begin, end in ((fitted, 0, n - n_held), (heldout, n - n_held, n)):
        for start in range(begin, end, moments.chunk_rows):
            part = slice(start, min(end, start + moments.chunk_rows))
            source, target = (
                FeatureExtractor(geometry, at[part], who, content_space=cfg.content_space)(
                    CachedRows([x[:, part] for x in side.keys], [x[:, part] for x in side.values])
                )
                for side, geometry, who in zip(rows, geometries, ("source", "target"), strict=True)
            )
            moments.add(source, target)
    return solve_mapper(fitted, heldout, cfg, progress=progress)


def _as_rows(kv: ArraysOf, geometry: ModelGeometry, who: str) -> CachedRows:
    n_layers = len(geometry.layers)
    if isinstance(kv, Mapping):
        missing = [i for i in range(n_layers) if i not in kv]
        if missing or len(kv) != n_layers:
            raise GeometryError(f"The {who} has {n_layers} layers; missing are {missing}.")
        pairs = [kv[i] for i in range(n_layers)]
    else:
        pairs = list(kv)
        if len(pairs) != n_layers:
            raise GeometryError(f"The {who} has {n_layers} layers, got {len(pairs)}.")
    for i, ((keys, values), layer) in enumerate(zip(pairs, geometry.layers, strict=True)):
        want = (layer.n_kv_heads, layer.key_dim), (layer.n_kv_heads, layer.value_dim)
        got = tuple((x.shape[0], x.shape[-1]) if x.ndim == 3 else x.shape for x in (keys, values))
        if got != want:
            raise GeometryError(
                f"The {who}'s layer {i} must be keys [{want[0][0]}, N, {want[0][1]}] and values "
                f"[{want[1][0]}, N, {want[1][1]}]; got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}."
            )
    return CachedRows([k for k, _ in pairs], [v for _, v in pairs])
