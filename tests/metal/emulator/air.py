"""Runs kernels that Apple's compiler built, out of MLX's macOS wheel.

``mlx.metallib`` holds LLVM bitcode with Apple's intrinsics (AIR). Stripped of
address spaces and given our runtime's barriers, matrix products, loads and stores,
it runs on the same fibers as our own kernels: a check of the runtime against code
that neither we nor clang's C++ have read as Metal. Covers what MLX's float32 matmul
and its gated delta rule need; the accesses of such code are not watched.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from emulator import CACHE, EmulatorError, Entry, Library, _run, _runtime
from emulator.toolchain import DISASSEMBLER

# Members of ThreadContext: bytes into it, and the LLVM type there.
_PLACES = {
    "air.thread_position_in_threadgroup": (0, "<3 x i32>"),
    "air.threadgroup_position_in_grid": (12, "<3 x i32>"),
    "air.thread_index_in_threadgroup": (24, "i32"),
    "air.thread_index_in_simdgroup": (28, "i32"),
    "air.simdgroup_index_in_threadgroup": (32, "i32"),
}
_GRID = "air.thread_position_in_grid"  # made from two of the others
_MATRIX = "<64 x float>"
_MULTIPLY = f"{_MATRIX} @air.simdgroup_matrix_8x8_multiply_accumulate" + ".v64f32" * 4


def download(version: str) -> Path:
    """The metallib of MLX's wheel for macOS 15; fetched by pip, kept in the cache."""
    folder = CACHE / f"mlx-metal-{version}"
    library = folder / "mlx" / "lib" / "mlx.metallib"
    if not library.exists():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--only-binary=:all:", "--platform", "macosx_15_0_arm64", "--dest", folder,
             f"mlx-metal=={version}"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise EmulatorError(f"pip could not fetch mlx-metal {version}:\n{done.stderr}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            z.extract("mlx/lib/mlx.metallib", folder)
        wheel.unlink()
    return library


def functions(metallib: Path) -> dict[str, bytes]:
    """Bitcode of every kernel, by name."""
    data = metallib.read_bytes()
    if data[:4] != b"MTLB":
        raise EmulatorError(f"{metallib} is no Metal library")
    list_at, bitcode_at = (
        struct.unpack_from("<Q", data, 24)[0],
        struct.unpack_from("<Q", data, 72)[0],
    )
    (count,) = struct.unpack_from("<I", data, list_at)
    found, at = {}, list_at + 4
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, at)
        tags, tag_at = {}, at + 4
        while (tag := data[tag_at : tag_at + 4]) != b"ENDT":
            (length,) = struct.unpack_from("<H", data, tag_at + 4)
            tags[tag] = data[tag_at + 6 : tag_at + 6 + length]
            tag_at += 6 + length
        start = bitcode_at + struct.unpack("<3Q", tags[b"OFFT"])[2]
        (length,) = struct.unpack("<Q", tags[b"MDSZ"])
        found[tags[b"NAME"].rstrip(b"\0").decode()] = data[start : start + length]
        at += size
    return found


def _elements(name: str, value: str) -> str:
    """Spill the two elements that a lane owns to an array."""
    return f"""  %{name} = alloca [2 x float]
  %{name}0 = extractelement {_MATRIX} {value}, i64 0
  %{name}1 = extractelement {_MATRIX} {value}, i64 1
  store float %{name}0, ptr %{name}
  %{name}p = getelementptr float, ptr %{name}, i64 1
  store float %{name}1, ptr %{name}p
"""


