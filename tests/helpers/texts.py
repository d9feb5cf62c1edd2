"""Text files for the tests of :mod:`kvgraft.text`, and a tokenizer for them."""

from __future__ import annotations

from fit_problems import prose, tokenizer

TOKENIZER = tokenizer()


def words(path, n=2000, seed=0):
    """Write prose to a file."""
    path.write_text(prose(n, seed))
    return path


def decoded(rows) -> str:
    """Token ids as text."""
    return TOKENIZER.decode(rows.reshape(-1))
