"""The list of map_layer problems that every implementation has to solve.

Shared by the self-test, the tests of the CPU kernel and the Metal harness, so it
imports neither pytest nor the extension. A :class:`Case` names a problem;
:func:`build` makes its arrays, the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import mlx.core as mx
import numpy as np

from kvgraft.models.rope import NO_ROPE, RopeSpec, RopeTable
from kvgraft.ops.quantized import Weight, dequantize, quantize

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16

# NMSE against float64 over the same inputs and tables. For the narrow types it
# is the rounding of the result, eps^2 / 12 and a little; for float32 the sum.
NMSE_LIMIT = {F32: 1e-12, F16: 1e-7, BF16: 6e-6}


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: Unique; seeds the data.
        tokens: N.
        sources: ``(heads, head_dim)`` per source layer.
        target: ``(heads, head_dim)``.
        plan: ``full``, ``local`` or ``grouped``.
        strip: RoPE of each source layer; one entry stands for all.
        rotate: RoPE of the target.
        cache: dtype of the sources, one entry stands for all.
        weight: dtype of the weights, or their bits.
        group: Group size of quantised weights.
        bias: Whether there is one.
        out: dtype of the result; ``None`` is that of the first source.
        batch: Size of the batch axis, 0 for none.
        layout: How the sources lie in memory, see :func:`lay_out`.
        positions: First position; with ``batched_tables`` each entry of the
            batch has its own.
        batched_tables: Tables ``[B, N, pairs]``.
        scale: Multiplies the sources; large ones saturate float16.
    """

    name: str
    tokens: int = 33
    sources: tuple[tuple[int, int], ...] = ((2, 64), (2, 64))
    target: tuple[int, int] = (2, 64)
    plan: str = "full"
    strip: tuple[RopeSpec, ...] = (NO_ROPE,)
    rotate: RopeSpec = NO_ROPE
    cache: tuple[mx.Dtype, ...] = (F16,)
    weight: mx.Dtype | int = F16
    group: int = 64
    bias: bool = True
    out: mx.Dtype | None = None
    batch: int = 0
    layout: str = "contiguous"
    positions: int = 0
    batched_tables: bool = False
    scale: float = 1.0


