"""The mark of a mapped cache, so that it never passes for a native one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "MappedRange",
    "Provenance",
    "cut_mark",
    "is_mapped",
    "mapped_ranges",
    "mark",
    "provenance_of",
]

_MARK = "kvgraft_provenance"


@dataclass(frozen=True)
class MappedRange:
    """Consecutive tokens of a cache whose rows were mapped equally often.

    Attributes:
        start: Position of the first one.
        stop: Position after the last one.
        times: How often they were mapped: 1 for rows mapped from a cache that its
            model computed, 2 for rows mapped from such rows, and so on. Each
            mapping adds its error to the ones before.
    """

    start: int
    stop: int
    times: int

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


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
        native_start: The mark of the target's own cache of the tokens before
            ``start``, if some of its rows were mapped at an earlier hand-off.
    """

    source: str = "unknown"
    target: str = "unknown"
    mapper: str = "unknown"
    n_tokens: int = 0
    start: int = 0
    before: Provenance | None = None
    native_start: Provenance | None = None

    @property
    def ranges(self) -> tuple[MappedRange, ...]:
        """The mapped tokens, ascending; all others were computed by the model itself."""
        out: list[MappedRange] = []
        if self.native_start is not None:
            own = self.native_start.first(self.start)
            out += () if own is None else own.ranges
        at, stop = self.start, self.start + self.n_tokens
        for earlier in () if self.before is None else self.before.ranges:
            first, last = max(earlier.start, at), min(earlier.stop, stop)
            if first < last:
                out += [MappedRange(at, first, 1), MappedRange(first, last, earlier.times + 1)]
                at = last
        return _joined([*out, MappedRange(at, stop, 1)])

    def first(self, n_tokens: int) -> Provenance | None:
        """The mark of the first ``n_tokens`` of the cache; ``None`` if none of them was mapped."""
        if n_tokens > self.start:
            return replace(self, n_tokens=min(self.n_tokens, n_tokens - self.start))
        return None if self.native_start is None else self.native_start.first(n_tokens)

    def to_json(self) -> str:
        """One line of JSON; :meth:`from_json` reads it back."""
        return json.dumps(_to_dict(self))

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
        before, native_start = data.get("before"), data.get("native_start")
        return cls(
            source=str(data.get("source", "unknown")),
            target=str(data.get("target", "unknown")),
            mapper=str(data.get("mapper", "unknown")),
            n_tokens=int(data.get("n_tokens", 0)),
            start=int(data.get("start", 0)),
            before=None if before is None else cls._of(before),
            native_start=None if native_start is None else cls._of(native_start),
        )


def _to_dict(provenance: Provenance) -> dict[str, Any]:
    data = asdict(replace(provenance, before=None, native_start=None))
    data["before"] = None if provenance.before is None else _to_dict(provenance.before)
    del data["native_start"]  # files had no such key before, and few need it
    if provenance.native_start is not None:
        data["native_start"] = _to_dict(provenance.native_start)
    return data


def _joined(ranges: Sequence[MappedRange]) -> tuple[MappedRange, ...]:
    """Adjacent ranges that were mapped equally often as one; empty ones dropped."""
    out: list[MappedRange] = []
    for part in ranges:
        if part.n_tokens <= 0:
            continue
        if out and out[-1].stop == part.start and out[-1].times == part.times:
            part = replace(out.pop(), stop=part.stop)
        out.append(part)
    return tuple(out)


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


def cut_mark(cache: Sequence[Any], n_tokens: int) -> None:
    """Adapt the mark of a cache that was cut to its first ``n_tokens``.

    Rows that are written after the cut are the model's own.
    """
    for entry in cache:
        found = getattr(entry, _MARK, None)
        if not isinstance(found, Provenance):
            continue
        left = found.first(n_tokens)
        if left is None:
            delattr(entry, _MARK)
        else:
            setattr(entry, _MARK, left)


def mapped_ranges(cache: Sequence[Any]) -> tuple[MappedRange, ...]:
    """Which tokens of a cache were mapped, by its mark; none of a native cache."""
    found = provenance_of(cache)
    return () if found is None else found.ranges


def is_mapped(cache: Sequence[Any]) -> bool:
    """Whether any layer of the cache was mapped, so that it is an approximation."""
    return provenance_of(cache) is not None
