"""Reading a conversation natively in the gaps of a generation from a mapped cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from kvgraft import cache as caches
from kvgraft.handoff.memory import MemoryLimit, token_bytes
from kvgraft.handoff.state import GenerationState
from kvgraft.models.forward import extend_cache

__all__ = ["Repair"]


class Repair:
    """A native cache in the making, beside the mapped one that is in use.

    Args:
        state: The generation; its model reads.
        chunk: Tokens per :meth:`advance`; at least 2, to gain on the generation.
    """

    def __init__(self, state: GenerationState, *, chunk: int) -> None:
        if chunk < 2:
            raise ValueError(f"A repair must read at least 2 tokens per step, got {chunk}.")
        self._model = state.handle.load()
        self._chunk = chunk
        self._cache: list[Any] = make_prompt_cache(self._model, state.max_kv_size)

    @classmethod
    def begin(
        cls, state: GenerationState, *, chunk: int, memory_limit: MemoryLimit | None
    ) -> Repair | None:
        """A repair, or ``None`` if its cache would not fit the memory_limit."""
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
        return caches.n_tokens(self._cache)

    def rewind(self, n_tokens: int) -> bool:
        """Keep only the first ``n_tokens``; ``False`` if that can't be done."""
        return self.n_read <= n_tokens or caches.trim(self._cache, n_tokens)

    def advance(self, tokens: Sequence[int]) -> list[Any] | None:
        """Read the next chunk.

        Args:
            tokens: The conversation as it is now, the token just emitted included;
                the cache in use must hold all of it.

        Returns:
            The native cache of all of ``tokens`` once it has caught up.
        """
        done = self.n_read
        extend_cache(self._model, tokens[done : done + self._chunk], self._cache)
        return self._cache if self.n_read == len(tokens) else None
