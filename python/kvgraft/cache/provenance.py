"""The mark of a mapped cache, so that it never passes for a native one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Provenance", "is_mapped", "mark", "provenance_of"]

_MARK = "kvgraft_provenance"


@dataclass(frozen=True)
class Provenance:
    """Where a mapped cache comes from. Native caches carry none.

    A mapped cache is an approximation: code that stores caches for reuse must
    not let it answer for a native one. The mark stays on the cache objects
    through generation and ``copy.deepcopy``, and in files that
    :mod:`kvgraft.cache.prompt_files` writes, but not through mlx-lm's own
    ``save_prompt_cache``, ``merge`` or ``to_quantized``, which make new objects.

    Attributes:
        source: The model whose cache was mapped.
        target: The model that the result is for.
        mapper: The mapper, by path or digest.
        n_tokens: Mapped tokens; what follows them was written by the target.
        start: The first of them; those before it the target read itself.
        before: The mark of the source's cache, if that was mapped itself.
    """

    source: str = "unknown"
    target: str = "unknown"
    mapper: str = "unknown"
    n_tokens: int = 0
    start: int = 0
    before: Provenance | None = None

    @property
    def generations(self) -> int:
        """How often rows were mapped at most: once, and once more for each mark before."""
        return 1 + (self.before.generations if self.before is not None else 0)

    def to_json(self) -> str:
        """One line of JSON; :meth:`from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: If it is something else.
        """
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, data: Any) -> Provenance:
        if not isinstance(data, dict):
            raise ValueError("a provenance is a JSON object")
        before = data.get("before")
        return cls(
            source=str(data.get("source", "unknown")),
            target=str(data.get("target", "unknown")),
            mapper=str(data.get("mapper", "unknown")),
            n_tokens=int(data.get("n_tokens", 0)),
            start=int(data.get("start", 0)),
            before=None if before is None else cls._of(before),
        )


def mark(cache: Sequence[Any], provenance: Provenance) -> None:
    """Mark every layer of a cache as mapped."""
    for entry in cache:
        setattr(entry, _MARK, provenance)


def provenance_of(cache: Sequence[Any]) -> Provenance | None:
    """The mark of a mapped cache; ``None`` for a native one."""
    for entry in cache:
        found = getattr(entry, _MARK, None)
        if isinstance(found, Provenance):
            return found
    return None


def is_mapped(cache: Sequence[Any]) -> bool:
    """Whether any layer of the cache was mapped, so that it is an approximation."""
    return provenance_of(cache) is not None