_SUPPORT = f"""
declare void @emulator_barrier(i32, i32) convergent noduplicate
declare void @emulator_simdgroup_barrier(i32, i32) convergent noduplicate
declare void @emulator_multiply(ptr, ptr, ptr, ptr) convergent noduplicate
define void @air.wg.barrier(i32 %f, i32 %s) noinline convergent {{
  call void @emulator_barrier(i32 %f, i32 0)
  ret void
}}
define void @air.simdgroup.barrier(i32 %f, i32 %s) noinline convergent {{
  call void @emulator_simdgroup_barrier(i32 %f, i32 0)
  ret void
}}
define i32 @air.min.s.i32(i32 %a, i32 %b) {{
  %c = icmp slt i32 %a, %b
  %m = select i1 %c, i32 %a, i32 %b
  ret i32 %m
}}
define i8 @air.normalize_function_constant_predicate.i8(i8 %a) {{
  %c = icmp ne i8 %a, 0
  %m = zext i1 %c to i8
  ret i8 %m
}}
define float @air.fmax.f32(float %a, float %b) {{
  %m = call float @llvm.maxnum.f32(float %a, float %b)
  ret float %m
}}
declare float @llvm.maxnum.f32(float, float)
declare float @expf(float)
declare float @logf(float)
define float @air.fast_exp.f32(float %a) {{
  %r = call float @expf(float %a)
  ret float %r
}}
define float @air.fast_log.f32(float %a) {{
  %r = call float @logf(float %a)
  ret float %r
}}
declare float @emulator_prefix_sum(float) convergent noduplicate
define float @air.simd_prefix_inclusive_sum.f32(float %a) noinline convergent {{
  %r = call float @emulator_prefix_sum(float %a)
  ret float %r
}}
define {_MATRIX} @air.simdgroup_matrix_8x8_init_filled.v64f32.f32(float %a) {{
  %r0 = insertelement {_MATRIX} poison, float %a, i64 0
  %r1 = insertelement {_MATRIX} %r0, float %a, i64 1
  ret {_MATRIX} %r1
}}
declare void @emulator_air_load(ptr, i64, i8 zeroext, ptr) convergent noduplicate
declare void @emulator_air_store(ptr, ptr, i64, i8 zeroext) convergent noduplicate
define {_MATRIX} @air.simdgroup_matrix_8x8_load.v64f32.p1f32(
    ptr %from, i64 %ld, <2 x i64> %origin, i1 %transpose) noinline convergent {{
  %d = alloca [2 x float]
  %t = zext i1 %transpose to i8
  call void @emulator_air_load(ptr %from, i64 %ld, i8 zeroext %t, ptr %d)
  %d0 = load float, ptr %d
  %dp = getelementptr float, ptr %d, i64 1
  %d1 = load float, ptr %dp
  %r0 = insertelement {_MATRIX} poison, float %d0, i64 0
  %r1 = insertelement {_MATRIX} %r0, float %d1, i64 1
  ret {_MATRIX} %r1
}}
define void @air.simdgroup_matrix_8x8_store.v64f32.p1f32(
    {_MATRIX} %x, ptr %to, i64 %ld, <2 x i64> %origin, i1 %transpose) noinline convergent {{
{_elements("a", "%x")}  %t = zext i1 %transpose to i8
  call void @emulator_air_store(ptr %a, ptr %to, i64 %ld, i8 zeroext %t)
  ret void
}}
define {_MULTIPLY}({_MATRIX} %x, {_MATRIX} %y, {_MATRIX} %z) noinline convergent {{
{_elements("a", "%x")}{_elements("b", "%y")}{_elements("c", "%z")}  %d = alloca [2 x float]
  call void @emulator_multiply(ptr %a, ptr %b, ptr %c, ptr %d)
  %d0 = load float, ptr %d
  %dp = getelementptr float, ptr %d, i64 1
  %d1 = load float, ptr %dp
  %r0 = insertelement {_MATRIX} poison, float %d0, i64 0
  %r1 = insertelement {_MATRIX} %r0, float %d1, i64 1
  ret {_MATRIX} %r1
}}
"""


