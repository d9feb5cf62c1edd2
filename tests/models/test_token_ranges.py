"""Sets of token positions."""

from __future__ import annotations

import mlx.core as mx

from kvgraft.models.token_ranges import TokenRanges


def test_held_tokens() -> None:
    assert TokenRanges.last(5, 8, 4) == TokenRanges.all(5)
    dropped = TokenRanges.last(20, 8, 4)
    assert dropped.ranges == ((0, 4), (16, 20)) and len(dropped) == 8 and dropped.stop == 20
    assert dropped.positions.tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert str(dropped) == "0…3, 16…19"
    assert TokenRanges.all(20).covers(dropped) and not dropped.covers(TokenRanges.all(20))
    assert dropped & TokenRanges.last(20, 3) == TokenRanges.last(20, 3)
    assert (TokenRanges.last(20, 3) & TokenRanges.all(10)).ranges == ()
    rows = mx.arange(20)[:, None]
    assert TokenRanges.all(20).take(dropped, rows)[:, 0].tolist() == dropped.positions.tolist()
    part = TokenRanges.of([(2, 4), (17, 19)])
    assert dropped.take(part, dropped.positions[:, None])[:, 0].tolist() == [2, 3, 17, 18]
