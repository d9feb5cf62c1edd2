"""Which special tokens a tokenizer puts before a text."""

from __future__ import annotations

import pytest
from fit_problems import tokenizer
from tokenizers import processors

from kvgraft.text.special_tokens import special_prefix


@pytest.mark.parametrize(
    ("template", "prefix"),
    [(None, []), ("<s> $A", ["<s>"]), ("<s> <s> $A </s>", ["<s>", "<s>"]), ("$A </s>", [])],
)
def test_what_stands_before_a_text_is_found(template, prefix):
    tok = tokenizer()
    if template is not None:
        ids = [(t, tok.convert_tokens_to_ids(t)) for t in ("<s>", "</s>")]
        tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=ids
        )
    assert special_prefix(tok) == tok.convert_tokens_to_ids(prefix)
