"""The solver of one ridge system."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import FitError
from kvgraft.fit.ridge import solve_ridge


@pytest.mark.parametrize("n, m", [(1, 1), (40, 7)])
def test_solver_reports_how(n, m):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3 * n, n)) * 10.0 ** rng.uniform(-6, 6, n)
    y = rng.standard_normal((3 * n, m))
    w, report = solve_ridge(x.T @ x, x.T @ y, 0.0)
    want = np.linalg.lstsq(x / np.abs(x).max(axis=0), y, rcond=None)[0]
    size = np.abs(x).max(axis=0)[:, None]
    assert np.abs(w * size - want).max() < 1e-9 * np.abs(want).max()
    # The sizes span twelve orders of magnitude; equilibrated they do not matter.
    assert report.method == "cholesky" and report.condition < 1e4
    indefinite = -np.eye(n) * 1.0
    indefinite[np.diag_indices(n)] = np.where(np.arange(n) % 2, 1.0, 1.0)
    if n > 1:
        indefinite[0, 1] = indefinite[1, 0] = 1.5
        solved, report = solve_ridge(indefinite, np.ones((n, m)), 0.0)
        assert report.method == "eigen" and np.isfinite(solved).all()
    with pytest.raises(FitError, match="NaN or infinity"):
        solve_ridge(np.full((n, n), np.nan), np.ones((n, m)), 0.0)