@dataclass
class Problem:
    """The arrays of a case, named like the arguments of ``map_layer``."""

    case: Case
    sources: list[mx.array]
    weight: Weight
    bias: mx.array | None
    heads: list[list[int]] | None
    strip: list[RopeTable | None] | None
    rotate: RopeTable | None
    dtype: mx.Dtype | None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of ``map_layer``."""
        return {
            "sources": self.sources,
            "weight": self.weight,
            "bias": self.bias,
            "heads": self.heads,
            "strip": self.strip,
            "rotate": self.rotate,
            "dtype": self.dtype,
        }

    @property
    def result_dtype(self) -> mx.Dtype:
        """Dtype of the result."""
        return self.sources[0].dtype if self.dtype is None else self.dtype

    def plain(self) -> dict[str, object]:
        """The same for the float64 oracle: NumPy arrays, weights dequantised."""

        def wide(x: mx.array) -> np.ndarray:
            return np.array(x.astype(mx.float32)).astype(np.float64)

        return {
            "sources": [wide(s) for s in self.sources],
            "weight": wide(dequantize(self.weight)),
            "bias": None if self.bias is None else wide(self.bias),
            "heads": self.heads,
            "strip": self.strip,
            "rotate": self.rotate,
        }


def lay_out(x: np.ndarray, layout: str, dtype: mx.Dtype) -> mx.array:
    """``x`` ``[..., H, N, D]`` as an array that lies in memory as ``layout`` says.

    ``contiguous``; ``sliced`` (the first tokens of a longer buffer, as mlx-lm
    holds them); ``tokens_first`` (``[N, H, D]`` transposed); ``dims_first``
    (``[D, N]`` transposed); ``stepped`` (every second token); ``reversed``
    (tokens backwards); ``broadcast`` (one head seen as all).
    """

    def make(a: np.ndarray) -> mx.array:
        return mx.array(np.ascontiguousarray(a, dtype=np.float32)).astype(dtype)

    if layout == "contiguous":
        return make(x)
    n = x.shape[-2]
    if layout == "sliced":
        pad = np.full((*x.shape[:-2], 5 + 256, x.shape[-1]), 7.0)
        whole = np.concatenate([pad[..., :5, :], x, pad[..., 5:, :]], axis=-2)
        out = make(whole)
        mx.eval(out)
        return out[..., 5 : 5 + n, :]
    if layout == "tokens_first":
        out = make(x.swapaxes(-2, -3))
        mx.eval(out)
        return out.swapaxes(-2, -3)
    if layout == "dims_first":
        out = make(x.swapaxes(-1, -2))
        mx.eval(out)
        return out.swapaxes(-1, -2)
    if layout == "stepped":
        out = make(np.repeat(x, 2, axis=-2))
        mx.eval(out)
        return out[..., ::2, :]
    if layout == "reversed":
        out = make(x[..., ::-1, :])
        mx.eval(out)
        return out[..., ::-1, :]
    if layout == "broadcast":
        out = make(x[..., :1, :, :])
        mx.eval(out)
        return mx.broadcast_to(out, x.shape)
    raise ValueError(layout)


LAYOUTS = ("sliced", "tokens_first", "dims_first", "stepped", "reversed", "broadcast")


def head_plan(case: Case) -> list[list[int]] | None:
    """Source heads per target head."""
    fewest = min(heads for heads, _ in case.sources)
    n = case.target[0]
    if case.plan == "full":
        return None
    if case.plan == "local":
        return [[h % fewest] for h in range(n)]
    if case.plan == "grouped":  # out of order, and one head serves two
        return [[(h + 1) % fewest, h % fewest] for h in range(n)]
    raise ValueError(case.plan)


def build(case: Case) -> Problem:
    """The arrays of a case."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    lead = (case.batch,) if case.batch else ()
    cache = case.cache * len(case.sources) if len(case.cache) == 1 else case.cache
    sources = []
    for (n_source, dim), dtype in zip(case.sources, cache, strict=True):
        x = rng.standard_normal((*lead, n_source, case.tokens, dim)) * case.scale
        sources.append(lay_out(x, case.layout, dtype))
    planned = head_plan(case)
    width = None if planned is None else len(planned[0])
    in_dim = sum((h if width is None else width) * d for h, d in case.sources)
    n_heads, out_dim = case.target
    w = rng.standard_normal((n_heads, in_dim, out_dim)) / np.sqrt(max(in_dim, 1))
    plain = mx.array(w.astype(np.float32))
    weight: Weight
    if isinstance(case.weight, int):
        weight = quantize(plain.astype(F16), bits=case.weight, group_size=case.group)
        small = F16
    else:
        weight = plain.astype(case.weight)
        small = case.weight
    bias = None
    if case.bias:
        bias = mx.array(rng.standard_normal((n_heads, out_dim)).astype(np.float32)).astype(small)

    steps = np.arange(case.tokens, dtype=np.int32) + case.positions
    if case.batched_tables:
        steps = steps + 11 * np.arange(case.batch, dtype=np.int32)[:, None]
    positions = mx.array(steps)
    tables: dict[RopeSpec, RopeTable | None] = {}

    def strip_table(spec: RopeSpec) -> RopeTable | None:
        if spec not in tables:
            tables[spec] = spec.table(positions, inverse=True)
        return tables[spec]

    specs = case.strip * len(case.sources) if len(case.strip) == 1 else case.strip
    strip = None if case.strip == (NO_ROPE,) else [strip_table(s) for s in specs]
    return Problem(
        case, sources, weight, bias, planned, strip, case.rotate.table(positions), case.out
    )


HALF = RopeSpec(64, base=1e4)
ROPES = {
    "half": ((HALF,), RopeSpec(64, base=1e6)),
    "partial": ((RopeSpec(32, base=1e4),), RopeSpec(16, base=5e5)),
    "traditional": ((RopeSpec(64, True, base=1e4),), RopeSpec(64, True, base=1e6)),
    "traditional_partial": ((RopeSpec(24, True, base=1e4),), RopeSpec(40, True, base=1e6)),
    "magnitude": (
        (RopeSpec(64, freqs=tuple(1.5**i for i in range(32)), magnitude=1.2),),
        RopeSpec(64, base=1e6, magnitude=0.8),
    ),
    "odd_pairs": ((RopeSpec(6, base=1e4),), RopeSpec(10, base=1e6)),
    "per_layer": ((HALF, NO_ROPE), RopeSpec(64, True, base=1e4)),
    "two_tables": ((HALF, RopeSpec(64, base=5e5, scale=0.125)), HALF),
}

