"""From moments to a mapper: one ridge system per set of features, and held-out scores."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import KINDS
from kvgraft.fit.head_mapping import HeadGroups, head_groups
from kvgraft.fit.layer_ranking import LayerScores, choose_layers, score_layers
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.moments import Moments
from kvgraft.fit.ridge import Residuals, r_squared_by_head, residuals, solve_ridge
from kvgraft.fit.weight_format import is_quantized, store_weight
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.ops.quantized import Weight, dequantize
from kvgraft.option_names import named
from kvgraft.progress import Progress

__all__ = ["best_lambda", "heldout_scores", "mean_scores", "solve_layer", "solve_mapper"]

Float64 = NDArray[np.float64]

_EXPONENTS = (-9, 1)
"""Range in which λ is searched: powers of ten, as shares of the mean diagonal."""


def solve_mapper(
    moments: Moments | Sequence[Moments] | MomentSet,
    heldout: Moments | Sequence[Moments] | MomentSet | None,
    config: FitConfig,
    *,
    scores: LayerScores | None = None,
    targets: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Mapper:
    """Solve all maps of a pair. The models are not needed any more.

    One set of moments serves any number of configurations.

    Args:
        moments: Moments of the calibration text.
        heldout: Moments of held-out text, for layer ranking and scores; without
            them the scores ``r2_keys`` and ``r2_values`` are absent.
        config: What to solve; its settings about text are not used.
        scores: Single-source scores of an earlier call with the same moments
            and layer ranking, to save their computation.
        targets: Target layers to solve; all if absent.
        progress: Called with (layers done, layers in all).

    Returns:
        The mapper, without model identities.

    Raises:
        FitError: If the head mapping does not fit the pair, moments are missing, or
            a layer cannot be fitted.
    """
    if config.is_auto:
        raise FitError(
            "Choosing k or the head mapping by loss needs the models; use fit_mapper, or give "
            "both here."
        )
    fit = MomentSet.of(moments)
    config, remarks = config.within(len(fit.source.layers))
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    test = None if heldout is None else MomentSet.of(heldout)
    chosen = list(range(len(fit.target.layers)) if targets is None else targets)
    if not fit.count("keys") > 1:
        raise FitError("The moments hold no rows to fit on.")
    if scores is None:
        ridge = config.penalty(fit.count("keys"))
        scores = score_layers(fit, test, rule=config.layer_ranking, ridge=ridge, targets=chosen)
    layers = []
    for n, t in enumerate(chosen):
        sources = _source_layers(scores, config, t)
        layers.append(solve_layer(fit, test, config, t, *sources))
        if progress is not None:
            progress(n + 1, len(chosen))
    return Mapper(
        fit.source,
        fit.target,
        layers,
        content_space=config.content_space,
        fit=_describe(fit, test, config, scores, layers),
    )


def _source_layers(
    scores: LayerScores, config: FitConfig, target_layer: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source layers of the keys and of the values."""
    kinds = ("shared", "shared") if config.source_layers == "shared" else ("keys", "values")
    keys, values = (
        choose_layers(scores.of(kind), target_layer, k)
        for kind, k in zip(kinds, (config.k, config.k_of_values), strict=True)
    )
    return keys, values


def solve_layer(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    target_layer: int,
    key_sources: Sequence[int],
    value_sources: Sequence[int],
) -> LayerMap:
    """Solve the keys and values of one target layer.

    Args:
        fit: Moments of the calibration text.
        heldout: Moments of held-out text, or ``None``.
        config: λ, head mapping and weight format.
        target_layer: The target layer.
        key_sources: Source layers of its keys.
        value_sources: Source layers of its values.

    Returns:
        The maps with their scores: ``r2_keys`` and ``r2_values`` on held-out text,
        with the weights as they are stored, averaged over heads; the same per head
        (``r2_keys.0``, …); ``r2_keys_fit`` and ``r2_values_fit`` in-sample; the
        condition numbers ``condition_keys`` and ``condition_values``; where λ was
        chosen, ``lambda_keys`` and ``lambda_values``, as added to the Gram matrix;
        and for quantised weights ``r2_keys_unrounded`` and ``r2_values_unrounded``
        before quantisation.

    Raises:
        FitError: If the layer cannot be solved or its weights cannot be stored.
    """
    scores: dict[str, float] = {}
    maps = {}
    for kind, sources in (("keys", key_sources), ("values", value_sources)):
        solved = _solve_kind(fit, heldout, config, kind, target_layer, tuple(sources))
        maps[kind] = solved.map
        if config.ridge_lambda == "auto":
            scores[f"lambda_{kind}"] = solved.ridge
        scores[f"r2_{kind}_fit"] = float(solved.r2_fit.mean())
        scores[f"condition_{kind}"] = solved.condition
        if solved.method != "cholesky":
            scores[f"unstable_{kind}"] = 1.0
        if heldout is not None and is_quantized(config):
            scores[f"r2_{kind}_unrounded"] = float(
                _heldout_r2(solved.map, kind, target_layer, heldout, solved.unrounded).mean()
            )
    layer = LayerMap(target_layer, maps["keys"], maps["values"], scores)
    if heldout is not None:
        scores |= heldout_scores(layer, heldout)
    return layer


