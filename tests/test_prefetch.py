"""Batches that are made ahead of their update."""

from __future__ import annotations

import threading

import pytest

from nmt.data.batching import Update
from nmt.training.prefetch import Prefetcher

UPDATES = [Update([], num_tokens=i, num_src_tokens=i) for i in range(5)]


def test_every_update_gets_its_own_whatever_was_expected() -> None:
    prefetcher = Prefetcher(lambda update: update.num_tokens)
    order = [(0, 1), (1, 2), (4, 3), (2, None), (3, 3), (3, 0)]
    for now, then in order:
        following = None if then is None else UPDATES[then]
        assert prefetcher.take(UPDATES[now], following) == now


def test_the_following_one_is_made_while_the_caller_works() -> None:
    made = {update.num_tokens: threading.Event() for update in UPDATES}
    prefetcher = Prefetcher(lambda update: made[update.num_tokens].set())
    prefetcher.take(UPDATES[0], UPDATES[1])
    assert made[1].wait(10)
    assert not made[2].is_set()


def test_an_error_reaches_who_takes_the_batch() -> None:
    def make(update: Update) -> int:
        if update.num_tokens == 2:
            raise MemoryError("no room")
        return update.num_tokens

    prefetcher = Prefetcher(make)
    assert prefetcher.take(UPDATES[1], UPDATES[2]) == 1
    with pytest.raises(MemoryError, match="no room"):
        prefetcher.take(UPDATES[2], None)
    assert prefetcher.take(UPDATES[3], None) == 3
