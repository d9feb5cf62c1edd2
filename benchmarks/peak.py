"""What the processor can at most do, measured by csrc/bench, which is built on demand.

Needs CMake and a C++ compiler, like building kvgraft itself.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench"


@functools.cache
def library() -> ctypes.CDLL:
    """libpeak, built if it is not up to date."""
    beside = Path(sys.executable).with_name("cmake")
    cmake = str(beside) if beside.exists() else shutil.which("cmake")
    if cmake is None:
        raise SystemExit("The peak is measured by a program that CMake builds: install cmake.")
    for arguments in (
        ["-S", ROOT / "csrc" / "bench", "-B", BUILD, "-DCMAKE_BUILD_TYPE=Release"],
        ["--build", BUILD],
    ):
        done = subprocess.run([cmake, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"csrc/bench does not build:\n{done.stdout}{done.stderr}")
    found = ctypes.CDLL(str(next(BUILD.glob("libpeak.*"))))
    found.kvgraft_peak.restype = ctypes.c_double
    found.kvgraft_peak.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    return found


def spin(isa: str, tasks: int, steps: int, threads: int) -> float:
    """Multiply and add in registers.

    Args:
        isa: Instruction set, one of ``_ext.cpu_isas()``.
        tasks: Pieces of work, shared out to the threads.
        steps: Length of each.
        threads: Threads to use.

    Returns:
        The floating-point operations done.
    """
    done = library().kvgraft_peak(isa.encode(), tasks, steps, threads)
    if not done > 0:
        raise RuntimeError(f"csrc/bench measures nothing with {isa!r}.")
    return float(done)