def heldout_scores(layer: LayerMap, heldout: MomentSet) -> dict[str, float]:
    """Held-out R² of a layer with the weights as they are stored, rounding included.

    Args:
        layer: The maps, loaded.
        heldout: Moments of held-out text.

    Returns:
        ``r2_keys`` and ``r2_values``, averaged over heads, and ``r2_keys.0``, ….
    """
    scores: dict[str, float] = {}
    for kind, part in (("keys", layer.keys), ("values", layer.values)):
        r2 = _heldout_r2(part, kind, layer.target_layer, heldout)
        scores[f"r2_{kind}"] = float(r2.mean())
        scores |= {f"r2_{kind}.{head}": float(value) for head, value in enumerate(r2)}
    return scores


def mean_scores(layers: Sequence[LayerMap]) -> dict[str, float]:
    """R² averaged over layers: ``mean_r2_keys``, ``mean_r2_keys_fit``, …."""
    out = {}
    names = [f"r2_{kind}{end}" for kind in KINDS for end in ("", "_fit", "_unrounded")]
    for name in names:
        found = [m.scores[name] for m in layers if name in m.scores]
        if found:
            out[f"mean_{name}"] = float(np.mean(found))
    return out


def best_lambda(
    fit: MomentSet,
    heldout: MomentSet,
    config: FitConfig,
    kind: str,
    target_layer: int,
    sources: Sequence[int],
) -> float:
    """The λ, as added to the Gram matrix, with the highest held-out R².

    The search goes over powers of ten as shares of the mean diagonal of the Gram
    matrix: first a millionth, then up and down from the best for as long as R²
    rises. No model runs: both errors are computed from moments.

    Args:
        fit: Moments of the calibration text.
        heldout: Moments of held-out text.
        config: Head mapping.
        kind: ``"keys"`` or ``"values"``.
        target_layer: The target layer.
        sources: Its source layers.
    """
    _, systems = _head_systems(fit, config, target_layer, sources)
    prepared = []
    for group, heads in systems.items():
        where = (kind, sources, group, [target_layer], heads)
        xx = fit.xx(kind, sources, group)
        prepared.append(
            (xx, fit.xy(*where), fit.means(*where), Residuals(heldout, *where), len(heads))
        )
    scale = float(np.mean([np.trace(xx) / len(xx) for xx, *_ in prepared]))

    def explained(exponent: int) -> float:
        r2 = 0.0
        for xx, xy, (x_mean, y_mean), test, n in prepared:
            w, _ = solve_ridge(xx.copy(), xy, scale * 10.0**exponent)
            error = test(w, y_mean - x_mean @ w)
            r2 += float(r_squared_by_head(error, test.total, n).sum())
        return r2

    first, (lowest, highest) = -6, _EXPONENTS
    found = {first: explained(first)}
    for step in (1, -1):
        at = max(found, key=lambda e: found[e])
        while lowest <= at + step <= highest:
            found[at + step] = explained(at + step)
            if not found[at + step] > found[at]:
                break
            at += step
        if at > first:
            break  # R² below the start is lower
    return scale * 10.0 ** max(found, key=lambda e: found[e])


@dataclass(frozen=True)
class _Solved:
    map: LinearMap
    r2_fit: Float64
    condition: float
    method: str
    ridge: float
    unrounded: tuple[Float64, Float64]
    """Weights and intercepts before the weights were rounded."""


