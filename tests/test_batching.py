"""Token-bucket batches and updates: what must hold for any lengths, seed and number of ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from nmt.data.batch import batch_cost, bucket, padding_share
from nmt.data.batching import TokenBatchSampler
from nmt.errors import ConfigError

CASES = range(12)


def random_lengths(seed: int, *, most: int = 60) -> Any:
    """Draw 1 to 400 pairs, most short and a few long, as real corpora are."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 400))
    lengths = draw.gamma(2.0, most / 12, size=(count, 2)).astype(np.int32) + 1
    return np.minimum(lengths, most)


def sampler(lengths: Any, max_tokens: int = 150, **changes: Any) -> TokenBatchSampler:
    settings: dict[str, Any] = {"tokens_per_update": 600, "seed": 3} | changes
    return TokenBatchSampler(lengths, max_tokens, **settings)


def plan(sampler: TokenBatchSampler, epoch: int = 0) -> list[list[list[int]]]:
    """Return the pair numbers of each batch of each update."""
    return [[rows.tolist() for rows in update.batches] for update in sampler.updates(epoch)]


def rank_plans(lengths: Any, world_size: int, **changes: Any) -> list[list[list[list[int]]]]:
    """Return the plan of every rank."""
    ranks = [
        sampler(lengths, rank=rank, world_size=world_size, **changes) for rank in range(world_size)
    ]
    return [plan(one, 1) for one in ranks]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for rows in batches for row in rows]


# --- batches


@pytest.mark.parametrize("seed", CASES)
def test_bucket_puts_every_pair_in_one_batch_within_the_bound(seed: int) -> None:
    lengths = random_lengths(seed)
    bound = int(np.random.default_rng(seed).integers(lengths.max(), 500))
    order = np.random.default_rng(seed + 1).permutation(len(lengths))
    batches = [rows.tolist() for rows in bucket(lengths, bound, order)]
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    longest = [max(int(side) for side in pair) for pair in lengths]
    costs = [len(rows) * max(longest[row] for row in rows) for rows in batches]
    assert all(0 < cost <= bound for cost in costs)
    assert costs == [batch_cost(lengths[rows]) for rows in batches]
    flat = [longest[row] for rows in batches for row in rows]
    assert flat == sorted(flat)
    for rows, following in zip(batches, batches[1:], strict=False):  # no batch is cut too early
        assert (len(rows) + 1) * longest[following[0]] > bound


def test_bucket_takes_the_pairs_that_it_is_given() -> None:
    lengths = random_lengths(5)
    some = np.arange(0, len(lengths), 3)
    batches = bucket(lengths, 200, some)
    assert sorted(np.concatenate(batches).tolist()) == some.tolist()


def test_bucket_breaks_ties_by_the_order() -> None:
    lengths = np.full((6, 2), 4, dtype=np.int32)
    order = np.array([3, 1, 5, 0, 2, 4])
    batches = [rows.tolist() for rows in bucket(lengths, 8, order)]
    assert batches == [[3, 1], [5, 0], [2, 4]]


def test_a_batch_costs_its_rows_times_its_longest_side() -> None:
    assert batch_cost(np.array([[3, 9], [5, 2], [1, 1]], dtype=np.int32)) == 3 * 9


@pytest.mark.parametrize("seed", CASES)
def test_padding_share_equals_a_count_of_empty_places(seed: int) -> None:
    lengths = random_lengths(seed)
    batches = bucket(lengths, 200, np.arange(len(lengths)))
    empty = places = 0
    for rows in batches:
        for side in (0, 1):
            width = max(int(lengths[row, side]) for row in rows)
            for row in rows:
                places += width
                empty += width - int(lengths[row, side])
    assert padding_share(lengths, batches) == pytest.approx(empty / places)


def test_sorting_saves_padding() -> None:
    lengths = random_lengths(7)
    unsorted = [np.array(rows) for rows in np.array_split(np.arange(len(lengths)), 40)]
    batches = bucket(lengths, 300, np.arange(len(lengths)))
    assert padding_share(lengths, batches) < padding_share(lengths, unsorted) / 1.5


