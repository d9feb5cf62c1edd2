"""What a mapper is: geometries, layer maps, records.

The weights of a large pair do not fit beside two models, so a mapper read from
disk reads one target layer when it is used (:meth:`MapperData.load_layer`) and can
drop it again (:meth:`LayerMap.unload`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from kvgraft.errors import ArgumentError, GeometryError, MapperNotFoundError
from kvgraft.mapper.layer_map import LayerMap, WeightStore
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.quality import Quality
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.ops.quantized import weight_shape

__all__ = ["MapperData", "SourceKV", "require_mapper"]

SourceKV = Mapping[int, tuple[mx.array, mx.array]]
"""``{layer: (keys, values)}``, keys post-RoPE."""


def require_mapper(mapper: object, hint: str = "") -> None:
    """Refuse what is not a mapper, such as the path of one.

    Raises:
        ArgumentError: With ``hint`` at the end, unless it is a path.
    """
    if isinstance(mapper, MapperData):
        return
    if isinstance(mapper, (str, os.PathLike)):
        hint = " Open it with kvgraft.load_mapper."
    raise ArgumentError(f"A Mapper is expected, not a {type(mapper).__name__}.{hint}")


@dataclass
class MapperData:
    """A fitted source-to-target mapper, without what reads, writes and applies it.

    Use :class:`kvgraft.mapper.mapper.Mapper`, which adds those; the modules that
    it is built from work on this class.

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
        quality: What was measured on held-out text.
        store: Where unloaded weights are read from; ``None`` if in memory only.
    """

    source: ModelGeometry
    target: ModelGeometry
    layers: list[LayerMap]
    content_space: bool = True
    source_model: ModelIdentity | None = None
    target_model: ModelIdentity | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    quality: Quality = field(default_factory=Quality)
    store: WeightStore | None = field(default=None, repr=False, compare=False)

    @property
    def n_parameters(self) -> int:
        """Weights and biases of all layers."""
        return sum(m.keys.n_parameters + m.values.n_parameters for m in self.layers)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """Source layers that any target layer reads, ascending."""
        return tuple(sorted(set[int]().union(*(m.sources for m in self.layers))))

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
        self.read_layer(target_layer, keep=True)
        return self.layer(target_layer)

    def read_layer(self, target_layer: int, *, keep: bool = False) -> LayerMap:
        """A copy of one layer with its weights, which no other thread can unload.

        Args:
            target_layer: Index in the target's cache list.
            keep: Leave weights that had to be read in the mapper, too; else
                they are gone when the copy is.

        Raises:
            GeometryError: If the mapper does not produce that layer.
            MapperNotFoundError: If the weights are neither in memory nor in a
                file.
        """
        shared = self.layer(target_layer)
        m = shared.copy()
        if not m.is_loaded:
            if self.store is None:
                raise MapperNotFoundError(
                    f"The weights of target layer {target_layer} were unloaded and this mapper "
                    "has no file to read them from. Save it before unloading."
                )
            self.store.fill(m)
            if keep:
                shared.keys.weight, shared.keys.bias = m.keys.weight, m.keys.bias
                shared.values.weight, shared.values.bias = m.values.weight, m.values.bias
        return m

    def unload_all(self) -> None:
        """Drop the weights of every layer."""
        for m in self.layers:
            m.unload()

    def check(self) -> None:
        """Raise :class:`GeometryError` unless layers, shapes and geometries agree."""
        if not self.layers:
            raise GeometryError("This mapper produces no layers.")
        seen: set[int] = set()
        for m in self.layers:
            if not 0 <= m.target_layer < len(self.target.layers):
                raise GeometryError(
                    f"The mapper produces target layer {m.target_layer}, but the target has "
                    f"{len(self.target.layers)}."
                )
            if m.target_layer in seen:
                raise GeometryError(f"The mapper produces target layer {m.target_layer} twice.")
            seen.add(m.target_layer)
            geometry = self.target.layers[m.target_layer]
            _check_map(f"Target layer {m.target_layer}, keys", m.keys, self.source, geometry, True)
            _check_map(
                f"Target layer {m.target_layer}, values", m.values, self.source, geometry, False
            )


def _check_map(
    what: str, m: LinearMap, source: ModelGeometry, target: LayerGeometry, keys: bool
) -> None:
    out_dim = target.key_dim if keys else target.value_dim
    if not m.sources:
        raise GeometryError(f"{what}: no source layers.")
    wrong = [s for s in m.sources if not 0 <= s < len(source.layers)]
    if wrong:
        raise GeometryError(
            f"{what}: source layers {wrong} are not among the source's {len(source.layers)}."
        )
    layers = [source.layers[s] for s in m.sources]
    dims = [layer.key_dim if keys else layer.value_dim for layer in layers]
    if m.heads is None:
        widths = {sum(layer.n_kv_heads * d for layer, d in zip(layers, dims))}
    else:
        if len(m.heads) != target.n_kv_heads:
            raise GeometryError(
                f"{what}: the head mapping lists {len(m.heads)} heads, the target has "
                f"{target.n_kv_heads}."
            )
        fewest = min(layer.n_kv_heads for layer in layers)
        if any(not 0 <= g < fewest for group in m.heads for g in group):
            raise GeometryError(
                f"{what}: the head mapping {list(map(list, m.heads))} names a source head outside "
                f"0..{fewest - 1}."
            )
        widths = {len(group) * sum(dims) for group in m.heads}
    if len(widths) != 1:
        raise GeometryError(f"{what}: the head mapping gives target heads different widths.")
    want = (target.n_kv_heads, widths.pop(), out_dim)
    if m.shape != want:
        raise GeometryError(
            f"{what}: the weights are {m.shape}, the geometries and head mapping ask for {want}."
        )
    if m.weight is not None and weight_shape(m.weight) != want:
        raise GeometryError(f"{what}: weights of {weight_shape(m.weight)} where {want} are due.")
    if m.bias is not None and tuple(m.bias.shape) != (want[0], want[2]):
        raise GeometryError(
            f"{what}: biases of {tuple(m.bias.shape)} where {(want[0], want[2])} are due."
        )
