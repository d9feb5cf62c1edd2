"""A prompt-cache store that maps other models' caches when a model has none of its own.

mlx-lm's server keeps the caches of past requests by model and by token ids, and
keeps them when another model is loaded. Where the requested model has no cache of
a prompt, this store maps another model's cache of the same tokens.

Mapped caches are approximations, so three rules hold throughout:

* What was mapped, and whatever a model wrote after it, is stored under a key of
  its own (:class:`MappedKey`): a lookup of native caches cannot find it.
* Only native caches are mapped: errors do not add up from model to model.
* A cache goes out only for the tokens that it holds: its ids are kept beside it
  and compared with the asked ones, and so is its length.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.models import cache as mlx_cache

from kvgraft.cache import is_mapped, trim
from kvgraft.cache.map import map_prompt
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import ModelIdentity, identify, resolve_model
from kvgraft.models.probe import read_geometry
from kvgraft.serve.origin import Origin, origin_of
from kvgraft.serve.routes import Route, RouteTable

__all__ = ["MIN_GAIN", "MappingPromptCache", "StoredCache", "MappedKey"]

MIN_GAIN = 64
"""Tokens that mapping must save over the model's own cache, by default.

Prefilling a few tokens costs about as much as a mapping and is exact.
"""

# Not the functions of the module: those would set up logging before mlx-lm does.
_log = logging.getLogger("kvgraft.serve")
_Base: Any = mlx_cache.LRUPromptCache


@dataclass(frozen=True)
class MappedKey:
    """Key of caches of ``model`` that are mapped, or continue from mapped ones."""

    model: Any


class StoredCache(list[Any]):
    """A stored cache list with the tokens it holds. Survives ``copy.deepcopy``.

    Attributes:
        ids: The token ids, packed: bytes are shared by copies, lists are not.
        mapped_tokens: How many of them were mapped; 0 for a native cache.
        source: The model that they were mapped from.
    """

    def __init__(
        self, entries: Iterable[Any], ids: bytes = b"", mapped_tokens: int = 0, source: str = ""
    ) -> None:
        super().__init__(entries)
        self.ids = ids
        self.mapped_tokens = mapped_tokens
        self.source = source


@dataclass(frozen=True)
class _Found:
    cache: StoredCache
    n: int


@dataclass(frozen=True)
class _Donor:
    found: _Found
    route: Route
    path: str


class MappingPromptCache(_Base):  # type: ignore[misc]  # mlx-lm's classes are untyped
    """mlx-lm's ``LRUPromptCache`` with mapping between models.

    All methods run in the server's generation thread, which owns the arrays.

    Args:
        provider: The server's ``ModelProvider``. When the store is asked for a
            cache, its model is the one that the cache is for.
        routes: The mappers.
        max_size: Most caches to hold.
        max_bytes: Most bytes to hold.
        min_gain: See :data:`MIN_GAIN`.
    """

    def __init__(
        self,
        provider: Any,
        routes: RouteTable,
        *,
        max_size: int = 10,
        max_bytes: int = 1 << 63,
        min_gain: int = MIN_GAIN,
    ) -> None:
        super().__init__(max_size, max_bytes)
        self._provider = provider
        self._routes = routes
        self._min_gain = max(1, min_gain)
        self._identities: dict[Any, ModelIdentity | None] = {}
        self._geometries: dict[Any, ModelGeometry] = {}

    # ------------------------------------------------- what the server calls

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """The best cache for a prefix of ``tokens``, and the tokens after it.

        At least one token is always left to read: nothing can be sampled
        without. Never raises: a cache is a convenience, and an error here would
        end the server's only generation thread.

        Args:
            model: The server's key of the asked model.
            tokens: The prompt. Only a :class:`RequestTokens` gets a mapped
                cache, since with others the store could not know it again.
        """
        try:
            found = self._fetch(model, tokens)
        except Exception as error:  # see above
            _log.exception("The prompt is read without a cache: %s", error)
            found = None
            if (origin := origin_of(tokens)) is not None:
                origin.decided, origin.mapped_tokens, origin.source = True, 0, ""
        if found is None:
            return None, tokens
        return found.cache, tokens[found.n :]

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store a cache; a mapped one, or one of unknown origin, apart from native ones.

        Args:
            model: The server's key of the model that wrote the cache.
            tokens: The tokens that it read. Of those that the cache does not
                hold (a draft model's last token), the store forgets.
            prompt_cache: The cache.
            cache_type: mlx-lm's class of the entry, for its eviction order.
        """
        try:
            self._insert(model, tokens, prompt_cache, cache_type)
        except Exception as error:  # as in fetch_nearest_cache
            _log.exception("A cache was not kept: %s", error)

    # ----------------------------------------------------------------- fetch

    def _fetch(self, model: Any, tokens: Sequence[int]) -> _Found | None:
        self._learn(model)
        own = self._look_up(model, tokens)
        origin = origin_of(tokens)
        if origin is None:
            return own
        origin.decided = True
        if origin.exact:
            return own
        n_own = own.n if own else 0
        held = self._look_up(MappedKey(model), tokens)
        donor = self._best_donor(model, tokens)
        n_held = held.n if held else 0
        n_donor = donor.found.n if donor else 0
        if donor is not None and n_donor - max(n_held, n_own) >= self._min_gain:
            mapped = self._try_map(model, tokens, own, donor, origin)
            if mapped is not None:
                return mapped
        if held is not None and n_held - n_own >= self._min_gain:
            origin.mapped_tokens = min(n_held, held.cache.mapped_tokens)
            origin.source = held.cache.source
            return held
        return own

    def _look_up(self, key: Any, tokens: Sequence[int]) -> _Found | None:
        """The longest stored prefix under ``key``, proved to be one, one token left over."""
        ids = list(tokens)
        cache, rest = super().fetch_nearest_cache(key, ids)
        if cache is not None and not rest:
            # mlx-lm gives out an exact hit whole, and then fails on the empty prompt.
            if mlx_cache.can_trim_prompt_cache(cache):
                mlx_cache.trim_prompt_cache(cache, 1)
                rest = ids[-1:]
            else:
                cache, rest = super().fetch_nearest_cache(key, ids[:-1])
                rest = [*rest, ids[-1]]
        n = len(ids) - len(rest)
        if cache is None or n == 0:
            return None
        packed = _pack(ids[:n])
        if not isinstance(cache, StoredCache) or cache.ids[: len(packed)] != packed:
            _log.error("A stored cache of other tokens than asked for was found, and not used.")
            return None
        if any(length != n for length in _lengths(cache)):
            _log.error("A stored cache holds other than the %d tokens asked for; not used.", n)
            return None
        return _Found(cache, n)

    def _best_donor(self, model: Any, tokens: Sequence[int]) -> _Donor | None:
        """The longest native cache of a model that some mapper leads from."""
        target = self._identity(model)
        if target is None:
            return None
        best: _Donor | None = None
        # What an image's tokens hold depends on the image; no mapper was fitted for it.
        n_text = _text_length(tokens)
        for route in self._routes.into(target):
            most = min(n_text, len(tokens) - route.native_end)
            for key, identity in self._identities.items():
                if key == model or identity is None or not route.reads(identity):
                    continue
                found = self._look_up(key, tokens)
                if found is None or min(found.n, most) <= (best.found.n if best else 0):
                    continue
                cut = _cut(found, most)
                if cut is not None:
                    best = _Donor(cut, route, key[0])
        return best

    # ------------------------------------------------------------------- map

    def _try_map(
        self,
        model: Any,
        tokens: Sequence[int],
        own: _Found | None,
        donor: _Donor,
        origin: Origin,
    ) -> _Found | None:
        """Map a donor's cache; ``None``, with the reason in the log, if that fails."""
        n, route = donor.found.n, donor.route
        start = time.perf_counter()
        try:
            cache, n_native = self._map(model, tokens, own, donor)
        except Exception as error:  # whatever it is, the prompt can be read instead
            _log.warning(
                "Could not map %d tokens from %s to %s, so %s reads them itself: %s",
                n, route.source.name, route.target.name, route.target.name, error,
            )  # fmt: skip
            return None
        origin.mapped_tokens = n - n_native
        origin.source = route.source.name
        _log.info(
            "Mapped %d of %d prompt tokens from %s to %s in %.3f s (%s)",
            n - n_native, len(tokens), route.source.name, route.target.name,
            time.perf_counter() - start, route.verdict,
        )  # fmt: skip
        return _Found(cache, n)

    def _map(
        self, model: Any, tokens: Sequence[int], own: _Found | None, donor: _Donor
    ) -> tuple[StoredCache, int]:
        """The mapped cache, and how many tokens at its start are native."""
        n, route = donor.found.n, donor.route
        geometry = self._geometry(model)
        source = donor.found.cache[: len(route.mapper.source.layers)]
        # What the target has computed itself is exact, and costs nothing more.
        native_start = 0 if own is None else own.n
        start_cache = None if own is None else own.cache[: len(geometry.layers)]
        if route.native_start > native_start:
            native_start, start_cache = min(route.native_start, n - 1), None
        done = map_prompt(
            source,
            route.mapper,
            self._provider.model,
            tokens[:n],
            native_start=native_start,
            native_end=1,  # the server reads what follows
            start_cache=start_cache,
            target_geometry=geometry,
        )
        mapped = done.cache
        if self._provider.draft_model is not None:
            # Often the conversation comes from the very model that drafts now. Any other
            # reads it: it is small, and a mapped cache would cost accepted proposals.
            drafted = source if donor.path == model[2] else None
            mapped += drafted or prefill(self._provider.draft_model, list(tokens[:n]))
        return StoredCache(mapped), done.native_start

    # ---------------------------------------------------------------- insert

    def _insert(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], cache_type: str
    ) -> None:
        self._learn(model)
        origin = origin_of(tokens)
        known = origin is not None and origin.decided
        native = origin is not None and origin.native and not is_mapped(prompt_cache)
        if not known:
            _log.warning("A cache of unknown origin is kept apart from native ones.")
        ids = list(tokens)
        n = min([len(ids), *_lengths(prompt_cache)])
        if n == 0:
            return
        if not trim(prompt_cache, n):
            _log.warning("A cache whose layers hold different numbers of tokens was not kept.")
            return
        held = StoredCache(
            prompt_cache,
            _pack(ids[:n]),
            0 if native else ((origin.mapped_tokens if origin else 0) or n),
            origin.source if origin else "",
        )
        key = model if native else MappedKey(model)
        super().insert_cache(key, ids[:n], held, cache_type=cache_type)

    # ---------------------------------------------------------------- models

    def _learn(self, model: Any) -> None:
        """Find out which model a key stands for, while that model is loaded."""
        if model in self._identities or self._provider.model_key != model:
            return
        self._identities[model] = None
        path, adapter = model[0], model[1]
        if len(self._routes) == 0:
            return
        if adapter is not None:
            _log.info("%s runs with an adapter, which no mapper was fitted for.", path)
            return
        try:
            identity = identify(
                resolve_model(path), self._provider.model, self._provider.tokenizer, name=str(path)
            )
        except Exception as error:  # without an identity there is no mapping, and no harm
            _log.warning("Cannot tell which model %s is, so its caches stay its own: %s", path,
                         error)  # fmt: skip
            return
        if self._routes.touches(identity):
            self._identities[model] = identity
        else:
            _log.info("No mapper leads to or from %s.", path)

    def _identity(self, model: Any) -> ModelIdentity | None:
        return self._identities.get(model)

    def _geometry(self, model: Any) -> ModelGeometry:
        if model not in self._geometries:
            self._geometries[model] = read_geometry(self._provider.model)
        return self._geometries[model]


def _pack(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()


def _text_length(tokens: Sequence[int]) -> int:
    """Tokens before the first image: mlx-lm keys images by negative ids."""
    return next((i for i, token in enumerate(tokens) if token < 0), len(tokens))


def _lengths(cache: Sequence[Any]) -> list[int]:
    """How many tokens the entries of a cache hold, of those that say so."""
    return [int(entry.offset) for entry in cache if isinstance(getattr(entry, "offset", None), int)]


def _cut(found: _Found, n: int) -> _Found | None:
    """At most ``n`` tokens of a cache that was copied for us; ``None`` if it can't be cut."""
    if found.n <= n:
        return found
    return _Found(found.cache, n) if trim(found.cache, n) else None
