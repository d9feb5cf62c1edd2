"""Small caches of mlx-lm with known rows, for the tests of reading and building."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvgraft.cache import read_cache

HEADS, DIM = 2, 8


def filled(
    n: int, *, batch: int = 1, layers: int = 3, dtype: mx.Dtype = mx.float32, seed: int = 0
) -> list[KVCache]:
    """A native cache of random tokens, padded as mlx-lm pads it."""
    caches = []
    for layer in range(layers):
        entry = KVCache()
        key = mx.random.key(seed + layer)
        k = mx.random.normal((batch, HEADS, n, DIM), key=key).astype(dtype)
        entry.update_and_fetch(k, -k)
        caches.append(entry)
    return caches


def arrays(n: int, *, layers: int = 3, **kwargs: Any) -> list[tuple[mx.array, mx.array]]:
    return read_cache(filled(n, layers=layers, **kwargs)).layers


def numbers(x: mx.array) -> list[int]:
    """The first number of each row: its position, in rows of :func:`numbered`."""
    return [int(v) for v in x[0, 0, :, 0].tolist()]


def numbered(start: int, stop: int, dim: int = DIM) -> mx.array:
    """Rows that say at which position they are."""
    rows = mx.arange(start, stop, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(rows, (1, HEADS, stop - start, dim))
