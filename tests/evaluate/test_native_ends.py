"""Choice of the native start and end, on made-up numbers."""

from __future__ import annotations

import numpy as np

from kvgraft.evaluate.native_ends import choose_native_ends, search

NATIVE = np.linspace(2.0, 2.4, 12)


def chosen(losses, seconds, map_seconds=1.0, prefill_seconds=11.0):
    found = {ends: NATIVE + gap for ends, gap in losses.items()}
    best = choose_native_ends(search(found, NATIVE, seconds, map_seconds, prefill_seconds))
    return best.native_start, best.native_end


def test_tokens_that_pay_more_than_reading_everything_are_taken():
    # Reading all removes 0.2 nats in 10 s. A tail that removes 0.1 in 1 s pays.
    losses = {(0, 1): 0.2, (0, 32): 0.1, (0, 128): 0.09}
    seconds = {(0, 1): 0.0, (0, 32): 1.0, (0, 128): 4.0}
    assert chosen(losses, seconds) == (0, 32)
    # If the longer one took no longer, it would be taken.
    assert chosen(losses, {**seconds, (0, 128): 1.01}) == (0, 128)


def test_tokens_that_pay_less_are_not_read():
    losses, seconds = {(0, 1): 0.2, (4, 1): 0.19}, {(0, 1): 0.0, (4, 1): 1.0}
    assert chosen(losses, seconds) == (0, 1)


def test_a_gain_that_may_be_noise_is_not_bought():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 12)
    noisy = noise - noise.mean() - 0.05
    assert chosen({(0, 1): 0.2, (0, 8): 0.2 + noisy}, {(0, 1): 0.0, (0, 8): 0.0}) == (0, 1)


def test_nothing_is_read_where_mapping_saves_nothing():
    losses, seconds = {(0, 1): 0.2, (0, 8): 0.0}, {(0, 1): 0.0, (0, 8): 0.1}
    assert chosen(losses, seconds, map_seconds=12.0) == (0, 1)
    assert chosen({(0, 1): 0.0, (0, 8): 0.0}, seconds) == (0, 1)


def test_broken_candidates_are_not_chosen():
    losses = {(0, 1): 0.2, (0, 8): float("nan")}
    assert chosen(losses, {(0, 1): 0.0, (0, 8): 0.0}) == (0, 1)
    assert chosen({(0, 1): float("nan")}, {(0, 1): 0.0}) == (0, 1)
