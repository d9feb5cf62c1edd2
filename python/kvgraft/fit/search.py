"""Selecting k and head mapping by the target's loss with the mapped cache.

R² ranks the source layers of a pair well enough, but misleads about how many of
them to use: more features always raise it in-sample, often on held-out text
too, while the target's loss gets worse. So candidates are compared by the loss of
the target on held-out text whose first part it has only as a mapped cache (the molt
mappers choose k by the same number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft import cache as caches
from kvgraft.errors import FitError
from kvgraft.fit.config import STORED_KEYS, FitConfig
from kvgraft.fit.features import common_heads
from kvgraft.fit.weight_format import storage_problem
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.forward import continuation_nll, prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named
from kvgraft.progress import Notify

__all__ = [
    "Documents",
    "Trial",
    "choose",
    "head_mappings_to_try",
    "ks_to_try",
    "read_documents",
    "score",
    "trace",
    "with_target_nll",
]

K_TO_TRY = (1, 2, 4, 8, 12, 16, 24)
"""Numbers of source layers that are compared, up to those that the source has."""

TOLERANCE = 0.002
"""Nats per token by which a larger map must be better than a smaller one."""

_PATIENCE = 2


@dataclass(frozen=True)
class Documents:
    """Held-out text of which the source has read the first part.

    Attributes:
        tokens: ``[n, length]`` token ids.
        prefix: Tokens before the scored part. The caches hold one less: the last
            one is the native end of one token, as in a hand-off.
        source: Per document ``{layer: (keys, values)}`` as the source cached them,
            ``[1, n_kv_heads, prefix - 1, head_dim]``.
        native_nll: Loss per document of the target with its native cache, nats per
            token.
        no_context_nll: The same without the first part.
        source_nll: The same of the source with its own cache.
    """

    tokens: NDArray[np.int32]
    prefix: int
    source: list[dict[int, tuple[mx.array, mx.array]]]
    native_nll: Sequence[float] = ()
    no_context_nll: Sequence[float] = ()
    source_nll: Sequence[float] = ()


@dataclass(frozen=True)
class Trial:
    """One candidate, as it was measured.

    Attributes:
        head_mapping: Head mapping.
        k: Source layers of the keys.
        k_values: Source layers of the values.
        source_layers: ``"shared"`` or ``"separate"``.
        ridge_lambda: λ, or ``"auto"``.
        n_parameters: Size of the map.
        nll: Mean loss over the documents, nats per token.
        gap: Mean of the loss minus that with the native cache.
        gap_error: Standard error of ``gap`` over documents.
        r2_keys: Mean held-out R² of the keys.
        r2_values: Mean held-out R² of the values.
        chosen: Whether this candidate became the mapper.
    """

    head_mapping: str
    k: int | str
    k_values: int | str
    source_layers: str
    ridge_lambda: float | str
    n_parameters: int
    nll: float
    gap: float
    gap_error: float
    r2_keys: float
    r2_values: float
    chosen: bool = False

    def line(self) -> str:
        """One row of the trace."""
        values = "" if self.k_values == self.k else f" (values {self.k_values})"
        extra = "" if self.source_layers == "shared" else ", separate layers"
        return (
            f"{self.head_mapping} k={self.k}{values}{extra}, lambda "
            f"{_number(self.ridge_lambda)}: loss {self.nll:.4f}, {self.gap:+.4f} ± "
            f"{self.gap_error:.4f} against the native cache; R2 {self.r2_keys:.3f}/"
            f"{self.r2_values:.3f}; {self.n_parameters / 1e6:.1f} M parameters"
        )


def head_mappings_to_try(
    source: ModelGeometry, target: ModelGeometry, config: FitConfig
) -> list[str]:
    """Head mappings to compare for a pair, the cheapest first."""
    if config.head_mapping != "auto":
        return [config.head_mapping]
    if common_heads(source, target) is not None:
        return ["local"] if config.structure == "heads" else ["local", "full"]
    return ["grouped", "full"]


def ks_to_try(source: ModelGeometry, config: FitConfig) -> list[int | str]:
    """Numbers of source layers to compare, ascending."""
    if config.k != "auto":
        return [config.k]
    n = len(source.layers)
    ks: list[int | str] = [k for k in K_TO_TRY if k < n]
    return [*ks, n] if n <= K_TO_TRY[-1] else ks


def read_documents(
    model: Any, tokens: NDArray[np.int32], prefix: int, *, score_source: bool = True
) -> Documents:
    """Read the first part of held-out text with the source, and keep its caches.

    Args:
        model: The source.
        tokens: ``[n, length]`` token ids.
        prefix: Tokens before the scored part.
        score_source: Measure the source's own loss, too.

    Raises:
        FitError: If nothing would be scored.
        CacheError: If the model's caches cannot be handed over yet.
    """
    if not 2 <= prefix < tokens.shape[1]:
        raise FitError(
            f"{named('prefix')} {prefix} leaves nothing to score of {tokens.shape[1]} tokens."
        )
    source, losses = [], []
    for row in tokens:
        # In one step, so that sliding-window layers still hold all of it.
        cache = prefill(model, row[: prefix - 1].tolist(), step=prefix)
        snapshot = caches.read_cache(cache)
        # Copies: scoring the source writes into its buffers.
        kept = {i: (mx.contiguous(k), mx.contiguous(v)) for i, (k, v) in enumerate(snapshot.layers)}
        mx.eval(kept)
        source.append(kept)
        if score_source:
            rest = row[prefix - 1 :].tolist()
            losses.append(float(continuation_nll(model, cache, rest).mean()))
        mx.clear_cache()
    return Documents(tokens, prefix, source, source_nll=losses)


def with_target_nll(documents: Documents, model: Any) -> Documents:
    """The same documents with the target's loss, with its native cache and without context."""
    at, native, without = documents.prefix - 1, [], []
    for row in documents.tokens:
        cache = prefill(model, row[:at].tolist())
        rest = row[at:].tolist()
        native.append(float(continuation_nll(model, cache, rest).mean()))
        without.append(float(continuation_nll(model, None, rest).mean()))
        mx.clear_cache()
    return replace(documents, native_nll=native, no_context_nll=without)


