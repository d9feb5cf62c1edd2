"""mlx-lm's cache objects, read, built and mapped.

Caches are read and built by attributes (``keys``, ``values``, ``offset``),
never through ``.state``: its meaning changed between mlx-lm 0.31 and 0.32.

Arrays that mlx-lm writes to (``cache.keys[..., a:b, :] = x``) change the Python
object in place, so two caches holding one object write into each other. What is
read here is a new object over the same memory, and what is built never holds an
object of the caller's.
"""

from kvgraft.cache.build import build_cache, check_mappable, check_quantizable, compact
from kvgraft.cache.inspect import n_tokens, quantization, size_limit
from kvgraft.cache.provenance import (
    MappedRange,
    Provenance,
    is_mapped,
    mapped_ranges,
    mark,
    provenance_of,
)
from kvgraft.cache.read import read_cache
from kvgraft.cache.required_ranges import required_positions
from kvgraft.cache.rewind import trim
from kvgraft.cache.snapshot import CacheSnapshot, QuantizedRows, SizeLimit

__all__ = [
    "SizeLimit",
    "CacheSnapshot",
    "MappedRange",
    "Provenance",
    "QuantizedRows",
    "build_cache",
    "check_mappable",
    "check_quantizable",
    "is_mapped",
    "compact",
    "mapped_ranges",
    "mark",
    "n_tokens",
    "required_positions",
    "provenance_of",
    "quantization",
    "read_cache",
    "size_limit",
    "trim",
]
