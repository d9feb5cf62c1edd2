"""Where the compiler of the emulator comes from: the system's clang 19, or the one in ziglang.

``pip install ziglang==0.14.1`` brings the same clang (19.1.7) without its linker, its
symbolizer and its coverage tools: the first two are those of g++ and binutils here.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
from functools import cache
from pathlib import Path

DISASSEMBLER = "llvm-dis-19"
LLVM = ("clang++-19", DISASSEMBLER, "llvm-profdata-19", "llvm-cov-19")
INSTALL_LLVM = "apt-get install clang-19 llvm-19 libclang-rt-19-dev"


@cache
def _zig() -> Path | None:
    found = importlib.util.find_spec("ziglang")
    path = Path(found.origin).with_name("zig") if found and found.origin else None
    return path if path is not None and path.exists() else None


def compiler() -> list[str]:
    """The command of clang 19 as a C++ compiler; ``-c``, ``-E`` and ``-fsyntax-only`` alone."""
    if shutil.which("clang++-19"):
        return ["clang++-19"]
    return [str(_zig()), "clang", "--driver-mode=g++", "-target", "x86_64-unknown-linux-gnu"]


def missing_tools() -> list[str]:
    """What the emulator needs and this machine lacks."""
    missing = [tool for tool in ("g++", "addr2line") if shutil.which(tool) is None]
    if shutil.which("clang++-19") is None and _zig() is None:
        missing.append("clang 19 (pip install ziglang==0.14.1)")
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        missing.append("Linux on x86-64")
    return missing
