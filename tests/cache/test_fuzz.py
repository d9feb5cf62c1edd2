"""Random lives of rings and batches, whose rows say which token they are."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvgraft.cache import read_cache
from kvgraft.models.token_ranges import TokenRanges


def rows(ids: list[list[int]]) -> mx.array:
    """``[B, 1, N, 2]`` rows of which each holds its token's number."""
    x = mx.array(ids, dtype=mx.float32)[:, None, :, None]
    return mx.broadcast_to(x, (len(ids), 1, len(ids[0]), 2))


def check(cache: Any, text: list[int], room: TokenRanges, row: int | None = None) -> None:
    snapshot = read_cache([cache], row=row)
    held = snapshot.token_ranges[0]
    assert snapshot.offset == len(text) and held.covers(room)
    want = [text[p] for p in held.positions.tolist()]
    for x in (snapshot.keys[0], -snapshot.values[0]):
        assert [int(v) for v in x[0, 0, :, 0].tolist()] == want


@pytest.mark.parametrize("seed", range(60))
def test_rings(seed: int) -> None:
    rng = random.Random(seed)
    size, keep = rng.choice([4, 6, 9, 16, 300]), rng.choice([0, 0, 1, 3])
    ring, n = RotatingKVCache(max_size=size, keep=keep), 0
    for _ in range(14):
        if n > 1 and ring.is_trimmable() and rng.random() < 0.25:
            cut = rng.randint(1, n - 1)
            ring.trim(cut)
            n -= cut
        else:
            new = rng.choice([1, 1, 1, 2, 3, 7])
            x = rows([list(range(n, n + new))])
            ring.update_and_fetch(x, -x)
            n += new
        check(ring, list(range(n)), TokenRanges.last(n, size, keep))


@pytest.mark.parametrize("size", [None, 5, 8])
@pytest.mark.parametrize("seed", range(20))
def test_batches(seed: int, size: int | None) -> None:
    rng = random.Random(seed)

    def conversation() -> tuple[Any, list[int]]:
        start, n = 1000 * rng.randint(1, 900), rng.randint(1, 12)
        entry = KVCache() if size is None else RotatingKVCache(max_size=size)
        x = rows([list(range(start, start + n))])
        entry.update_and_fetch(x, -x)
        return entry, list(range(start, start + n))

    def merged(n: int) -> tuple[Any, list[list[int]]]:
        entries, texts = zip(*(conversation() for _ in range(n)), strict=True)
        return type(entries[0]).merge(list(entries)), list(texts)

    batch, texts = merged(rng.randint(1, 3))
    for _ in range(7):
        what = rng.random()
        if what < 0.55:
            n = rng.choice([1, 1, 1, 2, 4])
            new = [[t[-1] + 1 + i for i in range(n)] for t in texts]
            batch.update_and_fetch(rows(new), -rows(new))
            texts = [t + more for t, more in zip(texts, new, strict=True)]
        elif what < 0.7 and len(texts) > 1:
            left = sorted(rng.sample(range(len(texts)), len(texts) - 1))
            batch.filter(mx.array(left))
            texts = [texts[i] for i in left]
        elif what < 0.85:
            other, more_texts = merged(rng.randint(1, 2))
            batch.extend(other)
            texts += more_texts
        elif batch.is_trimmable() and min(map(len, texts)) > 1:
            batch.trim(1)
            texts = [t[:-1] for t in texts]
        for i, text in enumerate(texts):
            check(batch, text, TokenRanges.last(len(text), size or 10**9), row=i)
