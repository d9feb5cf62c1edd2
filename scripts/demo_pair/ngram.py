"""Interpolated modified Kneser-Ney n-gram model (Chen and Goodman 1998), the pair's yardstick."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Order:
    """Counts of one n-gram length, with what the interpolation needs for every context."""

    def __init__(self, keys: Keys, counts: Floats, bits: int) -> None:
        """`keys` are packed n-grams, sorted and unique, the last token in the low `bits`."""
        self.keys = keys
        ones, twos, threes, fours = (float((counts == n).sum()) for n in (1, 2, 3, 4))
        y = ones / (ones + 2 * twos)
        raw = (1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes)
        discounts = np.array([0.0, *raw])
        discount = discounts[np.minimum(counts, 3).astype(np.int64)]
        self.kept = counts - discount
        # Sorted keys hold the n-grams of one context side by side.
        contexts = keys >> np.uint64(bits)
        starts = np.flatnonzero(np.concatenate(([True], contexts[1:] != contexts[:-1])))
        self.contexts = contexts[starts]
        self.totals = np.add.reduceat(counts, starts)
        self.left_over = np.add.reduceat(discount, starts) / self.totals


def _find(sorted_keys: Keys, wanted: Keys) -> tuple[Ids, NDArray[np.bool_]]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted


class KneserNey:
    def __init__(self, tokens: Ids, vocabulary: int, order: int = 5) -> None:
        self.bits = (vocabulary - 1).bit_length()
        if self.bits * order > 64:
            raise ValueError(f"{order} tokens of {self.bits} bits do not fit into a 64-bit key")
        self.vocabulary = vocabulary
        keys, occurrences = np.unique(self._pack(tokens, order), return_counts=True)
        counts = occurrences.astype(np.float64)
        self.orders: list[_Order] = [_Order(keys, counts, self.bits)]
        for length in range(order - 1, 0, -1):
            # Shorter n-grams count the different tokens seen before them, not their occurrences.
            mask = np.uint64((1 << (self.bits * length)) - 1)
            keys, occurrences = np.unique(keys & mask, return_counts=True)
            self.orders.insert(0, _Order(keys, occurrences.astype(np.float64), self.bits))

    def _pack(self, tokens: Ids, length: int) -> Keys:
        """The n-gram that ends at each token from the `length`-th on."""
        packed = np.zeros(len(tokens) - length + 1, dtype=np.uint64)
        for offset in range(length):
            shifted = tokens[offset : offset + len(packed)].astype(np.uint64)
            packed = (packed << np.uint64(self.bits)) | shifted
        return packed

    def nll(self, tokens: Ids) -> Floats:
        """Nats of every token after the first, each given those before it."""
        probability = np.full(len(tokens), 1 / self.vocabulary)
        for length, order in enumerate(self.orders, start=1):
            grams = self._pack(tokens, length)
            target = probability[length - 1 :]
            context_at, context_known = _find(order.contexts, grams >> np.uint64(self.bits))
            gram_at, gram_known = _find(order.keys, grams)
            direct = np.where(gram_known, order.kept[gram_at], 0.0) / order.totals[context_at]
            mixed = direct + order.left_over[context_at] * target
            probability[length - 1 :] = np.where(context_known, mixed, target)
        nats: Floats = -np.log(probability[1:])
        return nats
