"""A fitted mapper: which source layers feed each target layer, and the weights.

The weights of a large pair do not fit beside two models, so a mapper read from
disk reads one target layer when it is used (:meth:`Mapper.load_layer`) and can
drop it again (:meth:`LayerMap.unload`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from kvgraft.errors import ArgumentError, GeometryError, MapperNotFoundError
from kvgraft.mapper.quality import Quality
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.ops.quantized import AffineWeight, Weight, dequantize, weight_shape

__all__ = [
    "CrossModelMapper",
    "KVMapper",
    "LayerMap",
    "LinearMap",
    "Mapper",
    "Storage",
    "WeightStore",
    "require_mapper",
]


@dataclass(frozen=True)
class Storage:
    """How the weights of one map are kept.

    Attributes:
        dtype: dtype of the weights, or of the scales of quantised ones:
            ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        bits: 4 or 8 for quantised weights, else ``None``.
        group_size: Group size of quantised weights, else ``None``.
        bias_dtype: dtype of the biases.
    """

    dtype: str
    bits: int | None = None
    group_size: int | None = None
    bias_dtype: str = "float32"

    @classmethod
    def of(cls, weight: Weight, bias: mx.array) -> Storage:
        """What arrays in memory are."""
        if isinstance(weight, AffineWeight):
            return cls(
                _dtype_name(weight.scales), weight.bits, weight.group_size, _dtype_name(bias)
            )
        return cls(_dtype_name(weight), None, None, _dtype_name(bias))

    def nbytes(self, shape: tuple[int, int, int]) -> int:
        """Bytes of the weights and biases of a map of ``shape``."""
        heads, in_dim, out_dim = shape
        item = 4 if self.dtype == "float32" else 2
        weights = heads * in_dim * out_dim
        if self.bits is not None and self.group_size is not None:
            size = weights * self.bits // 8 + 2 * item * (weights // self.group_size)
        else:
            size = weights * item
        return size + heads * out_dim * (4 if self.bias_dtype == "float32" else 2)


def _dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


@dataclass
class LinearMap:
    """One affine map: the keys, or the values, of one target layer.

    Attributes:
        sources: Source layers, in the order of the weights' input axis.
        heads: Source heads per target head; ``None`` is the ``full`` plan.
        shape: ``(n_kv_heads, in_dim, head_dim)`` of the weights.
        weight: The weights, or ``None`` while unloaded.
        bias: ``[n_kv_heads, head_dim]``, or ``None`` while unloaded.
        on_disk: How the file holds the weights; ``None`` if there is no file.
    """

    sources: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] | None
    shape: tuple[int, int, int]
    weight: Weight | None = None
    bias: mx.array | None = None
    on_disk: Storage | None = field(default=None, repr=False, compare=False)

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

    @property
    def storage(self) -> Storage:
        """How the weights are kept: in memory if they are there, else on disk.

        Raises:
            MapperNotFoundError: If they are neither in memory nor on disk.
        """
        if self.weight is not None and self.bias is not None:
            return Storage.of(self.weight, self.bias)
        if self.on_disk is None:
            raise MapperNotFoundError("This map has no weights, neither in memory nor on disk.")
        return self.on_disk


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
        parts = (self.keys.weight, self.keys.bias, self.values.weight, self.values.bias)
        return all(part is not None for part in parts)

    def unload(self) -> None:
        """Drop the weights; what describes them stays."""
        self.keys.weight = self.keys.bias = None
        self.values.weight = self.values.bias = None

    def copy(self) -> LayerMap:
        """The same layer, sharing the arrays; unloading one leaves the other."""
        return replace(
            self,
            keys=replace(self.keys),
            values=replace(self.values),
            scores=dict(self.scores),
        )

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
        """Read the weights of one layer into ``layer``, evaluated.

        Must be safe to call from several threads.
        """

    def read_ahead(self, layer: LayerMap) -> None:
        """Start to bring the weights of ``layer`` near, since it is filled next.

        Returns at once and takes no memory of the process; may do nothing.
        """


def require_mapper(mapper: object, hint: str = "") -> None:
    """Refuse what is not a mapper, such as the path of one.

    Raises:
        ArgumentError: With ``hint`` at the end, unless it is a path.
    """
    if isinstance(mapper, Mapper):
        return
    if isinstance(mapper, (str, os.PathLike)):
        hint = " Open it with kvgraft.load_mapper."
    raise ArgumentError(f"A Mapper is expected, not a {type(mapper).__name__}.{hint}")


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

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the artifact; see :func:`kvgraft.mapper.artifact.save`."""
        from kvgraft.mapper import artifact

        return artifact.save(self, path, **options)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Mapper:
        """Open an artifact; see :func:`kvgraft.mapper.artifact.load`."""
        from kvgraft.mapper import artifact

        return artifact.load(path, **options)

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
        from kvgraft.mapper import transfer

        return transfer.apply(self, src_pairs, offset)


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
                f"{what}: the head plan lists {len(m.heads)} heads, the target has "
                f"{target.n_kv_heads}."
            )
        fewest = min(layer.n_kv_heads for layer in layers)
        if any(not 0 <= g < fewest for group in m.heads for g in group):
            raise GeometryError(
                f"{what}: the head plan {list(map(list, m.heads))} names a source head outside "
                f"0..{fewest - 1}."
            )
        widths = {len(group) * sum(dims) for group in m.heads}
    if len(widths) != 1:
        raise GeometryError(f"{what}: the head plan gives target heads different widths.")
    want = (target.n_kv_heads, widths.pop(), out_dim)
    if m.shape != want:
        raise GeometryError(
            f"{what}: the weights are {m.shape}, the geometries and the head plan ask for {want}."
        )
    if m.weight is not None and weight_shape(m.weight) != want:
        raise GeometryError(f"{what}: weights of {weight_shape(m.weight)} where {want} are due.")
    if m.bias is not None and tuple(m.bias.shape) != (want[0], want[2]):
        raise GeometryError(
            f"{what}: biases of {tuple(m.bias.shape)} where {(want[0], want[2])} are due."
        )


CrossModelMapper = Mapper
"""The name under which VeloxQuant-MLX has it."""

KVMapper = Mapper
"""The name under which the molt mappers have it."""

SourceKV = Mapping[int, tuple[mx.array, mx.array]]
"""``{layer: (keys, values)}``, keys post-RoPE."""