def score(mapper: Mapper, documents: Documents, model: Any, geometry: ModelGeometry) -> list[float]:
    """Loss per document of the target with a mapped cache, nats per token.

    Args:
        mapper: The mapper.
        documents: What the source has read.
        model: The target.
        geometry: The target's geometry.
    """
    at, losses = documents.prefix - 1, []
    for row, source in zip(documents.tokens, documents.source, strict=True):
        mapped = iter_transfer(source, mapper, unload_after=False, dtype=geometry.mx_dtype)
        cache = caches.build_cache(geometry, ((k, v) for _, k, v in mapped))
        losses.append(float(continuation_nll(model, cache, row[at:].tolist()).mean()))
        mx.clear_cache()
    return losses


def choose(
    solve: Callable[[FitConfig], Mapper],
    documents: Documents,
    model: Any,
    source: ModelGeometry,
    target: ModelGeometry,
    config: FitConfig,
    *,
    fits: Callable[[FitConfig], bool] = lambda config: True,
    notify: Notify | None = None,
) -> tuple[Mapper, list[Trial]]:
    """Compare candidates and return the best.

    First every head mapping with growing k, until the loss has risen twice in a row;
    then variations of the best: more source layers for the values, separate layers for
    keys and values, λ by held-out R², larger λ. A larger map must be better than a
    smaller one by :data:`TOLERANCE`.

    Args:
        solve: Makes the mapper of a candidate.
        documents: Held-out text; see :func:`read_documents` and :func:`with_target_nll`.
        model: The target.
        source: Geometry of the source.
        target: Geometry of the target.
        config: ``k`` and ``head_mapping`` are searched where they are ``"auto"``.
        fits: Whether a candidate can be solved within the memory limit.
        notify: Called with one line per candidate.

    Returns:
        The best mapper, and all candidates in the order they were tried.

    Raises:
        FitError: If no candidate can be solved or none gives a finite loss.
    """

    def attempt(candidate: FitConfig) -> tuple[Trial, Mapper]:
        mapper = solve(candidate)
        losses = score(mapper, documents, model, target)
        return _trial(mapper, candidate, losses, documents.native_nll), mapper

    def storable(candidate: FitConfig) -> str | None:
        return storage_problem(source, target, candidate)

    search = _Search(attempt, storable, fits, notify or (lambda line: None))
    ks = ks_to_try(source, config)
    for mapping in head_mappings_to_try(source, target, config):
        search.grow([replace(config, head_mapping=mapping, k=k) for k in ks])
    if search.best is None:
        raise FitError(
            "None of the candidates gives the target a finite loss: "
            + ("; ".join(trial.line() for trial in search.trials) or "none could be solved")
            + "."
        )
    if config.k == "auto":
        search.vary(_variations(search.best.config, len(source.layers)))
    best = search.best
    return best.mapper, [replace(t, chosen=t is best.trial) for t in search.trials]


