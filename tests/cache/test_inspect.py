"""What a prompt cache says of itself."""

from __future__ import annotations

from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
)

from kvgraft.cache import quantization


def test_quantisation_of_a_cache() -> None:
    def entry(bits: int) -> QuantizedKVCache:
        return QuantizedKVCache(group_size=32, bits=bits)

    assert quantization([entry(4), entry(4)]) == (4, 32)
    assert quantization([entry(4), entry(8)]) is None
    assert quantization([entry(4), KVCache()]) is None
    assert quantization([]) is None
