"""The numerics: ridge systems out of moments, and what they leave unexplained.

Equation 4 of the paper (Heo et al., arXiv:2608.03893)::

    W = (X'X + λ I)^-1 X'Y        b = mean(Y) - mean(X) W

with X and Y centred, so that the intercept is not penalised. Under the λ
convention ``"gram"``, X'X is taken as it stands (the paper's; λ = 0.01); under
``"covariance"`` it is divided by the number of rows first, as in the molt
mappers. The two differ by a factor of the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from kvgraft.errors import FitError
from kvgraft.fit.moment_set import MomentSet

__all__ = [
    "Residuals",
    "SolveReport",
    "r_squared_by_head",
    "residuals",
    "solve_ridge",
]

Float64 = NDArray[np.float64]

# Moments are right to about 1e-9 of their size (float32 products, averaged), so
# nothing is lost by a jitter of that order, and nothing in a smaller eigenvalue.
_JITTERS = (0.0, 1e-11, 1e-9, 1e-7)
_RCOND = 1e-9

_LARGE = 1e300
"""In place of infinity, which JSON does not have."""


@dataclass(frozen=True)
class SolveReport:
    """How a system was solved.

    Attributes:
        condition: Condition number (1-norm estimate) of the equilibrated matrix
            with λ in it: about how much rounding in the moments is magnified.
        method: ``"cholesky"``, ``"cholesky+jitter"`` or ``"eigen"``.
    """

    condition: float
    method: str


def solve_ridge(xx: Float64, xy: Float64, ridge: float) -> tuple[Float64, SolveReport]:
    """Solve ``(xx + ridge I) W = xy`` in float64.

    The matrix is scaled to a unit diagonal first, which changes nothing in exact
    arithmetic and saves digits when features differ in size. If Cholesky still
    fails, a trace of the diagonal is added; if that does not help either, the
    directions that carry no information are left out (an eigendecomposition).
    Features that never vary get weight 0.

    Args:
        xx: ``[n, n]`` symmetric; overwritten.
        xy: ``[n, m]``.
        ridge: What is added to the diagonal.

    Returns:
        ``[n, m]`` weights and how they came about.

    Raises:
        FitError: If the moments hold NaN or infinity.
    """
    n = len(xx)
    diagonal = np.diag(xx).copy() + ridge
    if not (np.isfinite(diagonal).all() and np.isfinite(xy).all()):
        raise FitError("The moments hold NaN or infinity; they cannot be solved.")
    live = diagonal > 0
    scale = np.where(live, 1.0 / np.sqrt(np.where(live, diagonal, 1.0)), 0.0)
    # In place: at k = 8 and 1,024 features a layer this matrix is 0.5 GB.
    a = xx
    a[np.diag_indices(n)] += ridge
    a *= scale[:, None]
    a *= scale[None, :]
    right = xy * scale[:, None]
    # In strips: the absolute values of all of it would be a second matrix.
    norm = max(float(np.abs(a[i : i + 256]).sum(axis=1).max()) for i in range(0, n, 256))
    # LAPACK works in the lower triangle of the column-major view and leaves the
    # upper one alone, from which the matrix is restored for another attempt.
    lapack = a.T
    for attempt, jitter in enumerate(_JITTERS):
        if attempt:
            _restore(lapack)
        # Exactly 1, also for features that never vary: those have nothing off
        # the diagonal and nothing on the right, so their weight comes out 0.
        lapack[np.diag_indices(n)] = 1.0 + jitter
        try:
            factor, lower = scipy.linalg.cho_factor(
                lapack, lower=True, overwrite_a=True, check_finite=False
            )
        except scipy.linalg.LinAlgError:
            continue
        condition = _condition(factor, norm)
        if condition * np.finfo(np.float64).eps > 1e-2:
            continue  # the factor exists, but no digit of the solution is certain
        weights = scipy.linalg.cho_solve((factor, lower), right, check_finite=False)
        method = "cholesky" if jitter == 0.0 else "cholesky+jitter"
        return weights * scale[:, None], SolveReport(condition, method)
    _restore(lapack)
    lapack[np.diag_indices(n)] = 1.0
    values, vectors = scipy.linalg.eigh(lapack, check_finite=False)
    keep = values > _RCOND * max(float(values[-1]), 0.0)
    vectors = vectors[:, keep]
    weights = vectors @ ((vectors.T @ right) / values[keep][:, None])
    smallest = float(values[0])
    condition = float(values[-1]) / smallest if smallest > 0 else _LARGE
    return weights * scale[:, None], SolveReport(min(condition, _LARGE), "eigen")


def _restore(matrix: Float64) -> None:
    """Copy the upper triangle of a symmetric matrix over the lower one."""
    for j in range(len(matrix) - 1):
        matrix[j + 1 :, j] = matrix[j, j + 1 :]


def _condition(factor: Float64, norm: float) -> float:
    (pocon,) = scipy.linalg.get_lapack_funcs(("pocon",), (factor,))
    rcond, info = pocon(factor, norm, uplo="L")
    return float(1.0 / rcond) if info == 0 and rcond > 1.0 / _LARGE else _LARGE


def residuals(
    moments: MomentSet,
    kind: str,
    sources: Sequence[int],
    heads: Sequence[int] | None,
    targets: Sequence[int],
    target_heads: Sequence[int] | None,
    weights: Float64,
    intercept: Float64,
) -> tuple[Float64, Float64]:
    """Squared error and variance of each target feature over the rows of ``moments``.

    Args:
        moments: Moments of the rows to score on.
        kind: ``"keys"`` or ``"values"``.
        sources: Source layers of the features.
        heads: Source heads of the features; ``None`` for all.
        targets: Target layers.
        target_heads: Their heads; ``None`` for all.
        weights: ``[n, m]``, the columns running over ``targets``.
        intercept: ``[m]``. An error of the mean counts like any other.

    Returns:
        ``[m]`` sums of squared errors, ``[m]`` sums of squares about the mean.
    """
    scale = Residuals(moments, kind, sources, heads, targets, target_heads)
    return scale(weights, intercept), scale.total


class Residuals:
    """:func:`residuals` of several solutions of one system.

    Arguments are those of :func:`residuals`.

    Attributes:
        total: ``[m]`` sums of squares about the mean.
    """

    def __init__(
        self,
        moments: MomentSet,
        kind: str,
        sources: Sequence[int],
        heads: Sequence[int] | None,
        targets: Sequence[int],
        target_heads: Sequence[int] | None,
    ) -> None:
        self._xx = moments.xx(kind, sources, heads)
        self._xy = moments.xy(kind, sources, heads, targets, target_heads)
        self._count = moments.count(kind)
        self._means = moments.means(kind, sources, heads, targets, target_heads)
        self.total = moments.yy(kind, heads, targets, target_heads)

    def __call__(self, weights: Float64, intercept: Float64) -> Float64:
        """``[m]`` sums of squared errors."""
        x_mean, y_mean = self._means
        error = self.total - 2 * np.einsum("ij,ij->j", weights, self._xy)
        error += np.einsum("ij,ij->j", weights, self._xx @ weights)
        error += self._count * (y_mean - x_mean @ weights - intercept) ** 2
        return np.asarray(np.maximum(error, 0.0))


def r_squared_by_head(error: Float64, total: Float64, n_heads: int) -> Float64:
    """``[heads]`` R² from the sums of squares of each dimension.

    A head that does not vary has nothing to explain: 1 if it is met, else 0.
    """
    e, t = error.reshape(n_heads, -1).sum(axis=1), total.reshape(n_heads, -1).sum(axis=1)
    flat = t <= 0
    met = np.where(e <= 0, 1.0, 0.0)
    return np.where(flat, met, 1.0 - e / np.where(flat, 1.0, t))
