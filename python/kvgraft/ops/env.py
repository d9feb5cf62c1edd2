"""What kvgraft runs on here: versions, devices, kernels, and the BLAS behind MLX."""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from kvgraft import _build_info, _ext

__all__ = ["blas", "find_openblas", "format_report", "machine_memory", "report"]

_OPENBLAS_PLACES = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/libopenblas.so",
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _preloaded_blas() -> str | None:
    """The library that puts ``cblas_sgemm`` in front of the one libmlx links."""
    process = ctypes.CDLL(None)
    try:
        function = process.cblas_sgemm
    except AttributeError:
        return None
    address = ctypes.cast(function, ctypes.c_void_p)
    info = _SymbolInfo()
    if process.dladdr(address, ctypes.byref(info)) and info.file:
        return os.fsdecode(info.file)
    return "unknown"


def _linked_blas() -> str | None:
    """The BLAS that came with libmlx, from the process's memory map."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    except OSError:
        return None
    mine = [p for p in sorted(paths) if "mlx" in p and "blas" in os.path.basename(p)]
    return mine[0] if mine else None


def find_openblas() -> str | None:
    """The file of an OpenBLAS that is installed where Linux systems have it, or ``None``."""
    for pattern in _OPENBLAS_PLACES:
        found = sorted(glob.glob(pattern))
        if found:
            return found[0]
    return None


def machine_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def blas() -> dict[str, Any]:
    """Which BLAS MLX's CPU device multiplies with.

    Returns:
        ``library``: its file or name, ``None`` when it cannot be told;
        ``slow``: whether it is Netlib's reference BLAS, which MLX's Linux wheel
        carries; ``hint``: what to do then, else ``None``.
    """
    if sys.platform == "darwin":
        return {"library": "Accelerate", "slow": False, "hint": None}
    preloaded = _preloaded_blas()
    if preloaded is not None:
        return {"library": preloaded, "slow": False, "hint": None}
    linked = _linked_blas()
    slow = linked is not None and os.path.basename(linked).startswith("libblas")
    hint = None
    if slow:
        library = find_openblas()
        if library is None:
            library = "/path/to/libopenblas.so.0"
            get = "Install it (Debian, Ubuntu: apt install libopenblas0-pthread) and start with "
        else:
            get = "Start with "
        hint = (
            "MLX's Linux wheel multiplies matrices with Netlib's reference BLAS; OpenBLAS is 10 "
            "to 30 times faster in float32 (float16 and bfloat16 gain nothing: run models in "
            f"float32 here). {get}LD_PRELOAD={library}. kvgraft's own kernel does not need it."
        )
    return {"library": linked, "slow": slow, "hint": hint}


def report() -> dict[str, Any]:
    """Everything worth knowing in a bug report, as JSON-ready values."""
    gpu = bool(mx.is_available(mx.Device(mx.gpu)))
    return {
        "kvgraft": _version("kvgraft"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "numpy": _version("numpy"),
        "built_for_mlx": _build_info.MLX_VERSION,
        "built_with": f"{_build_info.COMPILER}, nanobind {_build_info.NANOBIND_VERSION}",
        "device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
        "gpu": gpu,
        "gpu_name": _gpu_name() if gpu else None,
        "map_layer": {
            "cpu": f"fused kernel, {_ext.cpu_isa()} (of {', '.join(_ext.cpu_isas())}), "
            f"{_ext.num_threads()} threads",
            "gpu": _gpu_path(gpu),
        },
        "blas": blas(),
    }


def _gpu_name() -> str:
    info = mx.device_info(mx.Device(mx.gpu))
    return ", ".join(str(info[k]) for k in ("device_name", "architecture") if k in info)


def _gpu_path(gpu: bool) -> str:
    if not gpu:
        return "there is no GPU"
    why_not = _ext.metal_status()
    if why_not:
        return f"MLX's own operations: {why_not}"
    return (
        "fused Metal kernels: map_layer_rows up to 16 tokens, map_layer_tile for more; MLX's own "
        "operations for what kvgraft.ops.fused.explain calls composed"
    )


def format_report(data: dict[str, Any]) -> str:
    """:func:`report`'s result as lines to read."""
    lines = [
        f"kvgraft   {data['kvgraft']}",
        f"mlx       {data['mlx']} (built for {data['built_for_mlx']}; {data['built_with']})",
        f"mlx-lm    {data['mlx_lm']}",
        f"numpy     {data['numpy']}",
        f"Python    {data['python']} on {data['system']}",
        f"device    {data['device']}",
        *([f"GPU       {data['gpu_name']}"] if data["gpu"] else []),
        "map_layer",
        f"  on cpu  {data['map_layer']['cpu']}",
        f"  on gpu  {data['map_layer']['gpu']}",
        f"BLAS      {data['blas']['library']}" + (" (slow)" if data["blas"]["slow"] else ""),
    ]
    if data["blas"]["hint"]:
        lines.append(f"          {data['blas']['hint']}")
    return "\n".join(lines)
