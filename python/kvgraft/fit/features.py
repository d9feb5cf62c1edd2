"""The feature space of a fit: keys and values of some tokens, laid out as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvgraft.models.geometry import ModelGeometry

__all__ = ["KINDS", "Columns", "FeatureRows", "common_heads"]

KINDS = ("keys", "values")
"""The two kinds of features; each has its own moments and maps."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class FeatureRows:
    """The features of some tokens in one model.

    Attributes:
        keys: One ``[n_kv_heads, rows, key_dim]`` float32 array per layer, RoPE
            stripped.
        values: One ``[n_kv_heads, rows, value_dim]`` float32 array per layer.
    """

    keys: list[Float32]
    values: list[Float32]

    def of(self, kind: str) -> list[Float32]:
        """The arrays of one kind."""
        return self.keys if kind == "keys" else self.values


@dataclass(frozen=True)
class Columns:
    """Column layout of one model's features: by layer, then KV head, then dimension.

    Attributes:
        heads: KV heads per layer.
        dims: head_dim per layer.
    """

    heads: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, geometry: ModelGeometry, kind: str) -> Columns:
        """The columns of a model's keys or values."""
        return cls(
            tuple(layer.n_kv_heads for layer in geometry.layers),
            tuple(
                layer.key_dim if kind == "keys" else layer.value_dim for layer in geometry.layers
            ),
        )

    def one_head(self) -> Columns:
        """The columns of a single head."""
        return Columns((1,) * len(self.heads), self.dims)

    def only(self, layers: Sequence[int]) -> Columns:
        """The columns of some layers."""
        return Columns(tuple(self.heads[i] for i in layers), tuple(self.dims[i] for i in layers))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Features per layer."""
        return tuple(h * d for h, d in zip(self.heads, self.dims, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First column of each layer; one more entry than layers."""
        return tuple(accumulate(self.widths, initial=0))

    @cached_property
    def width(self) -> int:
        """Features of all layers."""
        return sum(self.widths)

    def pick(self, layers: Sequence[int], heads: Sequence[int] | None) -> slice | NDArray[np.intp]:
        """Columns of some heads of some layers; ``None`` means all heads."""
        return _pick(self, tuple(layers), None if heads is None else tuple(heads))

    def within(self, layer: int, heads: Sequence[int] | None) -> NDArray[np.intp] | None:
        """Columns of some heads, counted from the layer's first; ``None`` means all."""
        if heads is None or tuple(heads) == tuple(range(self.heads[layer])):
            return None
        d = self.dims[layer]
        return np.concatenate([np.arange(h * d, (h + 1) * d) for h in heads])


@lru_cache(maxsize=512)  # layer ranking asks for the same few many times
def _pick(
    columns: Columns, layers: tuple[int, ...], heads: tuple[int, ...] | None
) -> slice | NDArray[np.intp]:
    inside = [columns.within(layer, heads) for layer in layers]
    if all(one is None for one in inside) and layers == tuple(
        range(layers[0], layers[0] + len(layers))
    ):
        return slice(columns.starts[layers[0]], columns.starts[layers[-1] + 1])
    parts = [
        columns.starts[layer] + (np.arange(columns.widths[layer]) if one is None else one)
        for layer, one in zip(layers, inside)
    ]
    return np.concatenate(parts)


def common_heads(source: ModelGeometry, target: ModelGeometry) -> int | None:
    """The KV head count, if every layer of both models has the same; else ``None``."""
    counts = {layer.n_kv_heads for layer in (*source.layers, *target.layers)}
    return counts.pop() if len(counts) == 1 else None
