"""Choosing k and head plan by what the target makes of the mapped cache.

R² ranks source layers within a pair well enough, and is wrong about how many of
them to take: more features always raise it in-sample, often on held-out text
too, while the target gets worse. So candidates are compared by the loss of the
target on held-out text whose first part it has only as a mapped cache (the molt
mappers choose k by the same number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvgraft import cache as caches
from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import common_heads
from kvgraft.fit.weight_format import storage_problem
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.forward import continuation_nll, prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = [
    "Documents",
    "Trial",
    "choose",
    "ks_to_try",
    "plans_to_try",
    "read_documents",
    "score",
    "trace",
    "with_own",
]

K_TO_TRY = (1, 2, 4, 8, 12, 16, 24)
"""Numbers of source layers that are compared; those beyond the source's are left out."""

TOLERANCE = 0.002
"""Nats by which a larger map must be better than a smaller one."""

_PATIENCE = 2


@dataclass(frozen=True)
class Documents:
    """Held-out text of which the source has read the first part.

    Attributes:
        tokens: ``[n, length]`` token ids.
        prefix: Tokens before the scored part. The caches hold one less: the last
            one is read by the target itself, as in a hand-off.
        source: The source's cached keys and values of each document, per layer.
        native: Loss per document of the target with its own cache.
        without: Loss per document of the target on the scored part alone.
        alone: Loss per document of the source going on by itself.
    """

    tokens: NDArray[np.int32]
    prefix: int
    source: list[dict[int, tuple[mx.array, mx.array]]]
    native: Sequence[float] = ()
    without: Sequence[float] = ()
    alone: Sequence[float] = ()


@dataclass(frozen=True)
class Trial:
    """One candidate, as it was measured.

    Attributes:
        plan: Head plan.
        k: Source layers of the keys.
        k_values: Source layers of the values.
        layers: ``"shared"`` or ``"separate"``.
        ridge_lambda: λ, or ``"auto"``.
        n_parameters: Size of the map.
        nll: Mean loss over the documents, nats per token.
        gap: Mean of the loss minus that of the target's own cache.
        gap_error: Standard error of ``gap`` over documents.
        r2_keys: Mean held-out R² of the keys.
        r2_values: Mean held-out R² of the values.
        chosen: Whether this candidate became the mapper.
    """

    plan: str
    k: int | str
    k_values: int | str
    layers: str
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
        extra = "" if self.layers == "shared" else ", separate layers"
        return (
            f"{self.plan} k={self.k}{values}{extra}, lambda {_number(self.ridge_lambda)}: loss "
            f"{self.nll:.4f}, {self.gap:+.4f} ± {self.gap_error:.4f} against the target's own "
            f"cache; R2 {self.r2_keys:.3f}/{self.r2_values:.3f}; "
            f"{self.n_parameters / 1e6:.1f} M parameters"
        )


