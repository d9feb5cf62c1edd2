"""Prefilling a conversation natively in the background of a generation from a mapped cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from kvgraft import cache as caches
from kvgraft.errors import ArgumentError
from kvgraft.handoff.memory import MemoryLimit, token_bytes
from kvgraft.handoff.state import GenerationState
from kvgraft.models.forward import extend_cache
from kvgraft.option_names import named

__all__ = ["Repair"]


class Repair:
    """A native cache in the making, beside the mapped one that is in use.

    Args:
        state: The generation; its model reads.
        chunk: Tokens per :meth:`advance`; at least 2, to gain on the generation.

    Raises:
        ArgumentError: If ``chunk`` is below 2.
    """

    def __init__(self, state: GenerationState, *, chunk: int) -> None:
        check_chunk(chunk)
        # Not the model itself, so that a switch can unload it.
        self._handle = state.handle
        self._chunk = chunk
        self._cache: list[Any] = make_prompt_cache(state.handle.load(), state.max_kv_size)
        self._read: list[int] = []

    @classmethod
    def begin(
        cls, state: GenerationState, *, chunk: int, memory_limit: MemoryLimit | None
    ) -> Repair | None:
        """A repair, or ``None`` if its cache would not fit the memory limit."""
        if memory_limit is not None:
            # Room to grow: both caches get longer until the swap.
            n = len(state.tokens) + 256 + len(state.tokens) // chunk
            if (
                memory_limit.observe() + n * token_bytes(state.handle.geometry)
                > memory_limit.usable
            ):
                return None
        return cls(state, chunk=chunk)

    @property
    def n_read(self) -> int:
        """Tokens read so far."""
        return len(self._read)

    def resume(self, tokens: Sequence[int]) -> bool:
        """Continue with a conversation that may have changed since, and keep what it shares.

        Returns:
            Whether the repair can continue; ``False`` if its cache cannot be cut back.
        """
        n = common_prefix(self._read, tokens)
        if n < len(self._read) and not caches.trim(self._cache, n):
            return False
        del self._read[n:]
        return True

    def advance(self, tokens: Sequence[int]) -> list[Any] | None:
        """Read the next chunk.

        Args:
            tokens: The conversation as it is now, the token just emitted included;
                the cache in use must hold all of it. It begins with what was read.

        Returns:
            The native cache of all of ``tokens`` once it has caught up.
        """
        part = tokens[self.n_read : self.n_read + self._chunk]
        extend_cache(self._handle.load(), part, self._cache)
        self._read += part
        return self._cache if self.n_read == len(tokens) else None


def check_chunk(chunk: int) -> None:
    """Check the tokens that a repair reads per generated one.

    Raises:
        ArgumentError: If it is below 2.
    """
    if chunk < 2:
        raise ArgumentError(
            f"A repair ({named('repair')}) must read at least 2 tokens per generated one, to gain "
            f"on the generation; got {chunk}."
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of first tokens that two conversations share."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
