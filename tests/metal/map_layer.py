"""Launches the ``map_layer`` kernels as ``csrc/metal/map_layer.cpp`` does."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from cases import Problem
from emulator import EmulatorError, Library, Result

from kvgraft.rope import RopeTable
from kvgraft.weights import AffineWeight, weight_shape

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "csrc" / "metal"
SOURCE = DIRECTORY / "map_layer.metal"
MAX_SOURCES = 16
TILES = ((64, 64), (64, 32), (32, 64), (32, 32))
TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
WIDTHS = {mx.float32: 4, mx.float16: 2, mx.bfloat16: 2}


@dataclass
class Flat:
    """An array as it lies in memory: its buffer, where it starts, its strides."""

    data: bytes
    start: int
    strides: tuple[int, ...]


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


def pack(parameters: dict[str, object]) -> bytes:
    """``MapParams`` of params.h."""
    p = parameters
    out = struct.pack(
        "<12i",
        *(int(p[k]) for k in (  # type: ignore[call-overload]
            "tokens", "heads", "out_dim", "source_dim", "sources", "width", "strip_pairs",
            "rotate_pairs", "span", "tiles_per_span", "group_shift",
        )),
        0,
    )  # fmt: skip
    for key in ("weight", "scale", "bias", "offset", "strip", "rotate"):
        out += struct.pack(f"<{len(p[key])}q", *p[key])  # type: ignore[arg-type, misc]
    for layer in p["layers"]:  # type: ignore[attr-defined]
        out += struct.pack("<4q2i", *layer, 0)
    return out + bytes(40 * (MAX_SOURCES - int(p["sources"])))  # type: ignore[call-overload]


def table_of(table: RopeTable | None) -> tuple[bytes, bytes, list[int], int, int]:
    """Cosines, sines, strides, pairs and kind."""
    if table is None or table.dims == 0:
        return bytes(4), bytes(4), [0] * 6, 0, 0
    n, pairs = table.cos.shape[-2:]
    batch = n * pairs if table.cos.ndim == 3 else 0
    strides = [batch, pairs, 1]
    kind = 2 if table.traditional else 1
    return raw(table.cos), raw(table.sin), strides * 2, pairs, kind


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
    layout = problem.case.layout
    tables = problem.strip or [None] * len(problem.sources)
    octets = -(-out_dim // 8)

    # Sources that one dispatch can take together, as eval_gpu groups them.
    width_of = [len(problem.heads[0]) if problem.heads else s.shape[-3] for s in problem.sources]
    rows, at = [], 0
    for s, width in zip(problem.sources, width_of, strict=True):
        rows.append(at)
        at += width * s.shape[-1]
    groups: dict[tuple[object, ...], list[list[int]]] = {}
    for i, s in enumerate(problem.sources):
        key = (s.dtype, s.shape[-1], width_of[i], id(tables[i]))
        chunks = groups.setdefault(key, [[]])
        if len(chunks[-1]) == max_sources:
            chunks.append([])
        chunks[-1].append(i)
    dispatches = [chunk for chunks in groups.values() for chunk in chunks]

    rotate = table_of(problem.rotate)
    scale = bias = [0, 0, 0]
    scales = biases = bytes(4)
    bits = group = 0
    if isinstance(weight, AffineWeight):
        bits, group = weight.bits, weight.group_size
        words, n_groups = in_dim * bits // 32, in_dim // group
        weights, weight_type = raw(weight.packed), weight.scales.dtype
        strides = [out_dim * words, 1, words]
        scales, biases = raw(weight.scales), raw(weight.biases)
        scale = bias = [out_dim * n_groups, 1, n_groups]
    else:
        weights, weight_type = raw(weight), weight.dtype
        strides = [in_dim * out_dim, out_dim, 1]
    rotate_wide = out_dim % 8 == 0 and (rotate[4] != 1 or rotate[3] % 4 == 0)

    total = max(batch, 1) * heads * octets * tokens * 8 * 4
    partial = bytes(max(total, 4))
    out_type = problem.result_dtype
    out = bytes(max(batch, 1) * heads * tokens * out_dim * WIDTHS[out_type])
    columns = tile[1] if tile else 32
    if tile:
        name, block, threads = "map_layer_tile_{}x{}".format(*tile), tile[0], 128
    else:
        block = next(r for r in (1, 4, 16) if r >= min(tokens, 16))
        name, threads = f"map_layer_rows_{block}", 256
    span = octets if problem.heads else heads * octets
    per_span = -(-span * 8 // columns)
    spans = heads if problem.heads else 1

    results = []
    for step, chunk in enumerate(dispatches):
        first = problem.sources[chunk[0]]
        cos, sin, strip_strides, pairs, kind = table_of(tables[chunk[0]])
        buffers: dict[int, bytes] = {}
        starts: dict[int, int] = {}
        layers = []
        dim = first.shape[-1]
        head_wide = dim % 8 == 0 and (kind != 1 or pairs % 4 == 0)
        source_wide = head_wide
        for slot, i in enumerate(chunk):
            lying = flat(problem.sources[i], layout)
            size = WIDTHS[first.dtype]
            b, h, n, d = lying.strides
            buffers[12 + slot], starts[12 + slot] = lying.data, lying.start * size
            layers.append((b, h, n, d, rows[i]))
            source_wide &= d == 1 and all(s % 4 == 0 for s in (b, h, n)) and lying.start % 4 == 0
        for slot in range(len(chunk), MAX_SOURCES):
            buffers[12 + slot] = bytes(4)
        weight_wide = (
            rotate_wide if not bits else (head_wide and all(rows[i] % 8 == 0 for i in chunk))
        )
        constants = [
            TYPES[first.dtype], TYPES[weight_type], bits,
            3 if problem.bias is None else TYPES[problem.bias.dtype], TYPES[out_type],
            kind, rotate[4], problem.heads is not None,
            source_wide and not narrow, weight_wide and not narrow,
            step > 0, step == len(dispatches) - 1,
        ]  # fmt: skip
        resume, last = bool(constants[10]), bool(constants[11])
        buffers |= {
            0: out, 1: partial, 2: weights, 3: scales, 4: biases,
            5: bytes(4) if problem.bias is None else raw(problem.bias),
            6: cos, 7: sin, 8: rotate[0], 9: rotate[1],
            10: np.array(problem.heads or [[0]], dtype=np.int32).tobytes(),
            11: pack({
                "tokens": tokens, "heads": heads, "out_dim": out_dim, "source_dim": dim,
                "sources": len(chunk), "width": width_of[chunk[0]], "strip_pairs": pairs,
                "rotate_pairs": rotate[3], "span": span, "tiles_per_span": per_span,
                "group_shift": max(group, 1).bit_length() - 1, "weight": strides,
                "scale": scale, "bias": bias,
                "offset": [out_dim, 1], "strip": strip_strides, "rotate": rotate[2],
                "layers": layers,
            }),
        }  # fmt: skip
        outputs = {}
        if last:
            outputs[0] = "write"
        else:
            outputs[1] = "update" if resume else "write"
        result = library.launch(
            name, buffers, (per_span * spans, -(-tokens // block), max(batch, 1)), threads,
            constants=dict(enumerate(map(int, constants))), outputs=outputs, seed=seed,
            preempt=preempt, starts=starts, checks=checks,
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