def plans_to_try(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> list[str]:
    """Head plans to compare for a pair: the cheap one first."""
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
    model: Any, tokens: NDArray[np.int32], prefix: int, *, alone: bool = True
) -> Documents:
    """Let the source read the first part of held-out text, and keep its caches.

    Args:
        model: The source.
        tokens: ``[n, length]`` token ids.
        prefix: Tokens before the scored part.
        alone: Score the source going on by itself, too.

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
        # In one call, after which sliding layers still hold all of it.
        cache = prefill(model, row[: prefix - 1].tolist(), step=prefix)
        snapshot = caches.read_cache(cache)
        # Copies: scoring the source on its own writes into its buffers.
        kept = {i: (mx.contiguous(k), mx.contiguous(v)) for i, (k, v) in enumerate(snapshot.layers)}
        mx.eval(kept)
        source.append(kept)
        if alone:
            rest = row[prefix - 1 :].tolist()
            losses.append(float(continuation_nll(model, cache, rest).mean()))
        mx.clear_cache()
    return Documents(tokens, prefix, source, alone=losses)


def with_own(documents: Documents, model: Any) -> Documents:
    """Add what the target makes of its own caches, and of no context at all."""
    at, native, without = documents.prefix - 1, [], []
    for row in documents.tokens:
        cache = prefill(model, row[:at].tolist())
        rest = row[at:].tolist()
        native.append(float(continuation_nll(model, cache, rest).mean()))
        without.append(float(continuation_nll(model, None, rest).mean()))
        mx.clear_cache()
    return replace(documents, native=native, without=without)


def score(mapper: Mapper, documents: Documents, model: Any, geometry: ModelGeometry) -> list[float]:
    """Loss per document of the target going on from a mapped cache.

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
    notify: Callable[[str], None] | None = None,
) -> tuple[Mapper, list[Trial]]:
    """Compare candidates and return the best.

    First every plan with growing k, until the loss has risen twice in a row;
    then variations of the winner: more source layers for the values, separate
    layers for keys and values, λ by held-out R², stronger λ. A larger map must beat a smaller one
    by :data:`TOLERANCE`.

    Args:
        solve: Makes the mapper of a candidate.
        documents: Held-out text; see :func:`read_documents` and :func:`with_own`.
        model: The target.
        source: Geometry of the source.
        target: Geometry of the target.
        config: ``k`` and ``plan`` are tried where they are ``"auto"``.
        fits: Whether a candidate can be solved in the memory there is.
        notify: Called with one line per candidate.

    Raises:
        FitError: If no candidate can be solved or none gives a finite loss.
    """
    trials: list[tuple[Trial, FitConfig]] = []
    kept: tuple[Trial, Mapper] | None = None

    def attempt(candidate: FitConfig) -> Trial | None:
        nonlocal kept
        if not fits(candidate):
            if notify is not None:
                notify(
                    f"{candidate.head_mapping} k={candidate.k} needs more memory than the limit "
                    "allows."
                )
            return None
        mapper = solve(candidate)
        trial = _trial(mapper, candidate, score(mapper, documents, model, target), documents.native)
        trials.append((trial, candidate))
        if notify is not None:
            notify(trial.line())
        if np.isfinite(trial.nll) and (kept is None or _better(trial, kept[0])):
            kept = trial, mapper
        return trial

    def cannot_be_stored(candidate: FitConfig) -> bool:
        problem = storage_problem(source, target, candidate)
        if problem is not None and notify is not None:
            notify(f"{candidate.head_mapping} k={candidate.k} is left out: {problem}.")
        return problem is not None

    for plan in plans_to_try(source, target, config):
        lowest, worse = float("inf"), 0
        for k in ks_to_try(source, config):
            if cannot_be_stored(replace(config, head_mapping=plan, k=k)):
                continue
            trial = attempt(replace(config, head_mapping=plan, k=k))
            if trial is None:
                break
            worse = worse + 1 if trial.nll > lowest else 0
            lowest = min(lowest, trial.nll)
            if worse >= _PATIENCE:
                break
    if kept is None:
        raise FitError(
            "None of the candidates gives the target a finite loss: "
            + ("; ".join(trial.line() for trial, _ in trials) or "none could be solved")
            + "."
        )
    if config.k == "auto":
        won = next(candidate for trial, candidate in trials if trial is kept[0])
        for candidate in _variations(won, len(source.layers)):
            if storage_problem(source, target, candidate) is None:
                attempt(candidate)
    chosen, mapper = kept
    return mapper, [replace(t, chosen=t is chosen) for t, _ in trials]


def trace(documents: Documents, trials: Sequence[Trial]) -> dict[str, Any]:
    """What goes into the artifact, JSON-ready."""
    n, length = documents.tokens.shape
    return {
        "documents": n,
        "prefix": documents.prefix,
        "scored_tokens": n * (length - documents.prefix),
        "nll_source_alone": float(np.mean(documents.alone)),
        "nll_without_context": float(np.mean(documents.without)),
        "trials": [
            {
                # JSON has no NaN and no infinity.
                name: None if isinstance(value, float) and not np.isfinite(value) else value
                for name, value in asdict(trial).items()
            }
            for trial in trials
        ],
    }


def _variations(won: FitConfig, n_layers: int) -> Iterator[FitConfig]:
    if won.k_values is None and isinstance(won.k, int) and won.k < n_layers:
        yield replace(won, k_values=min(2 * won.k, n_layers))
    if won.source_layers == "shared" and won.k != "all" and won.k != n_layers:
        yield replace(won, source_layers="separate")
    if isinstance(won.ridge_lambda, str):
        return
    yield replace(won, ridge_lambda="auto")
    for factor in (1e2, 1e4):
        yield replace(won, ridge_lambda=won.ridge_lambda * factor)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _better(trial: Trial, best: Trial) -> bool:
    """Whether a trial is to be preferred: lower loss, at a price in size."""
    if trial.n_parameters > best.n_parameters:
        return trial.nll < best.nll - TOLERANCE
    if trial.n_parameters < best.n_parameters:
        return trial.nll <= best.nll + TOLERANCE
    return trial.nll < best.nll


def _trial(
    mapper: Mapper, config: FitConfig, losses: Sequence[float], native: Sequence[float]
) -> Trial:
    gaps = np.array(losses) - np.array(native)
    with np.errstate(invalid="ignore"):  # a candidate may lose with infinity or NaN
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