@dataclass(frozen=True)
class _Best:
    trial: Trial
    config: FitConfig
    mapper: Mapper


class _Search:
    """The candidates tried so far, and the best of them."""

    def __init__(
        self,
        attempt: Callable[[FitConfig], tuple[Trial, Mapper]],
        storage_problem: Callable[[FitConfig], str | None],
        fits: Callable[[FitConfig], bool],
        notify: Notify,
    ) -> None:
        self._attempt = attempt
        self._storage_problem = storage_problem
        self._fits = fits
        self._notify = notify
        self.trials: list[Trial] = []
        self.best: _Best | None = None

    def grow(self, candidates: Sequence[FitConfig]) -> None:
        """Try candidates of growing size, until the loss has risen twice in a row."""
        lowest, worse = float("inf"), 0
        for candidate in candidates:
            problem = self._storage_problem(candidate)
            if problem is not None:
                self._notify(f"{_name(candidate)} is left out: {problem}.")
                continue
            trial = self._try(candidate)
            if trial is None:
                return
            worse = worse + 1 if trial.nll > lowest else 0
            lowest = min(lowest, trial.nll)
            if worse >= _PATIENCE:
                return

    def vary(self, candidates: Iterable[FitConfig]) -> None:
        """Try all candidates that can be stored."""
        for candidate in candidates:
            if self._storage_problem(candidate) is None:
                self._try(candidate)

    def _try(self, candidate: FitConfig) -> Trial | None:
        """Solve and score a candidate; ``None`` if it exceeds the memory limit."""
        if not self._fits(candidate):
            self._notify(f"{_name(candidate)} needs more memory than the limit allows.")
            return None
        trial, mapper = self._attempt(candidate)
        self.trials.append(trial)
        self._notify(trial.line())
        if np.isfinite(trial.nll) and (self.best is None or _better(trial, self.best.trial)):
            self.best = _Best(trial, candidate, mapper)
        return trial


def trace(documents: Documents, trials: Sequence[Trial]) -> dict[str, Any]:
    """What the artifact records of the search, JSON-ready."""
    n, length = documents.tokens.shape
    return {
        "documents": n,
        "prefix": documents.prefix,
        "scored_tokens": n * (length - documents.prefix),
        "nll_source_alone": float(np.mean(documents.source_nll)),
        "nll_without_context": float(np.mean(documents.no_context_nll)),
        "trials": [
            {
                # JSON has no NaN and no infinity.
                STORED_KEYS.get(name, name): (
                    None if isinstance(value, float) and not np.isfinite(value) else value
                )
                for name, value in asdict(trial).items()
            }
            for trial in trials
        ],
    }


def _variations(best: FitConfig, n_layers: int) -> Iterator[FitConfig]:
    """Candidates that differ from ``best`` in one setting."""
    if best.k_values is None and isinstance(best.k, int) and best.k < n_layers:
        yield replace(best, k_values=min(2 * best.k, n_layers))
    if best.source_layers == "shared" and best.k != "all" and best.k != n_layers:
        yield replace(best, source_layers="separate")
    if isinstance(best.ridge_lambda, str):
        return
    yield replace(best, ridge_lambda="auto")
    for factor in (1e2, 1e4):
        yield replace(best, ridge_lambda=best.ridge_lambda * factor)


def _name(config: FitConfig) -> str:
    return f"{config.head_mapping} k={config.k}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _better(trial: Trial, best: Trial) -> bool:
    """Whether a trial has the lower loss, by :data:`TOLERANCE` if it is larger."""
    if trial.n_parameters > best.n_parameters:
        return trial.nll < best.nll - TOLERANCE
    if trial.n_parameters < best.n_parameters:
        return trial.nll <= best.nll + TOLERANCE
    return trial.nll < best.nll


def _trial(
    mapper: Mapper, config: FitConfig, losses: Sequence[float], native: Sequence[float]
) -> Trial:
    gaps = np.array(losses) - np.array(native)
    with np.errstate(invalid="ignore"):  # a loss may be infinite or NaN
        error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else 0.0
    return Trial(
        config.head_mapping,
        config.k,
        config.k_of_values,
        config.source_layers,
        config.ridge_lambda,
        mapper.n_parameters,
        float(np.mean(losses)),
        float(gaps.mean()),
        error,
        float(mapper.fit.get("mean_r2_keys", float("nan"))),
        float(mapper.fit.get("mean_r2_values", float("nan"))),
    )
