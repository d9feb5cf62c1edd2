"""A fitted mapper: which source layers feed each target layer, and the weights.

The weights of a large pair do not fit beside two models, so a mapper read from
disk reads one target layer when it is used (:meth:`Mapper.load_layer`) and can
drop it again (:meth:`LayerMap.unload`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from kvgraft.errors import GeometryError, MapperNotFoundError
from kvgraft.geometry import ModelGeometry
from kvgraft.models import ModelIdentity
from kvgraft.weights import Weight, dequantize, weight_shape

__all__ = ["CrossModelMapper", "KVMapper", "LayerMap", "LinearMap", "Mapper", "WeightStore"]


@dataclass
class LinearMap:
    """One affine map: the keys, or the values, of one target layer.

    Attributes:
        sources: Source layers, in the order of the weights' input axis.
        heads: Source heads per target head; ``None`` is the ``full`` plan.
        shape: ``(n_kv_heads, in_dim, head_dim)`` of the weights.
        weight: The weights, or ``None`` while unloaded.
        bias: ``[n_kv_heads, head_dim]``, or ``None`` while unloaded.
    """

    sources: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] | None
    shape: tuple[int, int, int]
    weight: Weight | None = None
    bias: mx.array | None = None

    @classmethod
    def of(
        cls,
        sources: Sequence[int],
        weight: Weight,
        bias: mx.array,
        heads: Sequence[Sequence[int]] | None = None,
    ) -> LinearMap:
        """A loaded map; its shape is read off the weights."""
        plan = None if heads is None else tuple(tuple(int(g) for g in group) for group in heads)
        return cls(tuple(int(s) for s in sources), plan, weight_shape(weight), weight, bias)

    @property
    def n_parameters(self) -> int:
        """Weights and biases, from the shape alone."""
        heads, in_dim, out_dim = self.shape
        return heads * (in_dim + 1) * out_dim


@dataclass
class LayerMap:
    """Everything that produces one target layer.

    Attributes:
        target_layer: Index in the target's cache list.
        keys: The map of RoPE-stripped keys.
        values: The map of values.
        scores: What the fit measured for this layer, by name (``r2_keys``,
            ``r2_values``, …).
    """

    target_layer: int
    keys: LinearMap
    values: LinearMap
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self.keys.weight is not None and self.values.weight is not None

    def unload(self) -> None:
        """Drop the weights; what describes them stays."""
        self.keys.weight = self.keys.bias = None
        self.values.weight = self.values.bias = None

    # The names that VeloxQuant-MLX gives to the same things.

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


class WeightStore(Protocol):
    """Where a mapper's weights come from when they are not in memory."""

    def fill(self, layer: LayerMap) -> None:
        """Read the weights of one layer into ``layer``."""


@dataclass
class Mapper:
    """A fitted source-to-target mapper.

    Attributes:
        source: Geometry of the source's cache.
        target: Geometry of the target's cache.
        layers: One map per target layer that the mapper produces.
        content_space: Keys are mapped with RoPE taken off (section 3.3 of the
            paper). ``False`` only in artifacts that were fitted on rotated keys.
        source_model: Identity of the source; ``None`` if unknown.
        target_model: Identity of the target; ``None`` if unknown.
        fit: How it was fitted: ``lambda``, ``lambda_convention``, ``rows``,
            ``selection``, ``plan``, ``k``, ``text`` (digest, token counts), …
        quality: What was measured on held-out text; empty if nothing was.
        store: Where unloaded weights are read from; ``None`` if in memory only.
    """

    source: ModelGeometry
    target: ModelGeometry
    layers: list[LayerMap]
    content_space: bool = True
    source_model: ModelIdentity | None = None
    target_model: ModelIdentity | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    store: WeightStore | None = field(default=None, repr=False, compare=False)

    @property
    def n_parameters(self) -> int:
        """Weights and biases of all layers."""
        return sum(m.keys.n_parameters + m.values.n_parameters for m in self.layers)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """Source layers that any target layer reads, ascending."""
        return tuple(sorted({s for m in self.layers for s in (*m.keys.sources, *m.values.sources)}))

    def describe(self) -> str:
        """One line: the pair, the size, how it was fitted."""
        names = [
            (identity.name if identity else geometry.model_type) or "unknown"
            for identity, geometry in (
                (self.source_model, self.source),
                (self.target_model, self.target),
            )
        ]
        return (
            f"{names[0]} ({len(self.source.layers)} layers) -> {names[1]} "
            f"({len(self.target.layers)} layers), {self.n_parameters / 1e6:.1f} M parameters"
        )

    def layer(self, target_layer: int) -> LayerMap:
        """The map of one target layer, found by its index in the target.

        Raises:
            GeometryError: If the mapper does not produce that layer.
        """
        for m in self.layers:
            if m.target_layer == target_layer:
                return m
        raise GeometryError(
            f"This mapper produces target layers {[m.target_layer for m in self.layers]}, "
            f"not {target_layer}."
        )

    def load_layer(self, target_layer: int) -> LayerMap:
        """Like :meth:`layer`, with its weights read if they are not in memory."""
        m = self.layer(target_layer)
        if not m.is_loaded:
            if self.store is None:
                raise MapperNotFoundError(
                    f"The weights of target layer {target_layer} were unloaded and this mapper "
                    "has no file to read them from. Save it before unloading."
                )
            self.store.fill(m)
        return m

    def unload_all(self) -> None:
        """Drop the weights of every layer."""
        for m in self.layers:
            m.unload()

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the artifact folder; see :func:`kvgraft.artifact.save`."""
        from kvgraft import artifact

        return artifact.save(self, path, **options)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Mapper:
        """Open an artifact; see :func:`kvgraft.artifact.load`."""
        from kvgraft import artifact

        return artifact.load(path)

    def apply(
        self, src_pairs: Sequence[tuple[mx.array, mx.array]], offset: int = 0
    ) -> list[tuple[mx.array, mx.array]]:
        """Map a whole cache given as one pair per source layer.

        Args:
            src_pairs: ``[(keys, values)]``, one per source layer in order, each
                ``[H, N, D]`` or ``[B, H, N, D]``, keys post-RoPE.
            offset: Position of the first token; the rest follow on.

        Returns:
            ``[(keys, values)]``, one per target layer, keys post-RoPE at the
            same positions.
        """
        from kvgraft import transfer

        return transfer.apply(self, src_pairs, offset)


CrossModelMapper = Mapper
"""The name under which VeloxQuant-MLX has it."""

KVMapper = Mapper
"""The name under which the molt mappers have it."""

SourceKV = Mapping[int, tuple[mx.array, mx.array]]
"""``{layer: (keys, values)}``, keys post-RoPE."""
