"""Keys and values of a cache at one moment, independent of mlx-lm's objects."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import mlx.core as mx

from kvgraft.errors import CacheError
from kvgraft.models.token_ranges import TokenRanges

__all__ = ["SizeLimit", "CacheSnapshot", "LayerRows", "QuantizedRows"]


@dataclass(frozen=True)
class SizeLimit:
    """The limit of a cache that was made with ``max_kv_size``.

    Attributes:
        max_size: Tokens that it keeps.
        keep: Of these, how many from the beginning of the text.
    """

    max_size: int
    keep: int


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as ``mx.quantize`` packs them.

    Attributes:
        packed: ``[B, H, N, D * bits / 32]`` uint32.
        scales: ``[B, H, N, D / group_size]``.
        biases: ``[B, H, N, D / group_size]``.
        group_size: Numbers that share a scale.
        bits: Bits per number.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H, N, D)`` of the rows once dequantised."""
        batch, heads, n_tokens, groups = self.scales.shape
        return batch, heads, n_tokens, groups * self.group_size

    def dequantize(self) -> mx.array:
        """The rows, ``[B, H, N, D]`` in the scales' dtype. Lazy, a new array each time."""
        return mx.dequantize(
            self.packed, self.scales, self.biases, group_size=self.group_size, bits=self.bits
        )


@dataclass(frozen=True)
class LayerRows:
    """One layer's keys and values.

    Attributes:
        keys: ``[B, H, len(token_ranges), D]``, with RoPE, as the cache keeps them.
        values: Likewise.
        token_ranges: The tokens whose rows these are.
    """

    keys: mx.array | QuantizedRows
    values: mx.array | QuantizedRows
    token_ranges: TokenRanges

    def pair(self) -> tuple[mx.array, mx.array]:
        """``(keys, values)`` as float arrays; quantised ones are dequantised, lazily."""
        k, v = self.keys, self.values
        return (
            k.dequantize() if isinstance(k, QuantizedRows) else k,
            v.dequantize() if isinstance(v, QuantizedRows) else v,
        )


@dataclass(frozen=True)
class CacheSnapshot:
    """Keys and values of a cache, as they are now.

    Attributes:
        rows: The layers.
        offset: Number of tokens that were read. Full layers hold tokens
            ``0 … offset-1``; see :attr:`token_ranges` for the others.
        size_limit: The limit of a cache made with ``max_kv_size``, else ``None``.
    """

    rows: tuple[LayerRows, ...]
    offset: int
    size_limit: SizeLimit | None = None

    @property
    def keys(self) -> tuple[mx.array, ...]:
        """Per layer ``[B, H, len(token_ranges), D]``, with RoPE. Quantised ones are dequantised."""
        return tuple(k for k, _ in self.layers)

    @property
    def values(self) -> tuple[mx.array, ...]:
        """Per layer ``[B, H, len(token_ranges), D]``."""
        return tuple(v for _, v in self.layers)

    @property
    def layers(self) -> list[tuple[mx.array, mx.array]]:
        """``(keys, values)`` per layer; which tokens' they are, :attr:`token_ranges` says.

        Give both to :func:`kvgraft.cache.build_cache`, unless :attr:`is_whole`.
        """
        return [row.pair() for row in self.rows]

    @property
    def token_ranges(self) -> list[TokenRanges]:
        """Per layer, the tokens whose rows it holds."""
        return [row.token_ranges for row in self.rows]

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds every token."""
        return all(row.token_ranges == TokenRanges.all(self.offset) for row in self.rows)

    @property
    def batch_size(self) -> int:
        """Number of conversations, all of the same length."""
        return int(self.rows[0].keys.shape[0])

    @property
    def positions(self) -> mx.array:
        """Absolute positions of the tokens, ``[N]`` int32, the same in every layer.

        Raises:
            CacheError: If the layers hold different tokens; use :attr:`token_ranges`.
        """
        if any(row.token_ranges != self.rows[0].token_ranges for row in self.rows):
            raise CacheError(
                "The layers of this cache hold different tokens (sliding windows), so they "
                "share no positions. Use its `token_ranges`, or kvgraft.cache.map.map_cache."
            )
        return self.rows[0].token_ranges.positions

    def source_kv(self) -> MutableMapping[int, tuple[mx.array, mx.array]]:
        """``{layer: (keys, values)}`` for :func:`kvgraft.mapper.transfer.iter_transfer`.

        Quantised layers are dequantised anew whenever they are asked for, so
        that a whole cache of floats never lies beside the quantised one.
        """
        return _Layers(dict(enumerate(self.rows)))


class _Layers(MutableMapping[int, tuple[mx.array, mx.array]]):
    """Layers by number, made into float arrays on the way out."""

    def __init__(self, rows: dict[int, LayerRows]) -> None:
        self._rows = rows

    def __getitem__(self, layer: int) -> tuple[mx.array, mx.array]:
        return self._rows[layer].pair()

    def __setitem__(self, layer: int, pair: tuple[mx.array, mx.array]) -> None:
        k, v = pair
        self._rows[layer] = LayerRows(k, v, self._rows[layer].token_ranges)

    def __delitem__(self, layer: int) -> None:
        del self._rows[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
