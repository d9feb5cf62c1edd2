"""Runs the text of a ``.metal`` file on the CPU; see docs/metal.md.

The file is preprocessed, the few constructs that clang's C++ has no words for
are rewritten, and the rest is compiled as it stands against ``shim.h``. Kernels
are then launched from NumPy arrays by ``runtime.cpp``, which reports races, bad
addresses, unset data and divergence.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emulator.toolchain import compiler, missing_tools

__all__ = ["CACHE", "EmulatorError", "Library", "Result", "check_syntax", "missing_tools"]

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("KVGRAFT_EMULATOR_CACHE", Path(tempfile.gettempdir()) / "kvgraft-emulator")
)

# What stands for [[...]] parameters of kernels, as members of ThreadContext.
_ATTRIBUTES = {
    "threadgroup_position_in_grid": "group",
    "thread_index_in_threadgroup": "index",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "thread_index_in_simdgroup": "lane",
}
_FLAGS = [
    "-std=c++17", "-fPIC", "-march=x86-64-v3", "-fno-exceptions", "-fno-rtti", "-nostdinc++",
    "-ffp-contract=on", "-fno-strict-aliasing", "-fno-vectorize", "-fno-slp-vectorize",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-ftrivial-auto-var-init=pattern",  # private variables start as NaN
    "-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier",
]  # fmt: skip
_MODES = {
    # All accesses instrumented.
    "check": [
        "-O1", "-g", "-fsanitize=thread,undefined", "-fsanitize-recover=all",
        "-fno-sanitize=vptr,function,float-divide-by-zero",
        "-mllvm", "-tsan-instrument-read-before-write=1",
        "-mllvm", "-tsan-instrument-func-entry-exit=0",
    ],
    "coverage": ["-O1", "-g", "-fprofile-instr-generate", "-fcoverage-mapping"],
    "syntax": ["-fsyntax-only", "-Wall", "-Wextra", "-Wdouble-promotion",
               "-Wconditional-uninitialized", "-Wimplicit-float-conversion",
               "-Wno-unused-parameter", "-Werror"],
}  # fmt: skip


class EmulatorError(Exception):
    """A source that does not compile, or a launch that broke a rule."""


@dataclass
class Entry:
    """A kernel that can be launched."""

    host_name: str
    expression: str
    parameters: list[tuple[str, int | str]]  # ("buffer", n) or ("context", member)
    limit: int


@dataclass
class Translation:
    """A ``.metal`` file as C++."""

    body: str
    entries: dict[str, Entry]
    constants: dict[int, tuple[str, str]]  # index: (type, name)


def preprocess(source: str, include: Path) -> str:
    """The source with macros and includes worked in; line markers kept."""
    done = subprocess.run(
        [*compiler(), "-x", "c++", "-E", "-nostdinc", "-undef", "-I", HERE / "stubs", "-I", include,
         "-D__METAL_VERSION__=310", "-D__METAL__", "-"],
        input=source, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise EmulatorError(done.stderr)
    return done.stdout


def translate(text: str) -> Translation:
    """Rewrite preprocessed MSL to C++."""
    constants: dict[int, tuple[str, str]] = {}

    def constant(m: re.Match[str]) -> str:
        kind, name, index = m[1], m[2], int(m[3])
        if index in constants:
            raise EmulatorError(f"function constant {index} is declared twice")
        constants[index] = (kind, name)
        return (
            f'static {kind} {name}; extern "C" void set_constant_{index}(int v) {{ {name} = v; }}'
        )

    text = re.sub(
        r"\bconstant (int|bool) (\w+) \[\[function_constant\((\d+)\)\]\];", constant, text
    )

    signatures: dict[str, tuple[list[tuple[str, int | str]], int]] = {}

    def kernel(m: re.Match[str]) -> str:
        limit, name, arguments = int(m[1]), m[2], m[3]
        parameters: list[tuple[str, int | str]] = []
        for argument in arguments.split(","):
            a = re.fullmatch(r"\s*(.+?)\s*\[\[(\w+)(?:\((\d+)\))?\]\]\s*", argument, re.S)
            if a is None:
                raise EmulatorError(f"{name}: cannot read the parameter {argument.strip()!r}")
            if a[2] == "buffer":
                if int(a[3]) > 30:
                    raise EmulatorError(f"{name}: Metal binds buffers 0 to 30, not {a[3]}")
                if not re.search(r"\b(device|constant)\b", a[1]):
                    raise EmulatorError(f"{name}: {a[1]} has no address space")
                parameters.append(("buffer", int(a[3])))
            elif a[2] in _ATTRIBUTES:
                parameters.append(("context", _ATTRIBUTES[a[2]]))
            else:
                raise EmulatorError(f"{name}: unknown attribute [[{a[2]}]]")
        bound = [index for kind, index in parameters if kind == "buffer"]
        if len(bound) != len(set(bound)):
            raise EmulatorError(f"{name}: a buffer index is used twice")
        signatures[name] = (parameters, limit)
        plain = re.sub(r"\[\[.*?\]\]", "", arguments)
        return f"void {name}({plain})"

    text = re.sub(
        r"\[\[kernel, max_total_threads_per_threadgroup\((\d+)\)\]\]\s*void\s+"
        r"(\w+)\((.*?)\)(?=\s*\{)",
        kernel,
        text,
        flags=re.S,
    )

    entries: dict[str, Entry] = {}

    def instance(m: re.Match[str]) -> str:
        name = "".join(re.findall(r'"(.*?)"', m[1]))
        if m[2] != m[3]:
            raise EmulatorError(f"{name}: decltype({m[2]}) of {m[3]}")
        parameters, limit = signatures[m[2].split("<")[0]]
        entries[name] = Entry(name, m[2], parameters, limit)
        return ""

    text = re.sub(
        r"template \[\[host_name\(([^)]*)\)\]\] \[\[kernel\]\]\s*decltype\(([^)]*)\)\s*([^;]*);",
        instance,
        text,
    )
    text = re.sub(r"\bthreadgroup (\w+) (\w+)(\[[^;]*\]);", r"SHIM_THREADGROUP(\2, \1\3);", text)
    text = re.sub(r"\b((?:float|half|bfloat|u?int)[234])\(", r"::metal::shim_make<\1>(", text)
    return Translation(text, entries, constants)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("readable", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("start", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("limit", ctypes.c_uint32),
        ("buffers", ctypes.c_uint32),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("seed", ctypes.c_uint64),
        ("preempt", ctypes.c_uint32),
        ("checks", ctypes.c_uint32),
        ("image", ctypes.c_uint64 * 2),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("multiplications", ctypes.c_uint64),
        ("read_bytes", ctypes.c_uint64 * 31),
        ("written_bytes", ctypes.c_uint64 * 31),
        ("threadgroup_read", ctypes.c_uint64),
        ("threadgroup_written", ctypes.c_uint64),
        ("reports", ctypes.c_uint32),
        ("report", ctypes.c_char * 8192),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Guarded:
    """Memory that ends at an inaccessible page, a megabyte of them on both sides."""

    GUARD = 1 << 20

    def __init__(self, data: bytes, fill: bool) -> None:
        span = max(-(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
        self.total = span + 2 * self.GUARD
        self.base = _libc.mmap(None, self.total, 0, 0x4022, -1, 0)  # private, no reserve
        if self.base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError
        _libc.mprotect(self.base + self.GUARD, span, 3)
        self.size = len(data)
        self.at = self.base + self.GUARD + (span - len(data)) // 16 * 16
        if fill:
            ctypes.memmove(self.at, data, len(data))
        else:
            ctypes.memset(self.at, 0xFF, len(data))

    def contents(self) -> bytes:
        return ctypes.string_at(self.at, self.size)

    def __del__(self) -> None:
        _libc.munmap(self.base, self.total)


@dataclass
class Result:
    """What a launch did."""

    outputs: dict[int, bytes]
    report: str
    barriers: int
    multiplications: int
    threadgroup_bytes: int
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    threadgroup_traffic: int = 0


def _run(command: Sequence[object], **options: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise EmulatorError(f"{command[0]} failed:\n{done.stderr[:6000]}")


def _runtime() -> ctypes.CDLL:
    text = (HERE / "runtime.cpp").read_text() + (HERE / "runtime.h").read_text()
    out = CACHE / f"runtime-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}")
        _run(["g++", "-std=c++17", "-O2", "-fPIC", "-march=x86-64-v3", "-shared",
              HERE / "runtime.cpp", "-o", part])  # fmt: skip
        part.replace(out)
    return ctypes.CDLL(str(out), mode=ctypes.RTLD_GLOBAL)


class Library:
    """The kernels of one source text, compiled for the emulator.

    Args:
        source: Text of a ``.metal`` file.
        include: Where its own headers are.
        mode: ``check`` or ``coverage``.
        only: Host names to build; all of them if ``None``.
    """

    def __init__(
        self, source: str, include: Path, mode: str = "check", only: Sequence[str] | None = None
    ) -> None:
        code = translate(preprocess(source, include))
        self.constants = code.constants
        self.entries = {n: e for n, e in code.entries.items() if only is None or n in only}
        thunks = []
        for i, entry in enumerate(self.entries.values()):
            values = ", ".join(
                f"shim::Buffer{{b[{what}]}}" if kind == "buffer" else f"c->{what}"
                for kind, what in entry.parameters
            )
            thunks.append(
                f'extern "C" void entry_{i}(const ThreadContext* c, void* const* b) '
                f"{{ shim::call(&{entry.expression}, {values}); }}"
            )
        self.text = "\n".join(['#include "shim.h"', code.body, *thunks])
        if mode == "coverage":
            self.text += (
                '\nextern "C" int __llvm_profile_write_file(void);'
                '\nextern "C" int write_profile() { return __llvm_profile_write_file(); }\n'
            )
        self._runtime = _runtime()
        flags = [*_FLAGS, *_MODES[mode]]
        shim = (HERE / "shim.h").read_text() + (HERE / "runtime.h").read_text()
        key = hashlib.sha256(repr((self.text, flags, shim)).encode()).hexdigest()[:20]
        self.cpp, self.path = CACHE / f"{key}.cpp", CACHE / f"{key}.so"
        if not self.path.exists():
            self.cpp.write_text(self.text)
            part = CACHE / f"{key}.{os.getpid()}"
            _run([*compiler(), *flags, "-I", HERE, "-c", self.cpp, "-o", f"{part}.o"])
            # Only clang has the library that counts executed lines.
            linker = ["g++"] if mode == "check" else ["clang++-19", "-fprofile-instr-generate"]
            _run([*linker, "-shared", f"{part}.o", self._runtime._name, "-lm", "-o", part])
            Path(f"{part}.o").unlink()
            part.replace(self.path)
        self.library = ctypes.CDLL(str(self.path))
        self._image = self._mapping()

    def _mapping(self) -> tuple[int, int]:
        """Addresses of the library, its zeroed data included."""
        low = high = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            parts = line.split()
            start, end = (int(x, 16) for x in parts[0].split("-"))
            if parts[-1] == str(self.path):
                low, high = low or start, end
            elif high == start and len(parts) == 5 and end - start < 1 << 20:
                high = end
        return low, high

    def _places(self, report: str) -> str:
        """Program counters of a report as lines of the source."""

        def place(m: re.Match[str]) -> str:
            address = int(m[1], 16) - self._image[0] - 1
            done = subprocess.run(
                ["addr2line", "-i", "-e", str(self.path), hex(address)],
                capture_output=True, text=True,
            )  # fmt: skip
            frames = [f.split(" ")[0].rsplit("/", 1)[-1] for f in done.stdout.splitlines()]
            return "at " + " <- ".join(f for f in frames if "shim.h" not in f)

        return re.sub(r"pc=(0x[0-9a-f]+)", place, report)

    def set_constants(self, values: Mapping[int, int]) -> None:
        """Set function constants by index."""
        for index, value in values.items():
            getattr(self.library, f"set_constant_{index}")(int(value))

    def launch(
        self,
        name: str,
        buffers: Mapping[int, bytes],
        grid: tuple[int, int, int],
        threads: int,
        *,
        constants: Mapping[int, int],
        outputs: Mapping[int, str],
        seed: int = 1,
        preempt: int = 0,
        checks: bool = True,
        starts: Mapping[int, int] | None = None,
    ) -> Result:
        """Run a kernel.

        Args:
            name: Host name.
            buffers: Contents by index; all that the kernel declares.
            grid: Threadgroups along x, y, z.
            threads: Threads of a threadgroup.
            constants: Values of all function constants.
            outputs: For each buffer written to: ``"write"`` if it starts without
                contents and has to be written whole, ``"update"`` if not.
            seed: Order of threads and threadgroups, 0 for ascending.
            preempt: Switch threads at every so many-th access; 0 at barriers only.
            checks: Whether to look for errors.
            starts: Bytes into a buffer where the kernel's pointer points, if not 0.
        """
        entry = self.entries[name]
        if set(constants) != set(self.constants):
            raise EmulatorError("set every function constant")
        self.set_constants(constants)
        needed = {what for kind, what in entry.parameters if kind == "buffer"}
        if needed != set(buffers):
            raise EmulatorError(f"{name} needs buffers {sorted(needed)}")
        table = (_Buffer * 31)()
        memory: dict[int, _Guarded] = {}
        for index, contents in buffers.items():
            fill = outputs.get(index) != "write"
            memory[index] = _Guarded(contents, fill)
            table[index] = _Buffer(
                memory[index].at,
                len(contents),
                fill,
                index in outputs,
                (starts or {}).get(index, 0),
            )
        launch = _Launch(
            grid=grid, threads=threads, limit=entry.limit, buffers=31, buffer=table, seed=seed,
            preempt=preempt, checks=checks, image=self._image,
        )  # fmt: skip
        index = list(self.entries).index(name)
        kernel = ctypes.cast(getattr(self.library, f"entry_{index}"), ctypes.c_void_p)
        failed = self._runtime.emulator_run(kernel, ctypes.byref(launch))
        report = self._places(launch.report.decode())
        if checks and not failed:
            self._runtime.emulator_unwritten.restype = ctypes.c_uint64
            for i, how in outputs.items():
                unwritten = self._runtime.emulator_unwritten(ctypes.c_uint32(i))
                if how == "write" and unwritten:
                    report += f"UNWRITTEN: {unwritten} bytes of buffer({i})\n"
        return Result(
            {i: memory[i].contents() for i in outputs},
            report,
            launch.barriers,
            launch.multiplications,
            launch.threadgroup_bytes,
            list(launch.read_bytes),
            list(launch.written_bytes),
            launch.threadgroup_read + launch.threadgroup_written,
        )


def check_syntax(source: str, include: Path) -> str:
    """Warnings of clang on the translated source; empty if there are none."""
    code = translate(preprocess(source, include))
    uses = "\n".join(
        f"auto* use_{i} = &{e.expression};" for i, e in enumerate(code.entries.values())
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=CACHE) as f:
        f.write('#include "shim.h"\n' + code.body + uses)
        f.flush()
        done = subprocess.run(
            [*compiler(), *_FLAGS, *_MODES["syntax"], "-isystem", str(HERE), f.name],
            capture_output=True, text=True,
        )  # fmt: skip
    return done.stderr
