"""Properties of token-bucket batches and updates for any lengths, seed and number of ranks, in
epochs of one pool and of several.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from toy import batch_rows

from nmt.data import Rows, batch, batching
from nmt.data.batch import batch_cost, bucket_by_length, divide_by_time, padding_share
from nmt.data.batching import TokenBatchSampler
from nmt.data.mixing import CorpusRange, make_mix
from nmt.errors import ConfigError

CASES = range(12)
POOLS = (5_000_000, 30)  # pairs that are planned together


def random_lengths(seed: int, *, longest: int = 60) -> Any:
    """Draw 1 to 400 pairs, most short and a few long, as real corpora are."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 400))
    lengths = draw.gamma(2.0, longest / 12, size=(count, 2)).astype(np.int32) + 1
    return np.minimum(lengths, longest)


def sampler(lengths: Any, max_tokens: int = 150, **changes: Any) -> TokenBatchSampler:
    settings: dict[str, Any] = {"tokens_per_update": 600, "seed": 3} | changes
    return TokenBatchSampler(lengths, max_tokens, **settings)


def plan(sampler: TokenBatchSampler, epoch: int = 0) -> list[list[list[int]]]:
    """Return the pair numbers of each batch of each update."""
    return list(map(batch_rows, sampler.plan_epoch(epoch)))


