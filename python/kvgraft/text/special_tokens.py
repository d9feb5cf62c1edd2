"""Special tokens that a tokenizer puts before a text, such as BOS."""

from __future__ import annotations

from typing import Any

__all__ = ["special_prefix"]


def special_prefix(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before every text; empty if there are none.

    A prompt in use begins with them, so every sequence that a model reads for a fit or
    an evaluation must begin with them too.

    Args:
        tokenizer: mlx-lm's tokenizer wrapper or a transformers tokenizer.
    """
    full = [int(i) for i in tokenizer.encode("a")]
    bare = [int(i) for i in tokenizer.encode("a", add_special_tokens=False)]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []
