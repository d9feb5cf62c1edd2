"""Token ids that a model has an embedding for.

MLX does not check indices: an id beyond the embedding reads whatever lies there,
and the model continues from it without an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from numpy.typing import NDArray

from kvgraft.errors import TokenIdError

__all__ = ["check_tokens", "vocabulary_size"]

_known: dict[int, tuple[weakref.ref[Any], int | None]] = {}


def vocabulary_size(model: Any) -> int | None:
    """Rows of the largest embedding of a model; ``None`` if it has none that is known.

    Padding of the embedding counts: what is beyond the tokenizer does no harm.
    """
    seen = _known.get(id(model))
    if seen is not None and seen[0]() is model:
        return seen[1]
    if not isinstance(model, Module):
        return None
    sizes = [
        int(m.weight.shape[0])
        for m in model.modules()  # type: ignore[no-untyped-call]
        if isinstance(m, (Embedding, QuantizedEmbedding))
    ]
    size = max(sizes, default=None)
    key = id(model)
    _known[key] = weakref.ref(model, lambda _: _known.pop(key, None)), size
    return size


def check_tokens(model: Any, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> None:
    """Refuse ids that are not in a model's vocabulary.

    Args:
        model: A live mlx-lm model.
        tokens: Token ids, ``[n]``.

    Raises:
        TokenIdError: Naming the first of them, or if they are no whole numbers.
    """
    size = vocabulary_size(model)
    ids = np.asarray(tokens)
    if ids.size and ids.dtype.kind not in "iu":
        raise TokenIdError("Tokens are given as whole numbers, the ids that the tokenizer makes.")
    if size is None or not ids.size or (ids.min() >= 0 and ids.max() < size):
        return
    first = int(np.flatnonzero((ids < 0) | (ids >= size))[0])
    raise TokenIdError(
        f"Token {first} has the id {int(ids[first])}, and the model knows ids from 0 to "
        f"{size - 1:,}. Tokenize the text with this model's tokenizer."
    )
