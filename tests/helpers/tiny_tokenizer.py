"""A small tokenizer, made on the spot."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def tokenizer(
    *, merges: int = 2, added: tuple[str, ...] = ("<s>", "</s>"), bos: bool = False, **roles: str
) -> Any:
    """A byte-level tokenizer with a few merges."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [("t", "h"), ("th", "e"), ("o", "n")][:merges]
    for a, b in pairs:
        vocab[a + b] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in added])
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, **{"bos_token": "<s>", "eos_token": "</s>", **roles}
    )
