"""Going back to fewer tokens."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
)

from kvgraft.cache import trim


def test_trimming_cuts_each_entry_that_is_longer() -> None:
    """As a draft model's cache behind the model's own, which holds fewer tokens."""

    def entry(n: int) -> KVCache:
        made = KVCache()
        made.update_and_fetch(mx.zeros((1, 1, n, 4)), mx.zeros((1, 1, n, 4)))
        return made

    cache = [entry(9), entry(7), entry(5)]
    assert trim(cache, 6)
    assert [e.offset for e in cache] == [6, 6, 5]
    ring = RotatingKVCache(max_size=4, keep=0)
    for _ in range(9):
        ring.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    assert trim([entry(9), ring], 9)  # nothing to cut
    mixed = [entry(9), ring]
    assert not trim(mixed, 6)
    assert mixed[0].offset == 9
    assert not trim([entry(9), ArraysCache(2)], 6)
