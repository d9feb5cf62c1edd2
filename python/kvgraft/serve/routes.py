"""Which mappers a server has, and which models they connect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvgraft.errors import FormatError, TokenizerMismatchError
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.models.loading import ModelIdentity
from kvgraft.option_names import named

__all__ = ["Route", "RouteTable", "load_routes", "same_model"]


@dataclass(frozen=True)
class Route:
    """One mapper, ready for use.

    Attributes:
        mapper: The mapper; its weights stay on disk until used.
        source: The model whose caches it reads.
        target: The model that it writes caches for.
        verdict: What its evaluation said, or ``"not evaluated"``.
        native_start: Tokens at the start that the target reads itself.
        native_end: Tokens at the end that the target reads itself, at least 1.
    """

    mapper: Mapper
    source: ModelIdentity
    target: ModelIdentity
    verdict: str
    native_start: int = 0
    native_end: int = 1

    def __str__(self) -> str:
        return f"{self.source.name} -> {self.target.name} ({self.verdict})"

    def reads(self, model: ModelIdentity) -> bool:
        """Whether it maps caches of ``model``."""
        return same_model(self.source, model)

    def writes(self, model: ModelIdentity) -> bool:
        """Whether it makes caches for ``model``."""
        return same_model(self.target, model)


class RouteTable:
    """The routes of a server, found by model.

    Args:
        routes: In order of preference.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def into(self, model: ModelIdentity) -> list[Route]:
        """Routes that write caches for ``model``."""
        return [route for route in self._routes if route.writes(model)]

    def touches(self, model: ModelIdentity) -> bool:
        """Whether any route reads or writes caches of ``model``."""
        return any(route.reads(model) or route.writes(model) for route in self._routes)


def same_model(a: ModelIdentity, b: ModelIdentity) -> bool:
    """Whether two identities are of one model, however its weights are stored.

    As everywhere in kvgraft, a base model and its instruction tuning can't be
    distinguished when their configurations and tokenizers are the same.
    """
    return (a.config_sha256, a.tokenizer_sha256) == (b.config_sha256, b.tokenizer_sha256)


def load_routes(
    paths: Sequence[str | os.PathLike[str]], *, force: bool = False
) -> tuple[RouteTable, list[str]]:
    """Open mappers and find out which models they are for.

    Args:
        paths: Artifacts, in order of preference.
        force: Use mappers even if their verdict is "do not ship".

    Returns:
        The routes, and a message for each mapper that was left out.

    Raises:
        FormatError: If an artifact is damaged, does not say which models it is
            for, or holds a malformed quality record.
        TokenizerMismatchError: If its two models have different tokenizers.
    """
    routes: list[Route] = []
    left_out: list[str] = []
    for path in paths:
        route = _open(path)
        refusal = route.mapper.quality.refusal()
        if refusal and not force:
            left_out.append(
                f"{os.fspath(path)} is not used: {refusal} The target "
                f"will read its prompts itself. {named('force', True)} uses it all the same."
            )
        else:
            routes.append(route)
    return RouteTable(routes), left_out


def _open(path: str | os.PathLike[str]) -> Route:
    mapper = open_mapper(path)
    source, target = mapper.source_model, mapper.target_model
    if source is None or target is None:
        raise FormatError(
            f"{os.fspath(path)} does not say which models it was fitted for, so the server cannot "
            "tell which caches to map with it. Fit it with kvgraft fit, which writes that down."
        )
    if source.tokenizer_sha256 != target.tokenizer_sha256:
        raise TokenizerMismatchError(
            f"{os.fspath(path)} maps between models with different tokenizers, so token i of one "
            "cache is not token i of the other. The server cannot use it."
        )
    quality = mapper.quality
    verdict = quality.verdict if quality.verdict is not None else "not evaluated"
    return Route(mapper, source, target, verdict, quality.native_start, quality.native_end)
