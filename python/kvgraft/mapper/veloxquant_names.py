"""VeloxQuant-MLX's names of what a layer map holds.

They are a mixin at the bottom of this folder, not part of :mod:`kvgraft.compat`:
VeloxQuant's names are properties of the layer objects themselves, and a module at the
top of the package cannot add any to a class at its bottom.
"""

from __future__ import annotations

import mlx.core as mx

from kvgraft.mapper.linear_map import LinearMap
from kvgraft.ops.quantized import dequantize

__all__ = ["VeloxQuantNames"]


class VeloxQuantNames:
    """Read-only aliases; the class that inherits them has the maps and the scores."""

    keys: LinearMap
    values: LinearMap
    scores: dict[str, float]

    @property
    def source_layers(self) -> list[int]:
        """Source layers of the keys, in the order of the weights' input axis."""
        return list(self.keys.sources)

    @property
    def w_k(self) -> mx.array | None:
        """Key weights ``[n_kv_heads, in_dim, head_dim]``, or ``None``."""
        return None if self.keys.weight is None else dequantize(self.keys.weight)

    @property
    def b_k(self) -> mx.array | None:
        """Key biases ``[n_kv_heads, head_dim]``, or ``None``."""
        return self.keys.bias

    @property
    def w_v(self) -> mx.array | None:
        """Value weights ``[n_kv_heads, in_dim, head_dim]``, or ``None``."""
        return None if self.values.weight is None else dequantize(self.values.weight)

    @property
    def b_v(self) -> mx.array | None:
        """Value biases ``[n_kv_heads, head_dim]``, or ``None``."""
        return self.values.bias

    @property
    def r2_k(self) -> float:
        """R² of the keys as the fit measured it; NaN if it did not."""
        return self.scores.get("r2_keys", float("nan"))

    @property
    def r2_v(self) -> float:
        """R² of the values as the fit measured it; NaN if it did not."""
        return self.scores.get("r2_values", float("nan"))
