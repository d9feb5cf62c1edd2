"""Which source layers feed which target layer.

A score is the share of a target layer's variance that one source layer alone
explains. The paper (section 2.3) scores head by head, each target head from the
source head of the same index, averages over heads and over RoPE-stripped keys
and values, and takes the k best per target layer (section 3.2).

By default the regression is scored on held-out text. In-sample scores reward
overfitting: on pure noise they grow with the width of the features, and held-out
scores do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.features import KINDS
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.ridge import r_squared_by_head, residuals, solve_ridge
from kvgraft.models.geometry import ModelGeometry

__all__ = ["LayerScores", "allowed_sources", "choose_layers", "score_layers"]

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class LayerScores:
    """Single-source scores of a pair.

    Attributes:
        keys: ``[target layers, source layers]`` R² of the keys, averaged over
            heads; NaN where a source layer may not feed a target layer.
        values: The same for values.
        rule: ``"heldout"`` or ``"paper"``.
        head_matched: Each target head was explained by the source head of the
            same index; else by all heads of the source layer.
    """

    keys: Float64
    values: Float64
    rule: str
    head_matched: bool

    def of(self, kind: str) -> Float64:
        """The scores by which source layers are ranked.

        Args:
            kind: ``"keys"``, ``"values"``, or ``"shared"`` for the mean of both.
        """
        if kind == "shared":
            return (self.keys + self.values) / 2
        return self.keys if kind == "keys" else self.values


def allowed_sources(source: ModelGeometry, target: ModelGeometry, layer: int) -> list[int]:
    """Source layers that hold every token that a target layer attends to.

    A sliding-window source layer has only the last tokens of a long text, so it
    can feed only target layers whose window is no longer than its own.

    Raises:
        FitError: If there is none.
    """
    needed = target.layers[layer].window
    found = [
        i
        for i, candidate in enumerate(source.layers)
        if candidate.window is None or (needed is not None and needed <= candidate.window)
    ]
    if not found:
        span = "the whole text" if needed is None else f"the last {needed} tokens"
        raise FitError(
            f"Target layer {layer} attends to {span}, and every source layer keeps only a "
            f"window of at most {max(c.window or 0 for c in source.layers)} tokens. This pair "
            "cannot be mapped in this direction."
        )
    return found


def score_layers(
    fit: MomentSet,
    heldout: MomentSet | None,
    *,
    rule: str = "heldout",
    ridge: float = 0.0,
    targets: Sequence[int] | None = None,
) -> LayerScores:
    """Score every source layer for every target layer, keys and values.

    Args:
        fit: Moments of the text that is fitted on.
        heldout: Moments of held-out text; needed by the ``"heldout"`` rule.
        rule: ``"heldout"``: R² on held-out text of a ridge fit; works for any
            pair (all heads of a source layer where head counts differ).
            ``"paper"``: in-sample R² of ordinary least squares, head by head;
            falls back to ``"heldout"`` when heads or head_dims differ, as the
            paper covers only pairs in which they agree.
        ridge: λ of the ``"heldout"`` rule, added to the fit's Gram matrix.
        targets: Target layers to score; all if absent.

    Raises:
        FitError: If moments are missing.
    """
    source, target = fit.source, fit.target
    if rule not in ("heldout", "paper"):
        raise FitError(f"Unknown layer ranking {rule!r}; use 'heldout' or 'paper'.")
    if rule == "paper" and not _is_matched(source, target):
        rule = "heldout"
    if rule == "heldout" and heldout is None:
        raise FitError("The layer ranking 'heldout' needs moments of held-out text.")
    counts = {layer.n_kv_heads for layer in (*source.layers, *target.layers)}
    matched = len(counts) == 1
    chosen = list(range(len(target.layers)) if targets is None else targets)
    # NaN is "not allowed", so that it can never be chosen.
    scores = {kind: np.full((len(target.layers), len(source.layers)), np.nan) for kind in KINDS}
    allowed = {t: allowed_sources(source, target, t) for t in chosen}
    test = fit if rule == "paper" or heldout is None else heldout
    penalty = 0.0 if rule == "paper" else ridge
    groups: list[tuple[int, ...] | None] = (
        [(h,) for h in range(counts.pop())] if matched else [None]
    )
    for kind in KINDS:
        for layer in range(len(source.layers)):
            wanted = [t for t in chosen if layer in allowed[t]]
            if not wanted:
                continue
            by_head: list[Float64] = []
            for group in groups:
                by_head.append(_explained(fit, test, kind, layer, group, wanted, penalty))
            # [groups, targets]: a group is one head, or the mean over all heads.
            scores[kind][wanted, layer] = np.mean(by_head, axis=0)
    return LayerScores(scores["keys"], scores["values"], rule, matched)


def choose_layers(scores: Float64, target_layer: int, k: int | str) -> tuple[int, ...]:
    """The best ``k`` source layers of a target layer, ascending.

    Of equal scores the lower layer wins. Fewer than ``k`` are returned when no
    more are allowed.

    Raises:
        FitError: If no source layer has a finite score.
    """
    row = scores[target_layer]
    usable = [int(i) for i in np.flatnonzero(np.isfinite(row))]
    if not usable:
        raise FitError(
            f"No source layer has a usable score for target layer {target_layer}: its keys or "
            "values may be constant over the calibration text."
        )
    n = len(usable) if k == "all" else min(int(k), len(usable))
    best = sorted(usable, key=lambda i: (-row[i], i))[:n]
    return tuple(sorted(best))


def _is_matched(source: ModelGeometry, target: ModelGeometry) -> bool:
    """Whether the paper's head-to-head regression exists for a pair."""
    shapes = {
        (layer.n_kv_heads, layer.key_dim, layer.value_dim)
        for layer in (*source.layers, *target.layers)
    }
    return len(shapes) == 1


def _explained(
    fit: MomentSet,
    test: MomentSet,
    kind: str,
    layer: int,
    heads: tuple[int, ...] | None,
    targets: list[int],
    ridge: float,
) -> Float64:
    """``[targets]`` R² of one source layer, averaged over the target heads."""
    where = (kind, (layer,), heads, targets, heads)
    xy = fit.xy(*where)
    weights, _ = solve_ridge(fit.xx(kind, (layer,), heads), xy, ridge)
    if test is fit:
        # With (X'X + λI) W = X'Y the squared error needs no product with X'X.
        total = fit.yy(kind, heads, targets, heads)
        error = total - np.einsum("ij,ij->j", weights, xy) - ridge * (weights**2).sum(axis=0)
        error = np.maximum(error, 0.0)
    else:
        x_mean, y_mean = fit.means(*where)
        error, total = residuals(test, *where, weights, y_mean - x_mean @ weights)
    out = []
    at = 0
    for t in targets:
        geometry = fit.target.layers[t]
        n_heads = geometry.n_kv_heads if heads is None else len(heads)
        end = at + n_heads * (geometry.key_dim if kind == "keys" else geometry.value_dim)
        out.append(float(np.mean(r_squared_by_head(error[at:end], total[at:end], n_heads))))
        at = end
    return np.array(out)
