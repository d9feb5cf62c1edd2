"""From a cache that one model filled to a cache that another can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from kvgraft import artifact, caches
from kvgraft.geometry import ModelGeometry
from kvgraft.graft import graft_snapshot
from kvgraft.mapper import Mapper
from kvgraft.probe import read_geometry

__all__ = ["graft_cache", "prefill"]


def prefill(model: Module, tokens: Sequence[int], *, step: int = 2048) -> list[Any]:
    """Read ``tokens`` with ``model`` and return the filled mlx-lm prompt cache.

    Args:
        model: mlx-lm model.
        tokens: Token ids, at least one.
        step: Tokens per forward pass, as in ``mlx_lm.generate``.
    """
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, len(tokens), step):
        model(mx.array([list(tokens[start : start + step])]), cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


def graft_cache(
    source_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    *,
    target_geometry: ModelGeometry | None = None,
    unload_after: bool = True,
) -> list[Any]:
    """Map a source model's prompt cache into one for ``target``.

    The cache covers the same tokens at the same positions. Give the target the
    last token of the conversation to read itself: hand over all but one token.

    Args:
        source_cache: mlx-lm prompt cache filled by the source; not changed.
        mapper: Mapper for this pair.
        target: The live target model; its dtype and geometry decide what is written.
        target_geometry: The target's geometry if it was read before.
        unload_after: Keep at most one layer's mapper weights in memory.

    Returns:
        A prompt cache for ``target``, evaluated, marked as mapped.

    Raises:
        CacheError: If the source cache is empty, inconsistent or of a class that
            is not read.
        PairMismatchError: If the cache or the target is not what the mapper was
            fitted for.
    """
    geometry = read_geometry(target) if target_geometry is None else target_geometry
    artifact.check_pair(mapper, target=geometry)
    snapshot = caches.read_cache(source_cache, mapper.source)
    return graft_snapshot(
        snapshot,
        mapper,
        geometry,
        unload_after=unload_after,
        provenance=_provenance(mapper, snapshot.offset),
    )


def _provenance(mapper: Mapper, n_tokens: int) -> caches.Provenance:
    source, target = mapper.source_model, mapper.target_model
    return caches.Provenance(
        source=source.name if source else mapper.source.model_type,
        target=target.name if target else mapper.target.model_type,
        mapper=mapper.describe(),
        n_tokens=n_tokens,
    )
