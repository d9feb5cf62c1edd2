"""The memory plan of a fit: what it needs, and how it stays within a limit.

Moments grow with the square of the features, not with the text. When they do
not fit beside the models, the text is read in several passes, each of which
gathers a part: keys or values, some KV heads, some target layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import KINDS, Columns, common_heads
from kvgraft.fit.moments import Moments
from kvgraft.models.geometry import ModelGeometry
from kvgraft.option_names import named

__all__ = ["FitMemoryPlan", "Part", "plan_fit_memory", "solve_bytes"]

_WORKING_BYTES = 256 << 20
"""Allowance for activations and the interpreter; an estimate."""

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Part:
    """Moments that are gathered as one object.

    Attributes:
        kind: ``"keys"`` or ``"values"``.
        heads: KV heads, in the ``"heads"`` structure; ``None`` for all.
        targets: Target layers; ``None`` for all.
        nbytes: Memory of the fitted and the held-out totals together.
    """

    kind: str
    heads: tuple[int, ...] | None
    targets: tuple[int, ...] | None
    nbytes: int


@dataclass(frozen=True)
class FitMemoryPlan:
    """How much memory a fit uses, and in how many passes.

    Attributes:
        structure: Structure of the moments; see :class:`Moments`.
        passes: Parts per pass over the text.
        spill: Moments go to disk between gathering and solving.
        sequential: The models run one after the other.
        model_bytes: Model weights that are in memory together.
        capture_bytes: One sequence's caches, and the rows that wait to be
            multiplied.
        moment_bytes: The largest pass.
        solve_bytes: The largest system of equations.
        disk_bytes: Peak use of the disk, checkpoints not counted.
        rows: Rows that are fitted on.
        in_dim: Features per system of equations, the larger of keys and values.
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
    """Plan a fit's memory, in several passes if a limit requires it.

    Args:
        source: Geometry of the source.
        target: Geometry of the target.
        config: Settings; ``memory_limit`` bounds the peak.
        model_bytes: Weights of source and target.
        rows: Rows fitted on, if known; else from ``config``.
        sequences: Sequences in all, if known; else from ``config``.

    Raises:
        FitError: If no plan is within the limit; the message says how much the
            smallest one needs.
    """
    per_sequence = len(range(config.skip, config.seq_len, config.stride))
    if rows is None:
        rows = round(config.sequences * (1 - config.heldout)) * per_sequence
    n_sequences = config.sequences if sequences is None else sequences
    stored = n_sequences * per_sequence * _row_bytes(source) if config.sequential else 0
    n_heads = common_heads(source, target)
    for structure in _structures(config, n_heads):
        heads = tuple(range(n_heads or 0)) if structure == "heads" else None
        costs = _Costs(source, target, config, structure, heads, model_bytes, rows, stored)
        plan = costs.smallest_plan(config.memory_limit)
        if config.memory_limit is None or plan.peak_bytes <= config.memory_limit:
            return plan
    raise FitError(_no_room(plan, config, n_heads, model_bytes))


def _structures(config: FitConfig, n_heads: int | None) -> tuple[str, ...]:
    """Structures of the moments that serve a config, the preferred one first."""
    if config.structure != "auto":
        return (config.structure,)
    if config.head_mapping == "auto":
        return ("full",) if n_heads is None else ("full", "heads")
    return ("heads" if config.head_mapping == "local" and n_heads is not None else "full",)


