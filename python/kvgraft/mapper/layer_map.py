"""The maps of one target layer, and where their weights come from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.veloxquant_names import VeloxQuantNames

__all__ = ["LayerMap", "WeightStore"]


@dataclass
class LayerMap(VeloxQuantNames):
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
    def sources(self) -> set[int]:
        """Source layers of the keys and of the values."""
        return {*self.keys.sources, *self.values.sources}

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
