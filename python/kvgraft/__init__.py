"""kvgraft: hand a running conversation from one language model to another.

A mapper turns the KV cache that one model filled into a cache that another model
of the family can go on from, without reading the conversation again (Heo et al.,
arXiv:2608.03893)::

    import kvgraft
    from kvgraft.handoff import map_cache

    mapper = kvgraft.load_mapper("large-to-small")
    cache = map_cache(source_cache, mapper, target_model)  # mlx-lm caches
"""

from importlib.metadata import version

from kvgraft import _abi

# Before anything loads the extension: with another MLX it would fail obscurely.
_abi.check()

from kvgraft.errors import KvgraftError  # noqa: E402
from kvgraft.mapper.mapper import CrossModelMapper, KVMapper, LayerMap, LinearMap, Mapper  # noqa: E402
from kvgraft.mapper.transfer import load_mapper, transfer_cache, transfer_layer  # noqa: E402
from kvgraft.models.rope import RopeSpec  # noqa: E402
from kvgraft.ops.fused import map_layer  # noqa: E402

__all__ = [
    "CrossModelMapper",
    "KVMapper",
    "KvgraftError",
    "LayerMap",
    "LinearMap",
    "Mapper",
    "RopeSpec",
    "load_mapper",
    "map_layer",
    "transfer_cache",
    "transfer_layer",
]

__version__ = version("kvgraft")
