"""Looks before the binary is loaded.

libmlx promises no C++ ABI between releases, not even patch releases. Loading
``_ext`` beside another mlx than it was built for ends in an error about a
mangled symbol at best, so the versions are compared first.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary kvgraft kvgraft"


def check() -> None:
    """Raise ``ImportError`` unless the installed mlx is the one we were built for."""
    try:
        from kvgraft import _build_info
    except ImportError as error:
        raise ImportError(
            "kvgraft is not built: its extension module is missing. Install it with pip "
            "(from a checkout: pip install .) instead of importing the source tree."
        ) from error
    try:
        found = version("mlx")
    except PackageNotFoundError as error:
        raise ImportError(
            f"kvgraft needs mlx {_build_info.MLX_VERSION}, and no mlx is installed. "
            f"Install mlx=={_build_info.MLX_VERSION}."
        ) from error
    if found != _build_info.MLX_VERSION:
        raise ImportError(
            f"kvgraft was built for mlx {_build_info.MLX_VERSION}, but mlx {found} is installed. "
            f"Install mlx=={_build_info.MLX_VERSION}, or rebuild kvgraft against yours: {_REBUILD}"
        )
    try:
        import mlx.core  # noqa: F401  loads libmlx and registers its types
    except ImportError as error:
        raise ImportError(
            f"mlx {found} is installed but cannot be loaded ({error}). On Linux mlx needs a "
            f'back end: pip install "mlx[cpu]=={found}".'
        ) from error
