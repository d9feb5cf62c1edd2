"""kvgraft: hand a running conversation from one language model to another.

A mapper turns the KV cache that one model filled into a cache that another model
of the family can continue from, without prefilling the conversation again (Heo et
al., arXiv:2608.03893)::

    import kvgraft

    mapper = kvgraft.load_mapper("large-to-small")
    cache = kvgraft.map_cache(source_cache, mapper, target_model)  # mlx-lm caches
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvgraft import _abi

# Before anything loads the extension: with another MLX it would fail obscurely.
_abi.check()

from kvgraft.errors import KvgraftError  # noqa: E402
from kvgraft.mapper.mapper import Mapper, load_mapper  # noqa: E402
from kvgraft.mapper.save import save_mapper  # noqa: E402
from kvgraft.mapper.transfer import transfer_cache, transfer_layer  # noqa: E402

if TYPE_CHECKING:
    from kvgraft.cache.map import map_cache
    from kvgraft.compat import CrossModelMapper as CrossModelMapper
    from kvgraft.compat import KVMapper as KVMapper
    from kvgraft.evaluate.run import evaluate_mapper
    from kvgraft.fit.pipeline import fit_mapper
    from kvgraft.handoff.session import Session
    from kvgraft.handoff.switch import switch
    from kvgraft.models.forward import prefill

__all__ = [
    "KvgraftError",
    "Mapper",
    "Session",
    "evaluate_mapper",
    "fit_mapper",
    "load_mapper",
    "map_cache",
    "prefill",
    "save_mapper",
    "switch",
    "transfer_cache",
    "transfer_layer",
]

__version__ = version("kvgraft")

# Imported when first used: they bring mlx-lm, and with it transformers.
_LATER = {
    "CrossModelMapper": "kvgraft.compat",
    "KVMapper": "kvgraft.compat",
    "Session": "kvgraft.handoff.session",
    "evaluate_mapper": "kvgraft.evaluate.run",
    "fit_mapper": "kvgraft.fit.pipeline",
    "map_cache": "kvgraft.cache.map",
    "prefill": "kvgraft.models.forward",
    "switch": "kvgraft.handoff.switch",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
