"""Launches the ``map_layer`` kernels as ``csrc/metal/map_layer.cpp`` does.

What is decided on the way comes out of ``csrc/metal/dispatch.cpp`` itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from emulator import EmulatorError, Library, Result
from host import MAX_SOURCES, Call, Source, Table, plan

from kvgraft.models.rope import RopeTable
from kvgraft.ops.cases import Problem
from kvgraft.ops.quantized import AffineWeight, weight_shape

# All tiles for all cases, all mutations: minutes instead of seconds.
FULL = bool(os.environ.get("KVGRAFT_CI"))

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "csrc" / "metal"
SOURCE = DIRECTORY / "map_layer.metal"
TILES = ((64, 64), (64, 32), (32, 64), (32, 32))
TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
WIDTHS = {mx.float32: 4, mx.float16: 2, mx.bfloat16: 2}
WIDE_SOURCE, WIDE_WEIGHT, RESUME, FINISH = 8, 9, 10, 11  # function constants


@dataclass
class Flat:
    """An array as it lies in memory: its buffer, where it starts, its strides."""

    data: bytes
    start: int
    strides: tuple[int, int, int, int]


def raw(x: mx.array) -> bytes:
    """The bytes of a contiguous copy."""
    view = mx.uint16 if x.dtype == mx.bfloat16 else x.dtype
    return np.array(mx.contiguous(x).view(view)).tobytes()


def flat(x: mx.array, layout: str) -> Flat:
    """``x`` ``[..., H, N, D]`` laid out again as :func:`cases.lay_out` does it.

    MLX does not tell Python the strides of an array, so the memory is built here.
    """
    n, d = x.shape[-2:]
    *lead, heads = x.shape[:-2]
    batch = lead[0] if lead else 1
    if layout == "contiguous":
        return Flat(raw(x), 0, (heads * n * d, n * d, d, 1))
    if layout == "sliced":
        shape = (*x.shape[:-2], n + 261, d)
        whole = mx.zeros(shape, dtype=x.dtype)
        whole[..., 5 : 5 + n, :] = x
        rows = n + 261
        return Flat(raw(whole), 5 * d, (heads * rows * d, rows * d, d, 1))
    if layout == "tokens_first":
        return Flat(raw(x.swapaxes(-2, -3)), 0, (heads * n * d, d, heads * d, 1))
    if layout == "dims_first":
        return Flat(raw(x.swapaxes(-1, -2)), 0, (heads * n * d, n * d, 1, n))
    if layout == "stepped":
        return Flat(raw(mx.repeat(x, 2, axis=-2)), 0, (heads * n * d * 2, n * d * 2, 2 * d, 1))
    if layout == "reversed":
        return Flat(raw(x[..., ::-1, :]), (n - 1) * d, (heads * n * d, n * d, -d, 1))
    if layout == "broadcast":
        return Flat(raw(x[..., :1, :, :]), 0, (n * d if batch > 1 else 0, 0, d, 1))
    raise ValueError(layout)


def table_of(table: RopeTable | None) -> tuple[bytes, bytes, Table | None]:
    """Cosines, sines, and what the host knows of the table; a stand-in for none."""
    if table is None or table.dims == 0:
        return bytes(4), bytes(4), None
    n, pairs = table.cos.shape[-2:]
    strides = (n * pairs if table.cos.ndim == 3 else 0, pairs, 1)
    return raw(table.cos), raw(table.sin), Table(pairs, table.traditional, strides, strides)


def run(
    library: Library,
    problem: Problem,
    tile: tuple[int, int] | None = None,
    *,
    max_sources: int = MAX_SOURCES,
    seed: int = 1,
    preempt: int = 0,
    narrow: bool = False,
    checks: bool = True,
) -> tuple[np.ndarray, list[Result]]:
    """Run a problem.

    Args:
        library: The compiled kernels.
        problem: The problem.
        tile: Tokens and columns of a tile; ``None`` for the rows kernel.
        max_sources: Source layers of one dispatch.
        seed: Order of the threads.
        preempt: Switch threads at every so many-th access.
        narrow: Read element by element where vectors could be read.
        checks: Whether to look for errors.

    Returns:
        The result as float64 and what each dispatch reported.

    Raises:
        EmulatorError: At the first report.
    """
    weight = problem.weight
    heads, in_dim, out_dim = weight_shape(weight)
    tokens = problem.sources[0].shape[-2]
    batch = problem.sources[0].shape[0] if problem.sources[0].ndim == 4 else 0
    octets = -(-out_dim // 8)

    given: list[RopeTable] = []

    def index_of(table: RopeTable | None) -> int:
        """Tables that two layers share are one."""
        if table is None or table.dims == 0:
            return -1
        for i, known in enumerate(given):
            if known is table:
                return i
        given.append(table)
        return len(given) - 1

    lying = [flat(s, problem.case.layout) for s in problem.sources]
    sources = [
        Source(TYPES[s.dtype], s.shape[-3], s.shape[-1], f.strides, f.start * WIDTHS[s.dtype],
               index_of(table))
        for s, f, table in zip(
            problem.sources, lying, problem.strip or [None] * len(lying), strict=True
        )
    ]  # fmt: skip
    out_type = problem.result_dtype
    call = Call(
        tokens, heads, out_dim, sources, max(batch, 1), TYPES[out_type],
        rotate=index_of(problem.rotate),
        plan_width=len(problem.heads[0]) if problem.heads else 0,
    )  # fmt: skip
    tables = [table_of(t) for t in given]
    call.tables = [described for _, _, described in tables if described is not None]
    scales = biases = bytes(4)
    if isinstance(weight, AffineWeight):
        words, groups = in_dim * weight.bits // 32, in_dim // weight.group_size
        call.bits, call.group_size = weight.bits, weight.group_size
        call.weight_strides = (out_dim * words, 1, words)
        call.scale_strides = call.bias_strides = (out_dim * groups, 1, groups)
        call.weight_type = TYPES[weight.scales.dtype]
        weights, scales, biases = raw(weight.packed), raw(weight.scales), raw(weight.biases)
    else:
        call.weight_strides = (in_dim * out_dim, out_dim, 1)
        call.weight_type = TYPES[weight.dtype]
        weights = raw(weight)
    if problem.bias is not None:
        call.offset_type, call.offset_strides = TYPES[problem.bias.dtype], (out_dim, 1)

    partial = bytes(max(max(batch, 1) * heads * octets * tokens * 8 * 4, 4))
    out = bytes(max(batch, 1) * heads * tokens * out_dim * WIDTHS[out_type])
    nothing = bytes(4), bytes(4), None
    results = []
    for d in plan(call, max_sources=max_sources, tile=tile or (0, 0)):
        strip = sources[d.members[0]].strip
        strip_cos, strip_sin, _ = nothing if strip < 0 else tables[strip]
        rotate_cos, rotate_sin, _ = nothing if call.rotate < 0 else tables[call.rotate]
        if narrow:
            d.constants[WIDE_SOURCE] = d.constants[WIDE_WEIGHT] = 0
        buffers = {
            0: out, 1: partial, 2: weights, 3: scales, 4: biases,
            5: bytes(4) if problem.bias is None else raw(problem.bias),
            6: strip_cos, 7: strip_sin, 8: rotate_cos, 9: rotate_sin,
            10: np.array(problem.heads or [[0]], dtype=np.int32).tobytes(), 11: d.params,
        }  # fmt: skip
        starts: dict[int, int] = {}
        for slot in range(MAX_SOURCES):
            buffers[12 + slot] = bytes(4)
            if slot < len(d.members):
                i = d.members[slot]
                buffers[12 + slot], starts[12 + slot] = lying[i].data, sources[i].address
        resume, last = d.constants[RESUME], d.constants[FINISH]
        outputs = {0: "write"} if last else {1: "update" if resume else "write"}
        x, y, z = d.grid
        result = library.launch(
            d.kernel, buffers, (x, y, z), d.threads, constants=dict(enumerate(d.constants)),
            outputs=outputs, seed=seed, preempt=preempt, starts=starts, checks=checks,
        )  # fmt: skip
        results.append(result)
        if result.report:
            raise EmulatorError(result.report)
        if not last:
            partial = result.outputs[1]
    shape = (*((batch,) if batch else ()), heads, tokens, out_dim)
    got = results[-1].outputs[0]
    if out_type == mx.bfloat16:
        wide = (np.frombuffer(got, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = np.frombuffer(got, np.float16 if out_type == mx.float16 else np.float32)
    return wide.astype(np.float64).reshape(shape), results
