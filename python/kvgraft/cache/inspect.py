"""What a prompt cache says of itself: tokens read, size limit, quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.cache.read import advice, read_offset
from kvgraft.errors import UnsupportedCacheError

__all__ = ["n_tokens", "quantization", "size_limit"]


def n_tokens(cache: Sequence[Any]) -> int:
    """Tokens that a prompt cache has read, from its first entry's counter.

    Raises:
        UnsupportedCacheError: If the entry counts no tokens.
        CacheError: If it is a batch of conversations.
    """
    if not cache:
        return 0
    first = cache[0]
    while type(first).__name__ == "CacheList":
        first = first.caches[0]
    if not hasattr(first, "offset"):
        name = type(first).__name__
        raise UnsupportedCacheError(f"{name} does not count tokens: {advice(name)}.")
    return read_offset(first.offset, "0")


def size_limit(cache: Sequence[Any]) -> int | None:
    """The ``max_kv_size`` that a prompt cache was made with; ``None`` without one.

    Rings of sliding layers, which keep no first tokens, are no such limit.
    """
    if not cache or any(type(entry).__name__ != "RotatingKVCache" for entry in cache):
        return None
    limits = {(int(entry.max_size), int(entry.keep)) for entry in cache}
    size, keep = limits.pop()
    return size if not limits and keep else None


def quantization(cache: Sequence[Any]) -> tuple[int, int] | None:
    """Bits and group size of a cache whose layers are all quantised so; ``None`` else."""
    if not cache or any(type(entry).__name__ != "QuantizedKVCache" for entry in cache):
        return None
    found = {(int(entry.bits), int(entry.group_size)) for entry in cache}
    return found.pop() if len(found) == 1 else None
