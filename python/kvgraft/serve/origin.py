"""Where the cache behind a request comes from, carried by the request's token ids.

mlx-lm's server takes a cache out of its store, merges it into a batch and later
extracts another object from it, so a mark on the cache does not survive. What
does come back with every cache is the list of its tokens, cut and extended but
never rebuilt. The mark is tied to that list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

__all__ = ["Origin", "RequestTokens", "origin_of"]


@dataclass
class Origin:
    """What one request was answered from. Belongs to that request alone.

    Attributes:
        exact: The client wants no mapped cache.
        decided: The store was asked for a cache. Until then nothing is known.
        mapped_tokens: Tokens whose keys and values were mapped from another
            model's cache; 0 for a native cache, or none.
        source: The model whose cache was mapped, for messages.
    """

    exact: bool = False
    decided: bool = False
    mapped_tokens: int = 0
    source: str = ""

    @property
    def native(self) -> bool:
        """Every key and value was, or will be, written by the model itself."""
        return self.decided and self.mapped_tokens == 0


class RequestTokens(list[int]):
    """The token ids of one request; slices keep the request's :class:`Origin`."""

    def __init__(self, ids: Iterable[int] = (), origin: Origin | None = None) -> None:
        super().__init__(ids)
        self.origin = Origin() if origin is None else origin

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> RequestTokens: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | RequestTokens:
        if isinstance(index, slice):
            return RequestTokens(super().__getitem__(index), self.origin)
        return super().__getitem__(index)


def origin_of(tokens: Any) -> Origin | None:
    """The origin tied to a list of tokens; ``None`` if it lost it or never had one."""
    return tokens.origin if isinstance(tokens, RequestTokens) else None
