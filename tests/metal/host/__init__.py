"""``csrc/metal/dispatch.cpp``, the very code that the Mac's host runs, from Python."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator import CACHE, EmulatorError, _run

CSRC = Path(__file__).parents[3] / "csrc"
BRIDGE = Path(__file__).with_name("bridge.cpp")
DISPATCH = CSRC / "metal" / "dispatch.cpp"
MAX_SOURCES = 16


@functools.cache
def library(text: str | None = None) -> ctypes.CDLL:
    """The code compiled, under the undefined-behaviour sanitizer.

    Args:
        text: Instead of dispatch.cpp's own.
    """
    source = DISPATCH.read_text() if text is None else text
    parts = [source, BRIDGE.read_text()]
    headers = ("metal/dispatch.h", "metal/params.h", "job.h", "operands.h")
    parts += [(CSRC / name).read_text() for name in headers]
    key = hashlib.sha256("".join(parts).encode()).hexdigest()[:20]
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"host-{key}.so"
    if not path.exists():
        copy, part = CACHE / f"host-{key}.cpp", CACHE / f"host-{key}.{os.getpid()}"
        copy.write_text(source)
        _run(["g++", "-x", "c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra",
              "-Werror", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-I", CSRC,
              copy, BRIDGE, "-o", part])  # fmt: skip
        part.replace(path)
    return ctypes.CDLL(str(path))


@dataclass
class Source:
    """One source layer, ``[batch, heads, tokens, dim]``; strides count elements."""

    type: int
    heads: int
    dim: int
    strides: tuple[int, int, int, int]
    address: int = 0
    strip: int = -1


@dataclass
class Table:
    """One RoPE table; strides of batch, token, pair."""

    pairs: int
    traditional: bool
    cos_strides: tuple[int, int, int]
    sin_strides: tuple[int, int, int]


@dataclass
class Call:
    """``kvgraft::Job``, as far as the dispatches depend on it."""

    tokens: int
    heads: int
    out_dim: int
    sources: list[Source]
    batch: int = 1
    out_type: int = 1
    bits: int = 0
    group_size: int = 0
    weight_type: int = 1
    weight_strides: tuple[int, int, int] = (0, 0, 1)
    weight_address: int = 0
    scale_strides: tuple[int, int, int] = (0, 0, 0)
    bias_strides: tuple[int, int, int] = (0, 0, 0)
    offset_type: int = 3
    offset_strides: tuple[int, int] = (0, 0)
    rotate: int = -1
    plan_width: int = 0
    tables: list[Table] = field(default_factory=list)

    def numbers(self) -> list[int]:
        """As bridge.cpp reads them."""
        out = [
            self.batch, self.tokens, self.heads, self.out_dim, self.out_type, self.bits,
            self.group_size, self.weight_type, *self.weight_strides, self.weight_address,
            *self.scale_strides, *self.bias_strides, self.offset_type, *self.offset_strides,
            self.rotate, self.plan_width, len(self.sources),
        ]  # fmt: skip
        for s in self.sources:
            out += [s.type, s.heads, s.dim, *s.strides, s.address, s.strip]
        out.append(len(self.tables))
        for t in self.tables:
            out += [t.pairs, t.traditional, *t.cos_strides, *t.sin_strides]
        return [int(x) for x in out]


@dataclass
class Dispatch:
    """``kvgraft::metal::Dispatch``; ``params`` are its bytes."""

    kernel: str
    variant: str
    constants: list[int]
    grid: list[int]
    threads: int
    members: list[int]
    params: bytes


def plan(
    call: Call,
    cores: int = 8,
    *,
    max_sources: int = MAX_SOURCES,
    tile: Sequence[int] | None = None,
    code: ctypes.CDLL | None = None,
) -> list[Dispatch]:
    """``plan_dispatches``.

    Args:
        call: What is asked for.
        cores: Of the GPU.
        max_sources: Source layers of one dispatch.
        tile: Tokens and columns instead of the host's choice; columns 0: the rows
            kernel.
        code: From :func:`library`, if not the project's own.
    """
    numbers = call.numbers()
    out = ctypes.create_string_buffer(1 << 20)
    failed = (code or library()).bridge_plan(
        (ctypes.c_int64 * len(numbers))(*numbers),
        cores,
        max_sources,
        None if tile is None else (ctypes.c_int * 2)(*tile),
        out,
        ctypes.c_size_t(len(out)),
    )
    if failed:
        raise EmulatorError("the dispatches take more room than the bridge has")
    found: list[dict[str, Any]] = json.loads(out.value)
    return [Dispatch(**{**d, "params": bytes.fromhex(d["params"])}) for d in found]


def choose_tile(tokens: int, spans: int, span: int, cores: int) -> tuple[int, int]:
    """``choose_tile``."""
    out = (ctypes.c_int * 2)()
    library().bridge_tile(ctypes.c_int64(tokens), ctypes.c_int64(spans), span, cores, out)
    return out[0], out[1]


def core_count(architecture: str) -> int:
    """``core_count``."""
    return int(library().bridge_cores(architecture.encode()))


def has_matrix_units(architecture: str, generation: int) -> bool:
    """``has_matrix_units``."""
    return bool(library().bridge_matrix_units(architecture.encode(), generation))


def refuses(group_size: int, entries: int) -> bool:
    """Whether ``has_kernel`` says no."""
    return bool(library().bridge_refuses(group_size, ctypes.c_int64(entries)))
