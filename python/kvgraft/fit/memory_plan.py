"""Memory before work: what a fit needs, and how to make it fit.

Moments grow with the square of the features, not with the text. When they do
not fit beside the models, the text is gone through several times, each pass
gathering a part: keys or values, some heads, some target layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import KINDS, Columns, common_heads
from kvgraft.fit.moments import Moments
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["FitMemoryPlan", "Part", "plan_fit_memory", "solve_bytes"]

_WORKING_BYTES = 256 << 20
"""Allowed for a model's activations and the interpreter; an estimate."""

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Part:
    """Moments that are gathered as one object.

    Attributes:
        kind: ``"keys"`` or ``"values"``.
        heads: Heads, in the ``"heads"`` structure; ``None`` for all.
        targets: Target layers; ``None`` for all.
        nbytes: Memory of the fitted and the held-out totals together.
    """

    kind: str
    heads: tuple[int, ...] | None
    targets: tuple[int, ...] | None
    nbytes: int


@dataclass(frozen=True)
class FitMemoryPlan:
    """How a fit goes about its memory.

    Attributes:
        structure: Structure of the moments; see :class:`Moments`.
        passes: Parts per pass over the text.
        spill: Moments go to disk between gathering and solving.
        sequential: The models run one after the other.
        model_bytes: Weights that are in memory together.
        capture_bytes: One sequence's caches, and the rows that wait to be
            multiplied.
        moment_bytes: The largest pass.
        solve_bytes: The largest system of equations.
        disk_bytes: Most that is on disk at a time, checkpoints not counted.
        rows: Rows that are fitted on.
        in_dim: Features per system, for keys and values the larger.
    """

    structure: str
    passes: tuple[tuple[Part, ...], ...]
    spill: bool
    sequential: bool
    model_bytes: int
    capture_bytes: int
    moment_bytes: int
    solve_bytes: int
    disk_bytes: int
    rows: int
    in_dim: int

    @property
    def peak_bytes(self) -> int:
        """Estimated peak of the fit's memory."""
        gather = self.model_bytes + self.capture_bytes + self.moment_bytes
        solve = self.solve_bytes + (0 if self.spill else self.moment_bytes)
        return _WORKING_BYTES + max(gather, solve + self.model_bytes)

    def describe(self) -> list[str]:
        """Lines to show before a fit begins."""
        lines = [
            f"models      {_size(self.model_bytes)}"
            + (" (one at a time)" if self.sequential else ""),
            f"capture     {_size(self.capture_bytes)}",
            f"moments     {_size(self.moment_bytes)} ({self.structure})",
            f"solving     {_size(self.solve_bytes)} ({self.in_dim:,} features a system)",
            f"peak        about {_size(self.peak_bytes)}",
            f"disk        {_size(self.disk_bytes)}",
            f"passes      {len(self.passes)} over the text",
        ]
        return lines


def plan_fit_memory(
    source: ModelGeometry,
    target: ModelGeometry,
    config: FitConfig,
    *,
    model_bytes: tuple[int, int] = (0, 0),
    rows: int | None = None,
    sequences: int | None = None,
) -> FitMemoryPlan:
    """Plan a fit's memory, and split it into passes where a limit asks for it.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        config: Settings; ``memory_limit`` bounds the peak.
        model_bytes: Weights of source and target.
        rows: Rows fitted on, if known; else from ``config``.
        sequences: Sequences in all, if known; else from ``config``.

    Raises:
        FitError: If it cannot be done within the limit; the message says what
            would be enough.
    """
    structure = config.structure
    n_heads = common_heads(source, target)
    if structure == "auto" and config.head_mapping == "auto":
        facts: dict[str, Any] = {"model_bytes": model_bytes, "rows": rows, "sequences": sequences}
        try:
            return plan_fit_memory(source, target, replace(config, structure="full"), **facts)
        except FitError:
            if n_heads is None:
                raise
        return plan_fit_memory(source, target, replace(config, structure="heads"), **facts)
    if structure == "auto":
        structure = "heads" if config.head_mapping == "local" and n_heads is not None else "full"
    if rows is None:
        rows = round(config.sequences * (1 - config.heldout)) * len(
            range(config.skip, config.seq_len, config.stride)
        )
    n_sequences = config.sequences if sequences is None else sequences
    heads = tuple(range(n_heads or 0)) if structure == "heads" else None
    in_dim = max(_in_dim(source, kind, config) for kind in KINDS)
    largest = _solve_bytes(target, in_dim)
    models = max(model_bytes) if config.sequential else sum(model_bytes)
    source_row_bytes = _row_bytes(source)
    per_sequence = len(range(config.skip, config.seq_len, config.stride))
    base_disk = n_sequences * per_sequence * source_row_bytes if config.sequential else 0

    def build(passes: Sequence[Sequence[Part]], spill: bool) -> FitMemoryPlan:
        total = sum(part.nbytes for one in passes for part in one)
        return FitMemoryPlan(
            structure,
            tuple(tuple(one) for one in passes),
            spill,
            config.sequential,
            models,
            _capture_bytes(source, target, config),
            max(sum(part.nbytes for part in one) for one in passes),
            largest,
            base_disk + (total if spill else 0),
            rows,
            in_dim,
        )

    whole = [_part(source, target, structure, kind, heads, None) for kind in KINDS]
    plan = build([whole], spill=False)
    if config.memory_limit is None or plan.peak_bytes <= config.memory_limit:
        return plan
    plan = build([whole], spill=True)
    if plan.peak_bytes <= config.memory_limit:
        return plan
    room = config.memory_limit - (plan.peak_bytes - plan.moment_bytes)
    best = plan
    n_targets = len(target.layers)
    for blocks in _block_counts(n_targets):
        for width in _head_widths(heads):
            parts = [
                _part(source, target, structure, kind, group, span)
                for kind in KINDS
                for group in _chunks(heads, width)
                for span in _spans(n_targets, blocks)
            ]
            if max(part.nbytes for part in parts) > max(room, 0):
                best = min(best, build([[p] for p in parts], True), key=lambda p: p.peak_bytes)
                continue
            plan = build(_pack(parts, room), spill=True)
            if plan.peak_bytes <= config.memory_limit:
                return plan
    advice = ""
    if config.head_mapping != "local" and n_heads is not None:
        advice = f" {named('head_mapping', 'local')} needs less."
    if not config.sequential and min(model_bytes) > 0:
        advice += (
            f" Running the models one after the other ({named('sequential', True)}) saves one of "
            "them."
        )
    raise FitError(
        f"{named('memory_limit')} of {_size(config.memory_limit)} is not enough: the least that "
        f"was found is about {_size(best.peak_bytes)} (models {_size(best.model_bytes)}, moments "
        f"{_size(best.moment_bytes)}, solving {_size(best.solve_bytes)}, activations "
        f"{_size(_WORKING_BYTES)}).{advice} A smaller "
        f"{named('k')} makes solving smaller."
    )


