"""What one model's cache looks like, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvgraft.models.rope import RopeSpec

__all__ = ["LayerGeometry", "ModelGeometry"]


@dataclass(frozen=True)
class LayerGeometry:
    """One entry of a model's cache list.

    Attributes:
        n_kv_heads: Key/value heads.
        key_dim: head_dim of the keys.
        value_dim: head_dim of the values; may differ from ``key_dim``.
        rope: The rotation that the cached keys carry.
        window: Sliding window in tokens, or ``None`` for full attention.
    """

    n_kv_heads: int
    key_dim: int
    value_dim: int
    rope: RopeSpec
    window: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {
            "n_kv_heads": self.n_kv_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "rope": self.rope.to_dict(),
            "window": self.window,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerGeometry:
        """Inverse of :meth:`to_dict`."""
        return cls(
            n_kv_heads=int(data["n_kv_heads"]),
            key_dim=int(data["key_dim"]),
            value_dim=int(data["value_dim"]),
            rope=RopeSpec.from_dict(data["rope"]),
            window=data.get("window"),
        )


@dataclass(frozen=True)
class ModelGeometry:
    """A model's cache, layer by layer.

    Attributes:
        layers: One entry per *cache*, which is not always one per model layer.
        dtype: dtype that the model itself writes: ``"float32"``, ``"float16"``
            or ``"bfloat16"``.
        model_type: mlx-lm's name of the architecture.
    """

    layers: tuple[LayerGeometry, ...]
    dtype: str
    model_type: str = "unknown"

    @property
    def mx_dtype(self) -> mx.Dtype:
        """``dtype`` as an MLX dtype."""
        return {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description."""
        return {
            "model_type": self.model_type,
            "dtype": self.dtype,
            "layers": [layer.to_dict() for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelGeometry:
        """Inverse of :meth:`to_dict`."""
        return cls(
            layers=tuple(LayerGeometry.from_dict(item) for item in data["layers"]),
            dtype=str(data["dtype"]),
            model_type=str(data.get("model_type", "unknown")),
        )
