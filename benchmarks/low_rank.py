"""A correction that kvgraft does not have, to see whether it should: low rank, other layers.

A map reads k source layers. The others know something, too; a full map of them costs as
many weights per layer. Here they get a map of low rank r instead (their features go
through r numbers), fitted to what the k layers leave over, with r such that half of the k
layers and the correction together have the weights of all k.

Reduced-rank regression: with S the chosen layers, O the others and O·S what S does not
explain of O, the best map of rank r is the ridge solution B of Y on O·S, projected on the
r leading right singular vectors of its fitted values (Izenman, 1975).
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from kvgraft.fit import FitConfig, MomentSet
from kvgraft.fit.features import Columns
from kvgraft.fit.layer_ranking import allowed_sources
from kvgraft.fit.solve import best_lambda, heldout_scores, mean_scores
from kvgraft.fit.weight_format import store_weight
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper

Float64 = NDArray[np.float64]


def add_low_rank(
    mapper: Mapper, fit: MomentSet, heldout: MomentSet, config: FitConfig, wanted: FitConfig
) -> tuple[Mapper, int]:
    """A map of the same layers and a low-rank one of all others.

    Args:
        mapper: The closed form with the head mapping ``full``.
        fit: Moments of the text that is fitted on.
        heldout: Moments of held-out text, by which the λ of the correction is found.
        config: What ``mapper`` was solved with.
        wanted: Its ``k`` says how many weights the result may have.

    Returns:
        The map, written out as a full one of all layers, and the number of weights that
        its factors have.
    """
    layers, total = [], 0
    for m in mapper.layers:
        parts = {}
        for kind, part in (("keys", m.keys), ("values", m.values)):
            heads, width, dim = part.shape
            allowed = allowed_sources(fit.source, fit.target, m.target_layer)
            others = [i for i in allowed if i not in part.sources]
            if not others:
                parts[kind] = part
                total += part.n_parameters
                continue
            n_others = len(fit.means(kind, others, None, [m.target_layer], None)[0])
            spare = (int(wanted.k) - len(part.sources)) * width // len(part.sources)
            rank = max(1, min(heads * dim, spare * heads * dim // (n_others + heads * dim)))
            own = config.penalty(fit.count(kind))
            ridge = best_lambda(fit, heldout, config, kind, m.target_layer, others)
            weights = _solve(fit, kind, m.target_layer, part.sources, others, rank, own, ridge)
            sources = tuple(sorted((*part.sources, *others)))
            means = fit.means(kind, sources, None, [m.target_layer], None)
            dense = np.stack(np.split(weights, heads, axis=1))
            stored = store_weight(dense, replace(config, weight_format="float32"), kind)
            bias = (means[1] - means[0] @ weights).reshape(heads, dim)
            parts[kind] = LinearMap.of(sources, stored, mx.array(bias.astype(np.float32)))
            total += (width + 1) * heads * dim + rank * (n_others + heads * dim)
        layer = LayerMap(m.target_layer, parts["keys"], parts["values"], {})
        layer.scores = heldout_scores(layer, heldout)
        layers.append(layer)
    out = replace(mapper, layers=layers, fit={**mapper.fit, **mean_scores(layers)})
    return out, total


def _solve(
    fit: MomentSet,
    kind: str,
    target: int,
    chosen: tuple[int, ...],
    others: list[int],
    rank: int,
    own: float,
    ridge: float,
) -> Float64:
    """``[features of chosen and others, ascending, features of target]`` weights."""
    layers = sorted((*chosen, *others))
    xx = fit.xx(kind, layers, None)
    xy = fit.xy(kind, layers, None, [target], None)
    columns = Columns.of(fit.source, kind).only(layers)
    mine = np.concatenate(
        [np.full(w, i in chosen) for i, w in zip(layers, columns.widths, strict=True)]
    )
    s, o = np.flatnonzero(mine), np.flatnonzero(~mine)
    inner, across = xx[np.ix_(s, s)], xx[np.ix_(s, o)]
    inner[np.diag_indices(len(s))] += own
    factor = scipy.linalg.cho_factor(inner, check_finite=False)
    by_chosen = scipy.linalg.cho_solve(factor, across, check_finite=False)
    plain = scipy.linalg.cho_solve(factor, xy[s], check_finite=False)
    left = xx[np.ix_(o, o)] - across.T @ by_chosen
    left[np.diag_indices(len(left))] += ridge
    cross = xy[o] - across.T @ plain
    lower = scipy.linalg.cholesky(left, lower=True, overwrite_a=True, check_finite=False)
    fitted = scipy.linalg.solve_triangular(lower, cross, lower=True, check_finite=False)
    leading = np.linalg.svd(fitted, full_matrices=False)[2][:rank]
    full = scipy.linalg.solve_triangular(lower, fitted, lower=True, trans=1, check_finite=False)
    low = full @ leading.T @ leading
    out = np.empty_like(xy)
    out[s], out[o] = plain - by_chosen @ low, low
    return out
