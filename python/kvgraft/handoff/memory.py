"""Counting the memory of a hand-off, and keeping it within a limit.

``mx.set_memory_limit`` is a guideline: MLX exceeds it rather than fail. For
applications that must not exceed a limit (iOS, a shared machine), weights, caches,
mapper and working buffers are counted from their shapes before a hand-off, and MLX's
allocator is read while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvgraft.errors import MemoryLimitError
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import ModelGeometry

__all__ = [
    "MemoryLimit",
    "MemoryPlan",
    "Stage",
    "cache_bytes",
    "mapper_bytes",
    "plan_memory",
    "token_bytes",
]


def cache_bytes(cache: Sequence[Any] | None) -> int:
    """Bytes of a prompt cache's buffers, with the room that they keep for later tokens."""
    return sum(int(array.nbytes) for entry in cache or () for array in _buffers(entry))


def _buffers(entry: Any) -> Iterator[mx.array]:
    for part in (getattr(entry, "keys", None), getattr(entry, "values", None)):
        if isinstance(part, mx.array):
            yield part
        elif isinstance(part, (tuple, list)):  # quantised: packed, scales, biases
            yield from part
    for inner in getattr(entry, "caches", ()):
        yield from _buffers(inner)


def token_bytes(geometry: ModelGeometry) -> int:
    """Bytes that one token takes in a model's cache."""
    return sum(
        layer.n_kv_heads * (layer.key_dim + layer.value_dim) * geometry.mx_dtype.size
        for layer in geometry.layers
    )


def mapper_bytes(mapper: Mapper) -> int:
    """Bytes of the mapper's weights that are in memory now."""
    return sum(
        part.storage.nbytes(part.shape)
        for m in mapper.layers
        for part in (m.keys, m.values)
        if part.weight is not None
    )


@dataclass(frozen=True)
class Stage:
    """Memory in one step of a hand-off.

    Attributes:
        name: What the step does.
        nbytes: Bytes of everything in memory during it.
    """

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a hand-off, step by step, counted from shapes.

    Attributes:
        stages: The steps, in order.
    """

    stages: tuple[Stage, ...]

    @property
    def peak(self) -> int:
        """Bytes in the largest step."""
        return max(stage.nbytes for stage in self.stages)

    def describe(self) -> str:
        """One line per step, in MB."""
        return "\n".join(f"{s.nbytes / 1e6:9.1f} MB  {s.name}" for s in self.stages)


def plan_memory(
    *,
    source_weights: int,
    source_cache: int,
    target_weights: int,
    n_tokens: int,
    target: ModelGeometry | None,
    mapper: Mapper | None,
    keep_source: bool = False,
    keep_cache: bool = False,
    other: int = 0,
) -> MemoryPlan:
    """Count the memory of a hand-off beforehand.

    Args:
        source_weights: Bytes of the source's weights.
        source_cache: Bytes of the source's cache.
        target_weights: Bytes of the target's weights.
        n_tokens: Tokens that the target's cache will hold.
        target: Geometry of the target's cache, if known.
        mapper: The mapper; ``None`` for a re-prefill.
        keep_source: The source and its cache stay.
        keep_cache: The source's cache stays.
        other: Bytes of all other MLX arrays (other models).
    """
    target_cache = 0 if target is None else n_tokens * token_bytes(target)
    keep_cache = keep_cache or keep_source
    kept = other + (source_weights if keep_source else 0) + (source_cache if keep_cache else 0)
    stages = [Stage("source running", other + source_weights + source_cache)]
    if mapper is None:
        stages.append(Stage("target loaded", kept + target_weights))
    else:
        held = mapper_bytes(mapper)
        snapshot = 0 if keep_cache else source_cache
        stages.append(Stage("target loaded, source cache held", kept + snapshot + target_weights))
        stages.append(
            Stage(
                "mapping",
                kept
                + snapshot
                + target_weights
                + target_cache
                + held
                + _layer_work(mapper, n_tokens),
            )
        )
    stages.append(Stage("target running", kept + target_weights + target_cache))
    return MemoryPlan(tuple(stages))


def _layer_work(mapper: Mapper, n_tokens: int) -> int:
    """Bytes that mapping one layer needs beside its result: weights and float32 rows."""
    worst = 0
    for m in mapper.layers:
        weights = sum(p.storage.nbytes(p.shape) for p in (m.keys, m.values) if p.weight is None)
        rows = max(
            n_tokens * (p.shape[1] + p.shape[0] * p.shape[2]) * 4 for p in (m.keys, m.values)
        )
        worst = max(worst, weights + rows)
    return worst


@dataclass(frozen=True)
class MemoryLimit:
    """Most bytes that an application may hold in MLX arrays.

    Attributes:
        limit: Bytes.
        reserve: Bytes to leave free for what cannot be counted from shapes:
            activations of a forward pass and the system's own.
        observe: Returns the bytes in use; default those of MLX's allocator (arrays
            in use and buffers kept for reuse). Replace it to use another counter,
            such as the system's.
    """

    limit: int
    reserve: int = 0
    observe: Callable[[], int] = lambda: mx.get_active_memory() + mx.get_cache_memory()

    @property
    def usable(self) -> int:
        """Bytes for what is counted: ``limit`` without ``reserve``."""
        return self.limit - self.reserve

    def fits(self, plan: MemoryPlan) -> bool:
        """Whether a planned hand-off stays within the limit."""
        return plan.peak <= self.usable

    def check(self, doing: str) -> None:
        """Compare the memory in use with the limit.

        Args:
            doing: What is being done, for the message.

        Raises:
            MemoryLimitError: If it exceeds the limit, even with MLX's unused buffers
                released.
        """
        if self.observe() > self.limit:
            mx.clear_cache()
            held = self.observe()
            if held > self.limit:
                raise MemoryLimitError(
                    f"{held / 1e6:.1f} MB are in use while {doing}; the limit is "
                    f"{self.limit / 1e6:.1f} MB."
                )