class AirLibrary(Library):
    """One kernel of a metallib, ready to launch.

    Args:
        bitcode: What :func:`functions` found.
        name: The kernel's name.
    """

    def __init__(self, bitcode: bytes, name: str) -> None:
        done = subprocess.run([DISASSEMBLER, "-o", "-"], input=bitcode, capture_output=True)
        if done.returncode:
            raise EmulatorError(done.stderr.decode())
        text = done.stdout.decode()
        nodes = dict(re.findall(r"^(!\d+) = (?:distinct )?!\{(.*)\}$", text, re.M))
        kernel = nodes[re.findall(r"^!air\.kernel = !\{(!\d+)\}", text, re.M)[0]]
        arguments = [nodes[n] for n in re.findall(r"!\d+", nodes[re.findall(r"!\d+", kernel)[1]])]
        self._symbols = {
            int(m[2]): m[1]
            for m in re.finditer(
                r'\{ptr addrspace\(2\) @([\w.]+), !"bool", !"\w+", i32 (\d+), i1 true\}', text
            )
        }
        self.constants = {index: ("bool", name) for index, name in self._symbols.items()}
        parameters: list[tuple[str, int | str]] = []
        loads, call = [], []
        for n, node in enumerate(arguments):
            if m := re.search(r'"air\.location_index", i32 (\d+)', node):
                parameters.append(("buffer", int(m[1])))
                loads.append(f"  %p{n} = getelementptr ptr, ptr %b, i64 {m[1]}")
                loads.append(f"  %a{n} = load ptr, ptr %p{n}")
                call.append(f"ptr %a{n}")
                continue
            if f'"{_GRID}"' in node:  # threadgroups of one simdgroup
                loads += [
                    "  %gp = getelementptr i8, ptr %c, i64 12",
                    "  %gg = load <3 x i32>, ptr %gp, align 4",
                    "  %gt = load <3 x i32>, ptr %c, align 4",
                    "  %gs = mul <3 x i32> %gg, <i32 32, i32 1, i32 1>",
                    f"  %a{n} = add <3 x i32> %gs, %gt",
                ]
                call.append(f"<3 x i32> %a{n}")
                continue
            place, kind = next(v for k, v in _PLACES.items() if f'"{k}"' in node)
            loads.append(f"  %p{n} = getelementptr i8, ptr %c, i64 {place}")
            loads.append(f"  %a{n} = load {kind}, ptr %p{n}, align 4")
            call.append(f"{kind} %a{n}")
        self.entries = {name: Entry(name, name, parameters, 128)}

        for pattern, new in (
            (r"^@llvm\.(?:global_ctors|compiler\.used) = .*$", ""),
            (r"addrspacecast \(ptr(?: addrspace\(\d\))? (@[\w.]+) to ptr(?: addrspace\(\d\))?\)",
             r"\1"),
            (r" addrspace\(\d+\)", ""),
            (r"llvm\.memcpy\.p\d\.p\d\.i64", "llvm.memcpy.p0.p0.i64"),
            (r"^target datalayout = .*$", ""),
            (r"^target triple = .*$", 'target triple = "x86_64-pc-linux-gnu"'),
            (r"^(@[\w.]+) = internal unnamed_addr externally_initialized constant i8 undef.*$",
             r"\1 = global i8 0"),
            (r"= internal (?:unnamed_addr )?global (\S+|\[[^\]]*\]) undef",
             r"= internal global \1 zeroinitializer"),
            (r"define internal void (@_GLOBAL__sub_I_[\w.]+)\(\)", r"define void @initialize()"),
            (r' section "air\.\w+"', ""),
            (r'"no-builtins"|"frame-pointer"="all"', ""),
            (r"^declare [^\n]*@(?:air\.[\w.]+)\([^\n]*$", ""),
        ):  # fmt: skip
            text = re.sub(pattern, new, text, flags=re.M)
        text += _SUPPORT + "\n".join(
            ["define void @entry_0(ptr %c, ptr %b) {", *loads,
             f"  call void @{name}({', '.join(call)})", "  ret void", "}", ""]
        )  # fmt: skip

        self._runtime = _runtime()
        key = hashlib.sha256(text.encode()).hexdigest()[:20]
        self.path = CACHE / f"air-{key}.so"
        if not self.path.exists():
            source, part = CACHE / f"air-{key}.ll", CACHE / f"air-{key}.{os.getpid()}"
            source.write_text(text)
            _run(["clang++-19", "-O1", "-fPIC", "-march=x86-64-v3", "-ffp-contract=on", "-shared",
                  "-Wno-override-module", source, self._runtime._name, "-lm",
                  "-Wl,--no-undefined", "-o", part])  # fmt: skip
            part.replace(self.path)
        self.library = ctypes.CDLL(str(self.path))
        self._image = self._mapping()

    def set_constants(self, values: Mapping[int, int]) -> None:
        """Set function constants by index."""
        for index, symbol in self._symbols.items():
            ctypes.c_uint8.in_dll(self.library, symbol).value = values[index]
        if self._symbols:
            self.library.initialize()
