"""From a cache that one model filled to a cache that another can continue from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import inspect
from kvgraft.cache.build import build_cache, check_quantizable
from kvgraft.cache.provenance import Provenance, provenance_of
from kvgraft.cache.read import read_cache
from kvgraft.cache.required_ranges import required_ranges
from kvgraft.cache.rewind import cut_snapshot
from kvgraft.cache.snapshot import CacheSnapshot, LayerRows
from kvgraft.errors import CacheError, NothingToMapError
from kvgraft.mapper import transfer
from kvgraft.mapper.data import require_mapper
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.forward import extend_cache
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.probe import read_geometry
from kvgraft.models.token_ranges import TokenRanges
from kvgraft.option_names import named
from kvgraft.progress import timed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "MapOptions",
    "MappedPrompt",
    "PromptSplit",
    "check_native_ends",
    "map_cache",
    "map_prompt",
    "split_prompt",
]

Layer = tuple[int, mx.array, mx.array]
"""Index, keys and values of a layer."""


class MapOptions(TypedDict, total=False):
    """Keyword arguments of :func:`map_cache` that :func:`map_prompt` takes too."""

    target_geometry: ModelGeometry | None
    row: int | None
    unload_after: bool
    consume: bool
    on_layer: Callable[[int], None] | None
    kv_bits: int | None
    kv_group_size: int


@dataclass(frozen=True)
class PromptSplit:
    """Which tokens of a prompt are mapped, and which the target reads itself.

    Attributes:
        n_tokens: Tokens that the target's cache will hold. Generation continues from
            one more, which is not among them.
        native_start: First tokens, read by the target.
        stop: Position after the last mapped token.
    """

    n_tokens: int
    native_start: int
    stop: int

    @property
    def mapped(self) -> int:
        """Number of mapped tokens."""
        return self.stop - self.native_start

    @property
    def native_end(self) -> int:
        """Last tokens, read by the target; the one that generation continues from counts."""
        return self.n_tokens + 1 - self.stop


@dataclass(frozen=True)
class MappedPrompt:
    """What :func:`map_prompt` made.

    Attributes:
        cache: The target's prompt cache, evaluated, marked as mapped.
        native_start: First tokens, computed by the target itself.
        reused: Of these, how many ``start_cache`` held.
        mapped: Tokens after them, mapped.
        native_end: Last tokens, computed by the target itself; the one that generation
            continues from, which is not in the cache, counts as one.
        seconds: Wall time of the parts that took place: ``"native_start"``, ``"map"``,
            ``"native_end"``.
    """

    cache: list[Any]
    native_start: int
    reused: int
    mapped: int
    native_end: int
    seconds: Mapping[str, float]


def map_cache(
    source_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    *,
    n_tokens: int | None = None,
    start_cache: Sequence[Any] | None = None,
    target_geometry: ModelGeometry | None = None,
    row: int | None = None,
    unload_after: bool = True,
    consume: bool = False,
    on_layer: Callable[[int], None] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> list[Any]:
    """Map a source model's prompt cache into one for ``target``.

    The cache covers the same tokens at the same positions. The target reads the
    last token of the conversation itself, so map the cache of all tokens but one.
    :func:`map_prompt` also lets the target read tokens at both ends.

    Args:
        source_cache: mlx-lm prompt cache filled by the source; not changed unless
            ``consume``.
        mapper: Mapper for this pair.
        target: The live target model; its dtype and geometry decide what is written.
        n_tokens: Map only the first ``n_tokens``; default all.
        start_cache: A cache of the target's own that holds the first of these tokens.
            Its rows are copied, and only those after them are mapped.
        target_geometry: The target's geometry if it was read before.
        row: Which conversation of a batch cache to map.
        unload_after: Keep at most one layer's mapper weights in memory.
        consume: Empty ``source_cache``, a list, and drop each of its layers as
            soon as no later target layer needs it.
        on_layer: Called after each target layer with its index.
        kv_bits: See :func:`kvgraft.cache.build_cache`.
        kv_group_size: See :func:`kvgraft.cache.build_cache`.

    Returns:
        A prompt cache for ``target``, evaluated, marked as mapped.

    Raises:
        CacheError: If a cache is empty, inconsistent or of a class that is not
            supported, or holds fewer tokens than asked for.
        NothingToMapError: If ``start_cache`` holds all of the tokens.
        PairMismatchError: If the cache or the target is not what the mapper was
            fitted for.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> from mlx_lm import load
        >>> source, tokenizer = load(str(bundled("models/large")))
        >>> target, _ = load(str(bundled("models/small")))
        >>> tokens = tokenizer.encode("Once upon a time there was a small dog in a big house.")
        >>> mapper = kvgraft.load_mapper(bundled("mapper"))
        >>> cache = kvgraft.map_cache(kvgraft.prefill(source, tokens[:-1]), mapper, target)
        >>> len(cache), cache[0].offset == len(tokens) - 1
        (3, True)
    """
    geometry = _target_geometry(mapper, target, target_geometry)
    snapshot = read_cache(source_cache, mapper.source, row=row)
    before = provenance_of(source_cache)
    own = None if start_cache is None else read_cache(start_cache, geometry)
    start = 0 if own is None else own.offset
    stop = snapshot.offset if n_tokens is None else n_tokens
    _check_stretch(start, stop, snapshot.offset)
    snapshot = cut_snapshot(snapshot, stop, mapper.source)
    ranges = required_ranges(snapshot, geometry)
    if kv_bits is not None:
        check_quantizable(geometry, kv_bits, kv_group_size, ranges.size_limit)
    rows = snapshot.source_kv()
    del snapshot
    if consume:
        _drop_unused(source_cache, rows, mapper)
    to_map = TokenRanges.of([(start, stop)])
    mapped = transfer.iter_transfer(
        rows, mapper, unload_after=unload_after, dtype=geometry.mx_dtype, consume=consume,
        available=ranges.available, check_finite=True,
        required={layer: required & to_map for layer, required in ranges.required.items()},
    )  # fmt: skip
    return build_cache(
        geometry,
        _joined(mapped, own, ranges.required, on_layer),
        provenance=_provenance(mapper, start, stop, before, provenance_of(start_cache or ())),
        token_ranges=[ranges.required[layer] for layer in range(len(geometry.layers))],
        size_limit=ranges.size_limit,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )


def _drop_unused(
    source_cache: Sequence[Any], rows: MutableMapping[int, Any], mapper: Mapper
) -> None:
    """Empty the cache, whose rows ``rows`` holds, and drop layers that the mapper doesn't use."""
    if not isinstance(source_cache, list):
        raise CacheError("To be consumed, the source cache must be a list.")
    source_cache.clear()
    for layer in set(rows) - set(mapper.source_layers):
        del rows[layer]