def _solve_kind(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    kind: str,
    target_layer: int,
    sources: tuple[int, ...],
) -> _Solved:
    """Solve and store the keys or the values of one target layer."""
    ridge = _ridge(fit, heldout, config, kind, target_layer, sources)
    mapping, systems = _head_systems(fit, config, target_layer, sources)
    n_heads = fit.target.layers[target_layer].n_kv_heads
    weights: list[Float64 | None] = [None] * n_heads
    r2_fit = np.zeros(n_heads)
    condition, method = 0.0, "cholesky"
    for group, heads in systems.items():
        where = (group, [target_layer], heads)
        xy = fit.xy(kind, sources, *where)
        solved, report = solve_ridge(fit.xx(kind, sources, group), xy, ridge)
        if not np.isfinite(solved).all():
            raise FitError(
                f"Target layer {target_layer}, {kind}: the solution is not finite (condition "
                f"{report.condition:.1e}). Raise {named('ridge_lambda')}, or give more "
                "calibration text."
            )
        condition = max(condition, report.condition)
        method = report.method if report.method != "cholesky" else method
        # With (X'X + λI) W = X'Y the squared error needs no product with X'X.
        total = fit.yy(kind, *where)
        error = total - np.einsum("ij,ij->j", solved, xy) - ridge * (solved**2).sum(axis=0)
        r2_fit[heads] = r_squared_by_head(np.maximum(error, 0.0), total, len(heads))
        for head, w in zip(heads, np.split(solved, len(heads), axis=1), strict=True):
            weights[head] = w

    dense = np.stack([w for w in weights if w is not None])
    stored = store_weight(dense, config, f"Target layer {target_layer}, {kind}")
    used = np.array(dequantize(stored).astype(mx.float32)).astype(np.float64)

    def intercepts(of: Float64) -> Float64:
        bias = np.zeros((n_heads, of.shape[2]))
        for group, heads in systems.items():
            x_mean, y_mean = fit.means(kind, sources, group, [target_layer], heads)
            w = np.concatenate([of[head] for head in heads], axis=1)
            bias[heads] = (y_mean - x_mean @ w).reshape(len(heads), -1)
        return bias

    # The intercept corrects what rounding the weights does to the mean.
    bias = intercepts(used)
    linear = LinearMap.of(sources, stored, mx.array(bias.astype(np.float32)), mapping)
    mx.eval(_arrays(stored), linear.bias)
    return _Solved(linear, r2_fit, condition, method, ridge, (dense, intercepts(dense)))


def _ridge(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    kind: str,
    target_layer: int,
    sources: tuple[int, ...],
) -> float:
    """λ as added to the Gram matrix, searched for if it is ``"auto"``."""
    if config.ridge_lambda != "auto":
        return config.penalty(fit.count(kind))
    if heldout is None:
        raise FitError(
            f"Choosing λ needs moments of held-out text; give {named('ridge_lambda')} as a number."
        )
    return best_lambda(fit, heldout, config, kind, target_layer, sources)


def _head_systems(
    fit: MomentSet, config: FitConfig, target_layer: int, sources: Sequence[int]
) -> tuple[HeadGroups | None, dict[tuple[int, ...] | None, list[int]]]:
    """The head mapping of a target layer, and its systems of equations."""
    mapping = head_groups(
        fit.source, fit.target, target_layer, sources, config.head_mapping, config.groups
    )
    return mapping, _systems(mapping, fit.target.layers[target_layer].n_kv_heads)


def _systems(mapping: HeadGroups | None, n_heads: int) -> dict[tuple[int, ...] | None, list[int]]:
    """Target heads by the source heads that feed them: those share one matrix."""
    systems: dict[tuple[int, ...] | None, list[int]] = {}
    for head in range(n_heads):
        systems.setdefault(None if mapping is None else mapping[head], []).append(head)
    return systems


def _heldout_r2(
    part: LinearMap,
    kind: str,
    target_layer: int,
    heldout: MomentSet,
    unrounded: tuple[Float64, Float64] | None = None,
) -> Float64:
    """``[heads]`` R² of a map, or of its weights and intercepts before rounding."""
    assert part.weight is not None and part.bias is not None
    used, bias = unrounded or (
        np.array(dequantize(part.weight).astype(mx.float32)).astype(np.float64),
        np.array(part.bias.astype(mx.float32)).astype(np.float64),
    )
    r2 = np.zeros(len(used))
    for group, heads in _systems(part.heads, len(used)).items():
        w = np.concatenate([used[head] for head in heads], axis=1)
        intercept = bias[heads].reshape(-1)
        where = (kind, part.sources, group, [target_layer], heads)
        error, total = residuals(heldout, *where, w, intercept)
        r2[heads] = r_squared_by_head(error, total, len(heads))
    return r2


def _arrays(weight: Weight) -> list[mx.array]:
    if isinstance(weight, mx.array):
        return [weight]
    return [weight.packed, weight.scales, weight.biases]


def _describe(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    scores: LayerScores,
    layers: Sequence[LayerMap],
) -> dict[str, Any]:
    """What the artifact records about the fit, JSON-ready."""
    out: dict[str, Any] = {
        "method": "ridge",
        "lambda": config.ridge_lambda,
        "lambda_convention": config.lambda_convention,
        "plan": config.head_mapping,
        "k": config.k,
        "k_values": config.k_of_values,
        "layers": config.source_layers,
        "selection": scores.rule,
        "selection_by": "same head" if scores.head_matched else "all heads of a layer",
        "rows": round(fit.count("keys")),
        "heldout_rows": 0 if heldout is None else round(heldout.count("keys")),
        "weights": config.weight_format,
        "content_space": config.content_space,
    }
    if config.groups is not None:
        out["groups"] = [list(g) for g in config.groups]
    return out | mean_scores(layers)