# --- updates


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_pair_comes_once_an_epoch_in_batches_within_the_bound(seed: int, epoch: int) -> None:
    lengths = random_lengths(seed)
    updates = plan(sampler(lengths), epoch)
    batches = [rows for update in updates for rows in update]
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    assert all(batch_cost(lengths[rows]) <= 150 for rows in batches)
    assert all(updates)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = random_lengths(3)
    first, again = sampler(lengths), sampler(lengths)
    again.updates(7)  # what was planned before leaves no trace
    assert plan(first, 2) == plan(again, 2)
    plans = [plan(sampler(lengths, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(one != other for i, one in enumerate(plans) for other in plans[:i])


@pytest.mark.parametrize("seed", CASES)
def test_the_order_of_a_corpus_is_one_shuffle_sorted_by_length_and_one_of_batches(
    seed: int,
) -> None:
    """A run that goes on with a newer nmt must find this order, so an oracle keeps it."""
    lengths = random_lengths(seed)
    generator = np.random.default_rng((3, 5))  # (seed, epoch)
    pairs = [(*map(int, lengths[i]), int(i)) for i in generator.permutation(len(lengths))]
    batches: list[list[int]] = []
    for src, tgt, row in sorted(pairs, key=lambda pair: (max(pair[:2]), pair[1], pair[0])):
        if not batches or (len(batches[-1]) + 1) * max(src, tgt) > 150:
            batches.append([])
        batches[-1].append(row)
    expected = [batches[i] for i in generator.permutation(len(batches))]
    planned = [rows for update in plan(sampler(lengths), 5) for rows in update]
    assert planned == expected


def test_epochs_differ_in_the_pairs_of_a_batch_and_in_the_order_of_batches() -> None:
    lengths = np.random.default_rng(3).integers(2, 8, (2000, 2)).astype(np.int32)
    one, other = ([rows for update in plan(sampler(lengths), e) for rows in update] for e in (0, 1))
    shared = {frozenset(rows) for rows in one} & {frozenset(rows) for rows in other}
    assert len(shared) < len(one) / 10
    longest = [int(lengths[rows].max()) for rows in one]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("seed", [1, 3, 8])
def test_ranks_share_the_pairs_of_every_update_that_one_rank_makes(
    seed: int, world_size: int
) -> None:
    lengths = random_lengths(seed)
    alone = plan(sampler(lengths), 1)
    ranks = rank_plans(lengths, world_size)
    assert {len(updates) for updates in ranks} == {len(alone)}
    for update, shares in zip(alone, zip(*ranks, strict=True), strict=True):
        together = [row for batches in shares for row in flat(batches)]
        assert together == flat(update)  # in its order, hence each once


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_knows_the_size_of_the_whole_update(world_size: int) -> None:
    lengths = random_lengths(8)
    ranks = [
        sampler(lengths, rank=rank, world_size=world_size).updates(0) for rank in range(world_size)
    ]
    for shares in zip(*ranks, strict=True):
        rows = [row for share in shares for batch in share.batches for row in batch.tolist()]
        for share in shares:
            assert share.num_src_tokens == sum(int(lengths[row, 0]) for row in rows)
            assert share.num_tokens == sum(int(lengths[row, 1]) for row in rows)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("tokens_per_update", [300, 3000])
def test_ranks_have_equal_work_and_no_sliver_of_a_batch(
    seed: int, world_size: int, tokens_per_update: int
) -> None:
    lengths = random_lengths(seed)
    changes = {"tokens_per_update": tokens_per_update}
    alone = plan(sampler(lengths, **changes), 1)
    ranks = rank_plans(lengths, world_size, **changes)
    for update, shares in zip(alone, zip(*ranks, strict=True), strict=True):
        share = sum(batch_cost(lengths[rows]) for rows in update) / world_size
        batch_of = {row: rows for rows in update for row in rows}
        for batches in shares:
            longest = max((int(lengths[batch_of[r[0]]].max()) for r in batches), default=0)
            cost = sum(batch_cost(lengths[rows]) for rows in batches)
            assert cost <= 1.25 * share + longest
            for rows in batches:
                width = int(lengths[batch_of[rows[0]]].max())
                assert rows == batch_of[rows[0]] or (len(rows) + 1) * width >= share / 8


def test_an_update_of_fewer_pairs_than_ranks_leaves_some_without_a_batch() -> None:
    lengths = np.full((3, 2), 5, dtype=np.int32)
    shares = [updates[0] for updates in rank_plans(lengths, 8)]
    assert sorted(len(flat(batches)) for batches in shares) == [0] * 5 + [1] * 3


def test_a_late_epoch_of_two_million_pairs_costs_no_replay() -> None:
    lengths = np.random.default_rng(0).integers(3, 80, (2_000_000, 2)).astype(np.int32)
    one = sampler(lengths, 4096, tokens_per_update=25_000, rank=1, world_size=2)
    start = time.process_time()
    reached = one.updates(9)
    assert time.process_time() - start < 10  # about 1 on a free core; ten epochs would take ten
    assert len(reached) == round(int(lengths[:, 1].sum()) / 25_000)


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("tokens_per_update", [300, 900, 100_000])
def test_updates_have_the_tokens_asked_for_within_one_batch(
    seed: int, tokens_per_update: int
) -> None:
    lengths = random_lengths(seed)
    updates = plan(sampler(lengths, tokens_per_update=tokens_per_update), 0)
    tokens = [sum(int(lengths[rows, 1].sum()) for rows in update) for update in updates]
    largest = max(int(lengths[rows, 1].sum()) for update in updates for rows in update)
    total = int(lengths[:, 1].sum())
    assert len(updates) == max(1, round(total / tokens_per_update))
    assert sum(tokens) == total
    assert all(abs(count - total / len(updates)) <= largest for count in tokens)


def test_an_update_smaller_than_a_batch_makes_batches_smaller() -> None:
    lengths = np.full((100, 2), 5, dtype=np.int32)
    updates = plan(sampler(lengths, max_tokens=1000, tokens_per_update=50))
    assert [len(update) for update in updates] == [1] * 10
    assert {len(rows) for update in updates for rows in update} == {10}


def test_a_sentence_above_max_tokens_is_refused_with_both_numbers() -> None:
    lengths = np.array([[3, 4], [77, 5], [6, 60]], dtype=np.int32)
    with pytest.raises(ConfigError, match=r"max_tokens=76 .*77") as caught:
        sampler(lengths, max_tokens=76)
    assert "\n" not in str(caught.value)
    assert plan(sampler(lengths, max_tokens=77))