def map_prompt(
    source_cache: Sequence[Any],
    mapper: Mapper,
    target: Module,
    tokens: Sequence[int] | None = None,
    *,
    n_tokens: int | None = None,
    native_start: int | None = None,
    native_end: int | None = None,
    start_cache: list[Any] | None = None,
    step: int = 2048,
    on_start_step: Callable[[int], None] | None = None,
    **options: Unpack[MapOptions],
) -> MappedPrompt:
    """Make the target's cache of a prompt: native start, mapped middle, native end.

    The target reads the first ``native_start`` tokens itself, the rows after them are
    mapped, and the target reads the last ones on top of that. Which tokens are which
    is decided by :func:`split_prompt`, whose rules hold for every caller.

    Args:
        source_cache: See :func:`map_cache`.
        mapper: Mapper for this pair.
        target: The live target model.
        tokens: Ids of the tokens in the resulting cache; the one that generation
            continues from may follow. Needed where the target reads any of them.
        n_tokens: Tokens that the resulting cache holds; default as many as
            ``source_cache``, which may hold more, or fewer.
        native_start: Tokens at the start that the target reads itself; default what
            the mapper's evaluation recommends.
        native_end: Tokens at the end that the target reads itself. The one that
            generation continues from, which is not part of the cache, counts: with 1
            all that ``source_cache`` holds is mapped. Default likewise.
        start_cache: A cache of the target's own that holds the first of the tokens,
            or none yet. The native start is at least what it holds. Used up.
        step: Tokens per forward pass of the target.
        on_start_step: Called after each forward pass over the native start, with the
            tokens read so far.
        options: See :func:`map_cache`.

    Raises:
        NothingToMapError: If native start and end leave nothing to map, before any
            work; ``start_cache`` is as it was.
        CacheError: As :func:`map_cache`; or if native start or end are out of range,
            or need token ids and ``tokens`` are not as many as the cache's.
        PairMismatchError: As :func:`map_cache`.
        TokenIdError: If the target does not have all of the tokens.
    """
    geometry = _target_geometry(mapper, target, options.get("target_geometry"))
    options["target_geometry"] = geometry
    available = read_cache(source_cache, mapper.source, row=options.get("row")).offset
    n = available if n_tokens is None else n_tokens
    reused = 0 if start_cache is None else inspect.n_tokens(start_cache)
    start, end = mapper.quality.native_ends(native_start, native_end)
    check_native_ends(start, end)
    ids = _token_ids(tokens, n) if max(start, end - 1, n - available) > 0 else []
    split = split_prompt(n, max(start, reused), end, available=available)
    seconds: dict[str, float] = {}
    own: list[Any] | None = None
    if split.native_start:
        with timed(seconds, "native_start"):
            own = list(make_prompt_cache(target)) if start_cache is None else start_cache
            unread = ids[reused : split.native_start]
            extend_cache(target, unread, own, step=step, on_step=on_start_step)
    with timed(seconds, "map"):
        cache = map_cache(
            source_cache, mapper, target, n_tokens=split.stop, start_cache=own, **options
        )
    del own
    if start_cache is not None:
        start_cache.clear()  # its rows were copied
    if split.stop < n:
        with timed(seconds, "native_end"):
            extend_cache(target, ids[split.stop : n], cache, step=step)
    return MappedPrompt(cache, split.native_start, reused, split.mapped, split.native_end, seconds)