GEOMETRIES = {
    "d80": (((2, 80), (2, 80)), (2, 80)),
    "d96": (((2, 96), (2, 96)), (2, 96)),
    "d128": (((2, 128), (2, 128)), (2, 128)),
    "d24": (((3, 24), (3, 24)), (3, 24)),
    "d256": (((1, 256),), (1, 256)),
    "d7": (((2, 7), (1, 9)), (3, 5)),
    "one_wide": (((1, 64),), (1, 64)),
    "unequal_pair": (((2, 64), (2, 64)), (5, 128)),
    "unequal_sources": (((2, 64), (4, 96), (1, 24)), (3, 80)),
    "many_sources": (((2, 32),) * 9, (2, 48)),
}

TOKENS = (0, 1, 2, 7, 63, 64, 65, 255, 256, 257, 1000)


def _cases() -> Iterator[Case]:
    keys = Case("", strip=(HALF,), rotate=RopeSpec(64, base=1e6))
    for cache, weight in product((F32, F16, BF16), (F32, F16, BF16)):
        name = f"dtype-{str(cache)[9:]}-{str(weight)[9:]}"
        yield replace(keys, name=name, cache=(cache,), weight=weight)
    for out in (F32, F16, BF16):
        yield replace(keys, name=f"out-{str(out)[9:]}", cache=(F32,), out=out)
    yield replace(keys, name="mixed-cache", cache=(BF16, F32), out=F16)
    for bits, group in product((4, 8), (32, 64, 128)):
        yield replace(keys, name=f"bits{bits}-group{group}", weight=bits, group=group)
    for bits, plan in product((4, 8), ("local", "grouped")):
        yield replace(keys, name=f"bits{bits}-{plan}", weight=bits, group=32, plan=plan, tokens=70)
    for name, (strip, rotate) in ROPES.items():
        yield Case(f"rope-{name}", strip=strip, rotate=rotate)
    yield Case("rope-strip-only", strip=(HALF,))
    yield Case("rope-rotate-only", rotate=HALF)
    yield replace(keys, name="far-positions", positions=100_000)
    for name, (sources, target) in GEOMETRIES.items():
        yield Case(f"geometry-{name}", sources=sources, target=target)
        dims = min(d for _, d in sources) // 2 * 2
        yield Case(
            f"geometry-{name}-keys",
            sources=sources,
            target=target,
            strip=(RopeSpec(dims, base=1e4),),
            rotate=RopeSpec(target[1] // 2 * 2, base=1e6),
            cache=(F32,),
            weight=F32,
        )
    for plan in ("local", "grouped"):
        for name in ("d128", "unequal_pair", "unequal_sources", "d7"):
            sources, target = GEOMETRIES[name]
            if plan == "grouped" and name == "unequal_sources":
                sources = sources[:2]
            yield Case(f"plan-{plan}-{name}", plan=plan, sources=sources, target=target)
    for n in TOKENS:
        yield replace(keys, name=f"tokens-{n}", tokens=n)
    for layout in LAYOUTS:
        yield replace(keys, name=f"layout-{layout}", layout=layout, tokens=70)
        yield replace(
            keys,
            name=f"layout-{layout}-f32-batch",
            layout=layout,
            batch=2,
            cache=(F32,),
            plan="grouped",
        )
    yield replace(keys, name="batch", batch=3)
    yield replace(keys, name="batch-one", batch=1, tokens=1)
    yield replace(keys, name="batch-tables", batch=3, batched_tables=True)
    yield replace(keys, name="batch-tables-bf16", batch=2, batched_tables=True, cache=(BF16,))
    yield replace(keys, name="no-bias", bias=False)
    yield Case("saturate", cache=(F32,), out=F16, scale=40_000.0, weight=F32)
    yield replace(keys, name="saturate-keys", cache=(F32,), out=F16, scale=40_000.0, weight=F32)
    yield replace(keys, name="near-limit", scale=8_000.0)


CASES: tuple[Case, ...] = tuple(_cases())
assert len({case.name for case in CASES}) == len(CASES)
