"""mlx-lm's cache classes: which are its own, and why some cannot be mapped."""

from __future__ import annotations

from typing import Any

__all__ = ["UNSUPPORTED", "is_from_mlx_lm"]

UNSUPPORTED = {
    "ArraysCache": "recurrent or convolutional state, which has no per-token keys and values",
    "MambaCache": "recurrent or convolutional state, which has no per-token keys and values",
    "ChunkedKVCache": "chunked attention, whose cache drops the front of the text",
}
"""What a cache of a class holds that makes it impossible to map."""


def is_from_mlx_lm(cache: Any) -> bool:
    """Whether a cache object's class is mlx-lm's own, not another of the same name."""
    return type(cache).__module__ == "mlx_lm.models.cache"
