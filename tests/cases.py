"""The list of map_layer problems that every implementation has to solve.

It lies in the package, since ``python -m kvgraft.selftest`` runs it too.
"""

from kvgraft._cases import (
    BF16,
    CASES,
    F16,
    F32,
    GEOMETRIES,
    HALF,
    LAYOUTS,
    NMSE_LIMIT,
    ROPES,
    TOKENS,
    Case,
    Problem,
    build,
    head_plan,
    lay_out,
)

__all__ = [
    "BF16",
    "CASES",
    "F16",
    "F32",
    "GEOMETRIES",
    "HALF",
    "LAYOUTS",
    "NMSE_LIMIT",
    "ROPES",
    "TOKENS",
    "Case",
    "Problem",
    "build",
    "head_plan",
    "lay_out",
]
