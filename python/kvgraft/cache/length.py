"""How many tokens a cache has read, how it is limited and packed, and cutting it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.cache.provenance import cut_mark
from kvgraft.cache.read import advice, read_offset
from kvgraft.errors import UnsupportedCacheError

__all__ = ["n_tokens", "quantization", "size_limit", "trim"]


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


def trim(cache: Sequence[Any], length: int) -> bool:
    """Cut a prompt cache to its first ``length`` tokens, in place.

    Entries may hold different numbers of tokens, as those of a draft model do that
    are appended to the model's; each is cut that holds more.

    Returns:
        Whether that could be done. A ring that wrapped has lost tokens that it
        would need, and the whole cache is left as it was.
    """
    longer = [(entry, surplus) for entry in cache if (surplus := _surplus(entry, length)) > 0]
    if longer and not all(entry.is_trimmable() for entry in cache):
        return False
    for entry, surplus in longer:
        entry.trim(surplus)
    if longer:
        cut_mark(cache, length)
    return True


def _surplus(entry: Any, length: int) -> int:
    try:
        return n_tokens([entry]) - length
    except UnsupportedCacheError:
        return 0  # it counts no tokens, and cannot be trimmed where others have to be