def rank_plans(lengths: Any, world_size: int, **changes: Any) -> list[list[list[list[int]]]]:
    """Return the plan of every rank."""
    plans = []
    for rank in range(world_size):
        plans.append(plan(sampler(lengths, rank=rank, world_size=world_size, **changes), 1))
    return plans


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def total_cost(lengths: Any, batches: list[list[int]]) -> int:
    return sum(batch_cost(lengths[rows]) for rows in batches)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plan 30 pairs at a time; the list grows with each pool that is planned."""
    calls: list[int] = []

    def counting_bucket(lengths: Any, max_tokens: int, order: Any) -> list[Any]:
        calls.append(len(order))
        return bucket_by_length(lengths, max_tokens, order)

    monkeypatch.setattr(batching, "_POOL_PAIRS", 30)
    monkeypatch.setattr(batching, "bucket_by_length", counting_bucket)
    return calls


# --- batches


def test_bucket_puts_every_pair_in_one_batch_within_the_bound() -> None:
    for seed in CASES:
        lengths = random_lengths(seed)
        bound = int(np.random.default_rng(seed).integers(lengths.max(), 500))
        order = np.random.default_rng(seed + 1).permutation(len(lengths))
        batches = bucket_by_length(lengths, bound, order)
        assert sorted(flat(batches)) == list(range(len(lengths))), seed
        longest = lengths.max(axis=1)
        assert (np.diff(longest[flat(batches)]) >= 0).all(), seed
        for rows in batches:
            assert 0 < batch_cost(lengths[rows]) <= bound, seed
            assert batch_cost(lengths[rows]) == len(rows) * longest[rows].max(), seed
        for rows, following in itertools.pairwise(batches):  # no batch is cut too early
            assert (len(rows) + 1) * longest[following[0]] > bound, seed
        selected = np.arange(0, len(lengths), 3)  # of a part of the pairs
        assert (
            sorted(np.concatenate(bucket_by_length(lengths, 200, selected)).tolist())
            == selected.tolist()
        )


def test_micro_batches_are_the_fastest_of_all_ways_to_cut_the_sorted_pairs() -> None:
    def total_time(micro_batches: list[Rows]) -> float:
        times = []
        for rows in micro_batches:
            longest = lengths[rows].max().item()
            times.append(batch._MICRO_BATCH_TIME + batch._ATTENTION_TIME * len(rows) * longest**2)
        return sum(times)

    for seed in CASES:
        lengths = random_lengths(seed)[:9]
        longest = lengths.max(axis=1)
        max_tokens = int(np.random.default_rng(seed).integers(longest.min(), longest.sum() + 2))
        micro_batches = divide_by_time(lengths, max_tokens)
        order = np.concatenate(micro_batches)
        assert order.tolist() == flat(
            bucket_by_length(lengths, longest.max(), np.arange(len(lengths)))
        )
        allowed_times = []
        for is_cut in itertools.product([False, True], repeat=len(lengths) - 1):
            cut = np.split(order, np.flatnonzero(is_cut) + 1)
            if all(len(rows) == 1 or longest[rows].sum() <= max_tokens for rows in cut):
                allowed_times.append(total_time(cut))
        for rows in micro_batches:
            assert len(rows) == 1 or longest[rows].sum() <= max_tokens, seed
        assert total_time(micro_batches) == pytest.approx(min(allowed_times)), seed


def test_padding_share_equals_a_count_of_empty_positions() -> None:
    assert padding_share(np.ones((1, 2), dtype=np.int32), []) == 0  # of a rank without a pair
    for seed in CASES:
        lengths = random_lengths(seed)
        batches = bucket_by_length(lengths, 200, np.arange(len(lengths)))
        num_empty = num_positions = 0
        for rows, side in itertools.product(batches, (0, 1)):
            side_lengths = lengths[rows, side]
            num_positions += side_lengths.max() * len(rows)
            num_empty += (side_lengths.max() - side_lengths).sum()
        assert padding_share(lengths, batches) == pytest.approx(num_empty / num_positions), seed


# --- updates


def test_every_pair_comes_once_an_epoch_in_as_many_updates_as_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pool, seed, tokens in itertools.product(POOLS, CASES, (1, 20, 600)):
        case = (pool, seed, tokens)
        monkeypatch.setattr(batching, "_POOL_PAIRS", pool)
        lengths = random_lengths(seed)
        token_sampler = sampler(lengths, tokens_per_update=tokens)
        updates = list(token_sampler.plan_epoch(4))
        assert len(updates) == len(token_sampler.plan_epoch(4)), case
        all_rows: list[int] = []
        for update in updates:
            for rows in update.batches:
                assert 0 < batch_cost(lengths[rows]) <= token_sampler.max_tokens <= 150, case
            update_rows = flat(update.batches)
            counts = lengths[update_rows].sum(axis=0).tolist()
            assert counts == [update.num_src_tokens, update.num_tokens], case
            all_rows += update_rows
        assert sorted(all_rows) == list(range(len(lengths))), case


def test_the_order_of_a_corpus_is_one_shuffle_sorted_by_length_and_one_of_batches() -> None:
    """A run that goes on with a newer nmt must find this order, so an oracle keeps it."""
    for seed in CASES:
        lengths = random_lengths(seed)
        token_sampler = sampler(lengths, seed=seed)
        for epoch in (5, 0):  # an earlier plan has no influence
            generator = np.random.default_rng((seed, epoch))
            rows = generator.permutation(len(lengths)).tolist()
            rows.sort(key=lambda row: (lengths[row].max(), lengths[row, 1], lengths[row, 0]))
            batches: list[list[int]] = []
            for row in rows:
                if not batches or (len(batches[-1]) + 1) * lengths[row].max() > 150:
                    batches.append([])
                batches[-1].append(row)
            expected = [batches[i] for i in generator.permutation(len(batches))]
            assert flat(plan(token_sampler, epoch)) == expected, (seed, epoch)


def test_ranks_share_the_pairs_of_every_update_equally_without_slivers_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for case in itertools.product(POOLS, (1, 5), (2, 3, 8), (300, 3000)):
        pool, seed, world_size, tokens = case
        monkeypatch.setattr(batching, "_POOL_PAIRS", pool)
        lengths = random_lengths(seed)
        single = plan(sampler(lengths, tokens_per_update=tokens), 1)
        ranks = rank_plans(lengths, world_size, tokens_per_update=tokens)
        assert set(map(len, ranks)) == {len(single)}, case
        second_rank = sampler(lengths, tokens_per_update=tokens, rank=1, world_size=world_size)
        sizes = second_rank.plan_epoch(1)
        for index, update in enumerate(single):
            batch_of = {row: rows for rows in update for row in rows}
            share = total_cost(lengths, update) / world_size
            rank_rows: list[int] = []
            for rank_updates in ranks:
                batches = rank_updates[index]
                longest = 0
                for rows in batches:
                    width = lengths[batch_of[rows[0]]].max()
                    longest = max(longest, width)
                    is_uncut = rows == batch_of[rows[0]]
                    assert is_uncut or (len(rows) + 1) * width >= share / 8, case
                assert total_cost(lengths, batches) <= 1.25 * share + longest, case
                rank_rows += flat(batches)
            assert rank_rows == flat(update), case  # in order, hence each once
            # a rank knows the size of the update of all ranks
            num_tokens = lengths[flat(update)].sum(axis=0).tolist()
            assert [sizes[index].num_src_tokens, sizes[index].num_tokens] == num_tokens, case


def test_an_update_of_fewer_pairs_than_ranks_leaves_some_without_a_batch() -> None:
    lengths = np.full((3, 2), 5, dtype=np.int32)
    num_pairs = [len(flat(updates[0])) for updates in rank_plans(lengths, 8)]
    assert sorted(num_pairs) == [0] * 5 + [1] * 3


def test_updates_have_the_tokens_asked_for_within_one_batch() -> None:
    for seed, tokens_per_update in itertools.product(CASES, (300, 900, 100_000)):
        lengths = random_lengths(seed)
        token_sampler = sampler(lengths, tokens_per_update=tokens_per_update)
        updates = token_sampler.plan_epoch(0)
        largest = max(int(lengths[rows, 1].sum()) for rows in flat(plan(token_sampler)))
        total = int(lengths[:, 1].sum())
        assert len(updates) == max(1, round(total / tokens_per_update)), seed
        for update in updates:
            assert abs(update.num_tokens - total / len(updates)) <= largest, seed
    lengths = np.full((100, 2), 5, dtype=np.int32)
    small_updates = plan(sampler(lengths, max_tokens=1000, tokens_per_update=50))
    assert len(small_updates) == 10
    for (rows,) in small_updates:  # one batch, smaller than max_tokens allows
        assert len(rows) == 10


def test_a_sentence_above_max_tokens_is_refused_with_both_numbers() -> None:
    lengths = np.array([[3, 4], [77, 5], [6, 60]], dtype=np.int32)
    with pytest.raises(ConfigError, match=r"max_tokens=76 .*77") as caught:
        sampler(lengths, max_tokens=76)
    assert "\n" not in str(caught.value)
    assert plan(sampler(lengths, max_tokens=77))


# --- large corpora, planned a pool of pairs at a time


def test_any_update_of_any_epoch_is_reached_by_planning_its_pool_alone(planned: list[int]) -> None:
    lengths = random_lengths(8)
    expected = {0: plan(sampler(lengths), 0), 3: plan(sampler(lengths), 3)}
    planned.clear()
    token_sampler = sampler(lengths)
    assert len(token_sampler.plan_epoch(0)) > 5
    assert not planned
    for epoch, index in ((3, -1), (0, 4), (3, 2), (0, 0)):
        planned.clear()
        assert batch_rows(token_sampler.plan_epoch(epoch)[index]) == expected[epoch][index]
        assert len(planned) == 1
    planned.clear()
    updates = sampler(lengths).plan_epoch(0)
    for _ in range(5):  # who prepares the next update is ahead of who makes this one
        assert updates[0].num_tokens
        assert updates[-1].num_tokens
    assert len(planned) == 2
    with pytest.raises(IndexError):
        updates[len(updates)]
    assert updates.pool_of(0)[0] is updates[0]
    assert len(updates.pool_of(0)) < len(updates)


@pytest.mark.usefixtures("planned")
def test_each_pool_is_shuffled_in_its_own_way() -> None:
    token_sampler = sampler(np.full((60, 2), 5, dtype=np.uint16))
    updates = token_sampler.plan_epoch(0)
    orders = []
    for pool, index in enumerate((0, len(updates) - 1)):
        rows = token_sampler.mix.draw_rows(token_sampler.seed, 0, pool, 2).tolist()
        order: list[int] = []
        for update in updates.pool_of(index):
            order.extend(map(rows.index, flat(update.batches)))
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]


def test_the_pools_of_a_large_corpus_have_about_the_tokens_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "_POOL_PAIRS", 5000)
    lengths = np.random.default_rng(0).integers(3, 80, (21_000, 2)).astype(np.uint16)
    lengths[:7000] //= 3  # one corpus is shorter than the other
    mix = make_mix([CorpusRange("a", 0, 7000, 2.0), CorpusRange("b", 7000, 14_000, 1.0)], {})
    updates = sampler(lengths, 400, tokens_per_update=2000, mix=mix).plan_epoch(0)
    tokens = []
    counts = np.zeros(21_000)
    for update in updates:
        tokens.append(update.num_tokens)
        np.add.at(counts, flat(update.batches), 1)
    assert updates.num_pairs == 28_000
    assert np.mean(tokens) == pytest.approx(2000, rel=0.01)
    assert np.std(tokens) < 200
    assert counts.tolist() == [2] * 7000 + [1] * 14_000


def test_the_trial_update_holds_the_longest_pairs_that_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "_POOL_PAIRS", 50)
    for seed in CASES:
        lengths = random_lengths(seed)
        token_sampler = sampler(lengths)
        rows = token_sampler.memory_test_rows()
        assert len(rows) <= 51
        assert int(lengths[rows].max()) == token_sampler.max_length == int(lengths.max())
    lengths = np.array([[3, 4], [500, 5], [6, 7]], dtype=np.uint16)
    corpora = [
        CorpusRange("a", 0, 1, 1.0),
        CorpusRange("b", 1, 1, 1.0),
        CorpusRange("c", 2, 1, 1.0),
    ]
    token_sampler = sampler(lengths, 10, mix=make_mix(corpora, {"b": 0}))  # which bounds nothing
    assert (token_sampler.max_length, token_sampler.memory_test_rows().tolist()) == (7, [0, 2])


@pytest.mark.long
def test_forty_million_pairs_are_planned_in_bounded_time_and_memory() -> None:
    lengths = np.random.default_rng(0).integers(3, 40, (40_000_000, 2), dtype=np.uint16)
    token_sampler = sampler(lengths, 4096, tokens_per_update=25_000)
    tracemalloc.start()
    start = time.process_time()
    updates = token_sampler.plan_epoch(11)
    assert updates[len(updates) * 3 // 4].num_tokens == pytest.approx(25_000, rel=0.2)
    assert time.process_time() - start < 30  # about 4 on a free core
    assert tracemalloc.get_traced_memory()[1] < 500e6
    tracemalloc.stop()