def solve_bytes(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> int:
    """Memory of the largest system of a config whose k and plan are settled."""
    in_dim = max(_in_dim(source, kind, config) for kind in KINDS)
    return _solve_bytes(target, in_dim)


def _solve_bytes(target: ModelGeometry, in_dim: int) -> int:
    # The system, the weights while they are solved and stored, and what the
    # scores need.
    out_dim = max(layer.n_kv_heads * max(layer.key_dim, layer.value_dim) for layer in target.layers)
    return 8 * (in_dim * in_dim + 6 * in_dim * out_dim)


def _in_dim(source: ModelGeometry, kind: str, config: FitConfig) -> int:
    """Features of a system; of the smallest candidate where k is to be chosen."""
    columns = Columns.of(source, kind)
    k = 1 if config.k == "auto" else config.k if kind == "keys" else config.k_of_values
    n = len(columns.dims) if k == "all" else min(int(k), len(columns.dims))
    widths = columns.dims if config.head_mapping in ("local", "auto") else columns.widths
    return sum(sorted(widths, reverse=True)[:n])


def _row_bytes(geometry: ModelGeometry) -> int:
    """Bytes of one token's keys and values, in the model's dtype."""
    return _ITEM[geometry.dtype] * sum(Columns.of(geometry, kind).width for kind in KINDS)


def _capture_bytes(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> int:
    per_token = _row_bytes(source) + _row_bytes(target)
    floats = 4 * sum(Columns.of(g, kind).width for g in (source, target) for kind in KINDS)
    taken = len(range(config.skip, config.seq_len, config.stride))
    # The full caches of one sequence, and up to a chunk of rows: once as they
    # wait, once laid side by side for the product (in float64, one kind at a time).
    return config.seq_len * per_token + 2 * floats * (taken + 1024)


def _part(
    source: ModelGeometry,
    target: ModelGeometry,
    structure: str,
    kind: str,
    heads: tuple[int, ...] | None,
    targets: tuple[int, ...] | None,
) -> Part:
    sizes = [
        Moments.planned_bytes(
            source,
            target,
            structure=structure,
            kinds=(kind,),
            n_heads=None if heads is None else len(heads),
            targets=targets,
            itemsize=itemsize,
        )
        for itemsize in (8, 4)  # fitted on, held out
    ]
    return Part(kind, heads, targets, sum(sizes))


def _block_counts(n: int) -> list[int]:
    counts = []
    blocks = 1
    while blocks < n:
        counts.append(blocks)
        blocks *= 2
    return [*counts, n]


def _head_widths(heads: tuple[int, ...] | None) -> list[int]:
    if heads is None:
        return [1]
    widths = []
    width = len(heads)
    while width > 1:
        widths.append(width)
        width = -(-width // 2)
    return [*widths, 1]


def _chunks(heads: tuple[int, ...] | None, width: int) -> list[tuple[int, ...] | None]:
    if heads is None:
        return [None]
    return [heads[i : i + width] for i in range(0, len(heads), width)]


def _spans(n: int, blocks: int) -> list[tuple[int, ...] | None]:
    if blocks == 1:
        return [None]
    edges = [round(i * n / blocks) for i in range(blocks + 1)]
    return [tuple(range(a, b)) for a, b in zip(edges, edges[1:]) if a < b]


def _pack(parts: Sequence[Part], room: int) -> list[list[Part]]:
    """Parts into as few passes as a first fit finds."""
    passes: list[list[Part]] = []
    for part in parts:
        for one in passes:
            if sum(p.nbytes for p in one) + part.nbytes <= room:
                one.append(part)
                break
        else:
            passes.append([part])
    return passes


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
