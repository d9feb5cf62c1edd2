"""From moments to a mapper: head plans, one system per set of features, scores."""

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
from kvgraft.fit.layer_ranking import LayerScores, choose_layers, score_layers
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.moments import Moments
from kvgraft.fit.ridge import Residuals, r_squared_by_head, residuals, solve_ridge
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import ModelGeometry
from kvgraft.ops.quantized import Weight, dequantize, quantize
from kvgraft.option_names import named
from kvgraft.progress import Progress

__all__ = [
    "best_lambda",
    "even_groups",
    "head_plan",
    "heldout_scores",
    "mean_scores",
    "solve_layer",
    "solve_mapper",
    "storage_problem",
    "store_weight",
]

Float64 = NDArray[np.float64]
Plan = tuple[tuple[int, ...], ...]

_EXPONENTS = (-9, 1)
"""Least and greatest share of the mean diagonal, as powers of ten, that λ is sought in."""

_FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def even_groups(n_source: int, n_target: int) -> Plan:
    """Source heads split over the target heads, in order and evenly.

    Every target head gets as many as every other, which a map needs. Where the
    counts do not divide, neighbouring groups share heads.
    """
    size = -(-n_source // n_target)
    starts = [min(h * n_source // n_target, n_source - size) for h in range(n_target)]
    return tuple(tuple(range(s, s + size)) for s in starts)


def head_plan(
    source: ModelGeometry,
    target: ModelGeometry,
    target_layer: int,
    sources: Sequence[int],
    plan: str,
    groups: Plan | None = None,
) -> Plan | None:
    """Source heads per target head of one layer; ``None`` for the ``full`` plan.

    Raises:
        FitError: If the plan does not fit the head counts.
    """
    if plan == "full":
        return None
    n_target = target.layers[target_layer].n_kv_heads
    counts = {source.layers[s].n_kv_heads for s in sources}
    if plan == "local":
        if counts != {n_target}:
            raise FitError(
                f"{named('head_mapping', 'local')} needs equal KV head counts; target layer "
                f"{target_layer} has {n_target}, its source layers have {sorted(counts)}. Use "
                "'grouped' or 'full'."
            )
        return tuple((h,) for h in range(n_target))
    if groups is None:
        if len(counts) != 1:
            raise FitError(
                f"The source layers of target layer {target_layer} have {sorted(counts)} KV "
                f"heads; state the groups, or give {named('head_mapping', 'full')}."
            )
        return even_groups(next(iter(counts)), n_target)
    if len(groups) != n_target or any(not 0 <= g < min(counts) for one in groups for g in one):
        raise FitError(
            f"The groups {[list(g) for g in groups]} do not fit target layer {target_layer}: it "
            f"has {n_target} KV heads, its source layers have {sorted(counts)}."
        )
    return groups


def storage_problem(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> str | None:
    """Why a candidate's weights cannot be quantised as they shall be; ``None`` if they can.

    Quantisation groups inputs, so their number has to divide. It is known before a fit
    where all source layers are alike; where they differ, :func:`store_weight` tells.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        config: What is left to be chosen (``"auto"``) is no problem.

    Raises:
        FitError: If the plan does not fit the head counts.
    """
    if config.weight_format not in ("8bit", "4bit") or config.head_mapping == "auto":
        return None
    n = len(source.layers)
    parts = (("key_dim", "k"), ("value_dim", "k" if config.k_values is None else "k_values"))
    for dim, name in parts:
        widths = {
            len(heads) * getattr(source.layers[s], dim)
            for layer in range(len(target.layers))
            for s in range(n)
            for heads in head_plan(source, target, layer, [s], config.head_mapping, config.groups)
            or [range(source.layers[s].n_kv_heads)]
        }
        k = getattr(config, name)
        if len(widths) != 1 or k == "auto":
            continue
        width = widths.pop()
        inputs = width * (n if k == "all" else min(int(k), n))
        if inputs % config.group_size:
            fitting = [i for i in range(1, n + 1) if i * width % config.group_size == 0]
            return (
                f"{named('weight_format', config.weight_format)} groups {config.group_size} "
                f"inputs, and {named('head_mapping', config.head_mapping)} with {named(name, k)} "
                f"has {inputs}" + (f"; {named(name, fitting[0])} would do" if fitting else "")
            )
    return None


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
        moments: Moments of the text that is fitted on.
        heldout: Moments of held-out text, for selection and scores; without
            them the scores ``r2_keys`` and ``r2_values`` are absent.
        config: What to solve; its settings about text are not used.
        scores: Single-source scores of an earlier call with the same moments
            and selection rule, to save their computation.
        targets: Target layers to solve; all if absent.
        progress: Called with (layers done, layers in all).

    Returns:
        The mapper, without model identities.

    Raises:
        FitError: If the plan does not fit the pair, moments are missing, or a
            layer cannot be fitted.
    """
    if config.is_auto:
        raise FitError(
            "Choosing k or the plan by loss needs the models; use fit_mapper, or give both here."
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
        sources = _choose(scores, config, t)
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


def _choose(
    scores: LayerScores, config: FitConfig, target_layer: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source layers of the keys and of the values."""
    kinds = ("shared", "shared") if config.source_layers == "shared" else ("keys", "values")
    first, second = (
        choose_layers(scores.of(kind), target_layer, k)
        for kind, k in zip(kinds, (config.k, config.k_of_values), strict=True)
    )
    return first, second


def solve_layer(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    target_layer: int,
    key_sources: Sequence[int],
    value_sources: Sequence[int],
) -> LayerMap:
    """Solve the keys and values of one target layer.

    The scores of the result: ``r2_keys`` and ``r2_values`` on held-out text,
    with the weights as they are stored, averaged over heads; the same per head
    (``r2_keys.0``, …); ``r2_keys_fit`` and ``r2_values_fit`` in-sample; and the
    condition numbers ``condition_keys`` and ``condition_values``; and where λ was
    chosen, ``lambda_keys`` and ``lambda_values``, as added to the Gram matrix;
    and for quantised weights, ``r2_keys_unrounded`` and ``r2_values_unrounded``
    of the weights before.
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
        if heldout is not None and config.weight_format in ("8bit", "4bit"):
            scores[f"r2_{kind}_unrounded"] = float(
                _heldout_r2(solved.map, kind, target_layer, heldout, solved.exact).mean()
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


def _heldout_r2(
    part: LinearMap,
    kind: str,
    target_layer: int,
    heldout: MomentSet,
    exact: tuple[Float64, Float64] | None = None,
) -> Float64:
    """``[heads]`` R² of a map, or of what it was before rounding: weights and intercepts."""
    assert part.weight is not None and part.bias is not None
    used, bias = exact or (
        np.array(dequantize(part.weight).astype(mx.float32)).astype(np.float64),
        np.array(part.bias.astype(mx.float32)).astype(np.float64),
    )
    r2 = np.zeros(len(used))
    for group, heads in _systems(part.heads, len(used)).items():
        which = None if part.heads is None else heads
        w = np.concatenate([used[head] for head in heads], axis=1)
        intercept = bias[heads].reshape(-1)
        where = (kind, part.sources, group, [target_layer], which)
        error, total = residuals(heldout, *where, w, intercept)
        r2[heads] = r_squared_by_head(error, total, len(heads))
    return r2


def _systems(plan: Plan | None, n_heads: int) -> dict[tuple[int, ...] | None, list[int]]:
    """Target heads by the source heads that they see: those share a factor."""
    systems: dict[tuple[int, ...] | None, list[int]] = {}
    for head in range(n_heads):
        systems.setdefault(None if plan is None else plan[head], []).append(head)
    return systems


@dataclass(frozen=True)
class _Solved:
    map: LinearMap
    r2_fit: Float64
    condition: float
    method: str
    ridge: float
    exact: tuple[Float64, Float64]
    """Weights and intercepts before the weights were rounded."""


def best_lambda(
    fit: MomentSet,
    heldout: MomentSet,
    config: FitConfig,
    kind: str,
    target_layer: int,
    sources: Sequence[int],
) -> float:
    """The λ (on the Gram matrix) whose map explains most of held-out text.

    Tried are a share of the mean diagonal of the Gram matrix, first a millionth,
    then factors of ten up and down from the best for as long as that helps. No
    model runs: both errors come out of moments.

    Args:
        fit: Moments of the text that is fitted on.
        heldout: Moments of held-out text.
        config: Head plan.
        kind: ``"keys"`` or ``"values"``.
        target_layer: The target layer.
        sources: Its source layers.
    """
    plan = head_plan(
        fit.source, fit.target, target_layer, sources, config.head_mapping, config.groups
    )
    n_heads = fit.target.layers[target_layer].n_kv_heads
    systems = []
    for group, heads in _systems(plan, n_heads).items():
        which = None if plan is None else heads
        xx = fit.xx(kind, sources, group)
        xy = fit.xy(kind, sources, group, [target_layer], which)
        means = fit.means(kind, sources, group, [target_layer], which)
        test = Residuals(heldout, kind, sources, group, [target_layer], which)
        systems.append((xx, xy, means, test, len(heads)))
    scale = float(np.mean([np.trace(xx) / len(xx) for xx, *_ in systems]))

    def explained(exponent: int) -> float:
        r2 = 0.0
        for xx, xy, (x_mean, y_mean), test, n in systems:
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
            break  # what is below the start is below its score
    return scale * 10.0 ** max(found, key=lambda e: found[e])


def _solve_kind(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    kind: str,
    target_layer: int,
    sources: tuple[int, ...],
) -> _Solved:
    plan = head_plan(
        fit.source, fit.target, target_layer, sources, config.head_mapping, config.groups
    )
    n_heads = fit.target.layers[target_layer].n_kv_heads
    if config.ridge_lambda == "auto":
        if heldout is None:
            raise FitError(
                f"Choosing λ needs moments of held-out text; give {named('ridge_lambda')} as a "
                "number."
            )
        ridge = best_lambda(fit, heldout, config, kind, target_layer, sources)
    else:
        ridge = config.penalty(fit.count(kind))
    systems = _systems(plan, n_heads)
    weights: list[Float64 | None] = [None] * n_heads
    r2_fit = np.zeros(n_heads)
    condition, method = 0.0, "cholesky"
    for group, heads in systems.items():
        which = None if plan is None else heads
        xy = fit.xy(kind, sources, group, [target_layer], which)
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
        total = fit.yy(kind, group, [target_layer], which)
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
            which = None if plan is None else heads
            x_mean, y_mean = fit.means(kind, sources, group, [target_layer], which)
            w = np.concatenate([of[head] for head in heads], axis=1)
            bias[heads] = (y_mean - x_mean @ w).reshape(len(heads), -1)
        return bias

    # The intercept makes up for what the rounding of the weights does to the mean.
    bias = intercepts(used)
    linear = LinearMap.of(sources, stored, mx.array(bias.astype(np.float32)), plan)
    mx.eval(_leaves(stored), linear.bias)
    return _Solved(linear, r2_fit, condition, method, ridge, (dense, intercepts(dense)))


def store_weight(dense: Float64, config: FitConfig, where: str) -> Weight:
    """``[n_heads, in_dim, out_dim]`` float64 weights in the form that is kept.

    Args:
        dense: The weights.
        config: ``weights`` and ``group_size`` say how.
        where: Which map this is, for messages.

    Raises:
        FitError: If they cannot be kept like that.
    """
    weight = mx.array(dense.astype(np.float32))
    if config.weight_format in ("8bit", "4bit"):
        _check_range(dense, mx.float16, where)
        if dense.shape[1] % config.group_size:
            raise FitError(
                f"{where}: {dense.shape[1]} inputs don't divide into groups of "
                f"{config.group_size}. Give {named('weight_format', 'float16')}, or from Python a "
                "group_size of 32, 64 or 128 that does."
            )
        return quantize(
            weight.astype(mx.float16),
            bits=int(config.weight_format[0]),
            group_size=config.group_size,
        )
    dtype = _FLOATS[config.weight_format]
    _check_range(dense, dtype, where)
    return weight.astype(dtype)


def _leaves(weight: Weight) -> list[mx.array]:
    if isinstance(weight, mx.array):
        return [weight]
    return [weight.packed, weight.scales, weight.biases]


def _check_range(dense: Float64, dtype: mx.Dtype, where: str) -> None:
    largest = float(np.abs(dense).max(initial=0.0))
    limit = float(mx.finfo(dtype).max)
    if largest > limit:
        raise FitError(
            f"{where}: a weight of {largest:.3g} is beyond the range of {dtype} ({limit:.3g}). "
            f"Give {named('weight_format', 'bfloat16')} or {named('weight_format', 'float32')}, or "
            f"raise {named('ridge_lambda')}."
        )


def _describe(
    fit: MomentSet,
    heldout: MomentSet | None,
    config: FitConfig,
    scores: LayerScores,
    layers: Sequence[LayerMap],
) -> dict[str, Any]:
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


def mean_scores(layers: Sequence[LayerMap]) -> dict[str, float]:
    """R² averaged over layers: ``mean_r2_keys``, ``mean_r2_keys_fit``, …."""
    out = {}
    names = [f"r2_{kind}{end}" for kind in KINDS for end in ("", "_fit", "_unrounded")]
    for name in names:
        found = [m.scores[name] for m in layers if name in m.scores]
        if found:
            out[f"mean_{name}"] = float(np.mean(found))
    return out
