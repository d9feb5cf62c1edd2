"""One affine map, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvgraft.errors import MapperNotFoundError
from kvgraft.ops.quantized import AffineWeight, Weight, weight_shape

__all__ = ["LinearMap", "Storage"]


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
        heads: Source heads per target head; ``None`` is the ``full`` mapping.
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
        mapping = None if heads is None else tuple(tuple(int(g) for g in group) for group in heads)
        return cls(tuple(int(s) for s in sources), mapping, weight_shape(weight), weight, bias)

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