@dataclass(frozen=True)
class _Costs:
    """What all plans of a fit with one structure have in common.

    Attributes:
        heads: KV heads, in the ``"heads"`` structure; else ``None``.
        stored_bytes: The source's rows on disk, where the models run one after the other.
    """

    source: ModelGeometry
    target: ModelGeometry
    config: FitConfig
    structure: str
    heads: tuple[int, ...] | None
    model_bytes: tuple[int, int]
    rows: int
    stored_bytes: int

    def smallest_plan(self, limit: int | None) -> FitMemoryPlan:
        """The plan with the fewest passes within ``limit``; if none is, the one closest to it."""
        whole = [self._part(kind, self.heads, None) for kind in KINDS]
        plan = self._plan([whole], spill=False)
        if limit is None or plan.peak_bytes <= limit:
            return plan
        plan = self._plan([whole], spill=True)
        if plan.peak_bytes <= limit:
            return plan
        return self._split_passes(plan, limit)

    def _split_passes(self, plan: FitMemoryPlan, limit: int) -> FitMemoryPlan:
        """Parts of the moments, as large as ``limit`` allows, packed into passes."""
        room = limit - (plan.peak_bytes - plan.moment_bytes)
        for blocks in _block_counts(len(self.target.layers)):
            for width in _head_widths(self.heads):
                parts = self._parts(width, blocks)
                if max(part.nbytes for part in parts) > max(room, 0):
                    one_each = self._plan([[p] for p in parts], spill=True)
                    plan = min(plan, one_each, key=lambda p: p.peak_bytes)
                    continue
                packed = self._plan(_pack(parts, room), spill=True)
                if packed.peak_bytes <= limit:
                    return packed
        return plan

    def _parts(self, width: int, blocks: int) -> list[Part]:
        """All moments, in parts of ``width`` heads and 1/``blocks`` of the target layers."""
        return [
            self._part(kind, group, span)
            for kind in KINDS
            for group in _chunks(self.heads, width)
            for span in _spans(len(self.target.layers), blocks)
        ]

    def _part(
        self, kind: str, heads: tuple[int, ...] | None, targets: tuple[int, ...] | None
    ) -> Part:
        sizes = [
            Moments.planned_bytes(
                self.source,
                self.target,
                structure=self.structure,
                kinds=(kind,),
                n_heads=None if heads is None else len(heads),
                targets=targets,
                itemsize=itemsize,
            )
            for itemsize in (8, 4)  # fitted on, held out
        ]
        return Part(kind, heads, targets, sum(sizes))

    def _plan(self, passes: Sequence[Sequence[Part]], *, spill: bool) -> FitMemoryPlan:
        sizes = [sum(part.nbytes for part in one) for one in passes]
        in_dim = max(_in_dim(self.source, kind, self.config) for kind in KINDS)
        sequential = self.config.sequential
        return FitMemoryPlan(
            structure=self.structure,
            passes=tuple(tuple(one) for one in passes),
            spill=spill,
            sequential=sequential,
            model_bytes=max(self.model_bytes) if sequential else sum(self.model_bytes),
            capture_bytes=_capture_bytes(self.source, self.target, self.config),
            moment_bytes=max(sizes),
            solve_bytes=_solve_bytes(self.target, in_dim),
            disk_bytes=self.stored_bytes + (sum(sizes) if spill else 0),
            rows=self.rows,
            in_dim=in_dim,
        )


def _no_room(
    plan: FitMemoryPlan, config: FitConfig, n_heads: int | None, model_bytes: tuple[int, int]
) -> str:
    """What to say where even ``plan``, the smallest, is over the limit."""
    advice = ""
    if config.head_mapping != "local" and n_heads is not None:
        advice = f" {named('head_mapping', 'local')} needs less."
    if not config.sequential and min(model_bytes) > 0:
        advice += (
            f" Running the models one after the other ({named('sequential', True)}) saves one of "
            "them."
        )
    return (
        f"{named('memory_limit')} of {_size(config.memory_limit or 0)} is not enough: the smallest "
        f"plan found needs about {_size(plan.peak_bytes)} (models {_size(plan.model_bytes)}, "
        f"moments {_size(plan.moment_bytes)}, solving {_size(plan.solve_bytes)}, activations "
        f"{_size(_WORKING_BYTES)}).{advice} A smaller {named('k')} makes solving smaller."
    )


def solve_bytes(source: ModelGeometry, target: ModelGeometry, config: FitConfig) -> int:
    """Memory of the largest system of equations, in bytes.

    ``k`` and ``head_mapping`` of ``config`` are counted as their smallest candidates
    where they are ``"auto"``.
    """
    in_dim = max(_in_dim(source, kind, config) for kind in KINDS)
    return _solve_bytes(target, in_dim)


def _solve_bytes(target: ModelGeometry, in_dim: int) -> int:
    # The system, the weights while they are solved and stored, and what the
    # scores need.
    out_dim = max(layer.n_kv_heads * max(layer.key_dim, layer.value_dim) for layer in target.layers)
    return 8 * (in_dim * in_dim + 6 * in_dim * out_dim)


def _in_dim(source: ModelGeometry, kind: str, config: FitConfig) -> int:
    """Features of a system; of the smallest candidate where something is ``"auto"``."""
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
    # are collected, once as one matrix (in float64, one kind at a time).
    return config.seq_len * per_token + 2 * floats * (taken + 1024)


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
    """First-fit packing of parts into passes of at most ``room`` bytes."""
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