def split_prompt(
    n_tokens: int, native_start: int, native_end: int, *, available: int | None = None
) -> PromptSplit:
    """Decide which tokens of a prompt are mapped.

    * The first ``native_start`` tokens are the target's own.
    * The last ``native_end`` are too. These are counted with the token that generation
      continues from, so of the ``n_tokens`` in the cache the last ``native_end - 1``.
    * What the source's cache does not hold is not mapped: the native end grows.
    * Everything in between is mapped, at least one token. Otherwise nothing is: this
      raises, and the caller decides whether to re-prefill or to refuse.

    Args:
        n_tokens: Tokens that the target's cache is to hold: all of the prompt but the
            last.
        native_start: Tokens at the start that the target reads itself.
        native_end: Tokens at the end that the target reads itself.
        available: Tokens that the source's cache holds; default enough.

    Raises:
        NothingToMapError: If nothing is left to map.
        CacheError: If ``native_start`` is negative or ``native_end`` below 1.
    """
    check_native_ends(native_start, native_end)
    stop = n_tokens + 1 - native_end
    if available is not None:
        stop = min(stop, available)
    if native_start >= stop:
        raise NothingToMapError(
            f"Of {n_tokens + 1} tokens the target reads the first {native_start} and the last "
            f"{native_end} itself: nothing is left to map."
        )
    return PromptSplit(n_tokens, native_start, stop)


def check_native_ends(native_start: int, native_end: int) -> None:
    """Check native start and end by themselves, before any work.

    Raises:
        CacheError: If ``native_start`` is negative or ``native_end`` below 1.
    """
    if native_start < 0:
        raise CacheError(f"{named('native_start')} is a number of tokens, not {native_start}.")
    if native_end < 1:
        raise CacheError(
            f"{named('native_end')} must be at least 1, not {native_end}: it counts the token that "
            "generation continues from, which the target always reads itself."
        )


def _target_geometry(
    mapper: Mapper, target: Module, geometry: ModelGeometry | None
) -> ModelGeometry:
    """The target's geometry; raises if the mapper was fitted for another model."""
    require_mapper(mapper)
    geometry = read_geometry(target) if geometry is None else geometry
    check_pair(mapper, target=geometry)
    return geometry


def _token_ids(tokens: Sequence[int] | None, n_tokens: int) -> Sequence[int]:
    if tokens is None or len(tokens) not in (n_tokens, n_tokens + 1):
        raise CacheError(
            f"The target needs the ids of the {n_tokens} tokens to read some of them itself; "
            f"{'none' if tokens is None else len(tokens)} were given."
        )
    return tokens


def _check_stretch(start: int, stop: int, available: int) -> None:
    if stop > available:
        raise CacheError(f"The source cache holds {available} tokens, not the {stop} asked for.")
    if start >= stop:
        raise NothingToMapError(
            f"Nothing to map: the target's own cache holds {start} tokens already, of {stop}."
        )


def _joined(
    mapped: Iterable[Layer],
    own: CacheSnapshot | None,
    required: Mapping[int, TokenRanges],
    on_layer: Callable[[int], None] | None,
) -> Iterator[tuple[mx.array, mx.array]]:
    """Each target layer's rows, the target's own first."""
    for layer, keys, values in mapped:
        if own is not None:
            keys, values = _behind(own.rows[layer], required[layer], keys, values)
        yield keys, values
        if on_layer is not None:
            on_layer(layer)


def _behind(
    own: LayerRows, required: TokenRanges, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Mapped rows after those of ``required`` that the target has itself."""
    part = own.token_ranges & required
    if not len(part):
        return keys, values
    k, v = (own.token_ranges.take(part, x) for x in own.pair())
    return (
        mx.concatenate([k.astype(keys.dtype), keys], axis=-2),
        mx.concatenate([v.astype(values.dtype), values], axis=-2),
    )


def _provenance(
    mapper: Mapper,
    start: int,
    stop: int,
    before: Provenance | None,
    native_start: Provenance | None,
) -> Provenance:
    source, target = mapper.source_model, mapper.target_model
    return Provenance(
        source=source.name if source else mapper.source.model_type,
        target=target.name if target else mapper.target.model_type,
        mapper=mapper.describe(),
        n_tokens=stop - start,
        start=start,
        before=before,
        native_start=None if native_start is None else native_start.first(start),
    )
