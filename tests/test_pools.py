"""Large corpora, planned a pool of pairs at a time: the same claims as for small ones, and that
nothing else is planned.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from test_batching import CASES, flat, plan, random_lengths, rank_plans, sampler
from toy import assert_same_weights, read_records, train, write_data

from nmt.data import batching
from nmt.data.batch import batch_cost, bucket
from nmt.data.batching import Updates
from nmt.data.mixing import CorpusRange, make_mix
from nmt.data.tokenizer import Tokenizer

RUN = ["valid_bleu=false", "model.dropout=0.1"]


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan 30 pairs at a time."""
    monkeypatch.setattr(batching, "_POOL_PAIRS", 30)


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("tokens_per_update", [1, 20, 600])
def test_pools_hold_every_pair_once_in_as_many_updates_as_announced(
    seed: int, tokens_per_update: int
) -> None:
    lengths = random_lengths(seed)
    one = sampler(lengths, tokens_per_update=tokens_per_update)
    updates = one.updates(4)
    batches = [rows for update in updates for rows in update.batches]
    assert sum(1 for _ in updates) == len(updates)
    assert all(update.batches for update in updates)
    assert sorted(int(row) for rows in batches for row in rows) == list(range(len(lengths)))
    assert all(0 < batch_cost(lengths[rows]) <= one.max_tokens for rows in batches)
    for update in updates:
        assert update.num_tokens == sum(int(lengths[r, 1].sum()) for r in update.batches)


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_updates_of_pools(world_size: int) -> None:
    lengths = random_lengths(8)
    alone, ranks = plan(sampler(lengths), 1), rank_plans(lengths, world_size)
    for update, shares in zip(alone, zip(*ranks, strict=True), strict=True):
        assert [row for batches in shares for row in flat(batches)] == flat(update)


@pytest.mark.usefixtures("small_pools")
def test_any_update_of_any_epoch_is_reached_by_planning_its_pool_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = random_lengths(8)
    expected = {epoch: plan(sampler(lengths), epoch) for epoch in (0, 3)}
    calls = []
    monkeypatch.setattr(batching, "bucket", lambda *a: calls.append(1) or bucket(*a))
    one = sampler(lengths)
    assert len(one.updates(0)) > 5
    assert not calls
    for epoch, index in ((3, -1), (0, 4), (3, 2), (0, 0)):
        calls.clear()
        update = one.updates(epoch)[index]
        assert [rows.tolist() for rows in update.batches] == expected[epoch][index]
        assert len(calls) == 1


@pytest.mark.usefixtures("small_pools")
def test_each_pool_is_shuffled_in_its_own_way() -> None:
    one = sampler(np.full((60, 2), 5, dtype=np.uint16))
    updates, orders = one.updates(0), []
    for pool, index in enumerate((0, -1)):
        rows = one.mix.rows(one.seed, 0, pool, 2).tolist()
        batches = [batch for update in updates.pool_of(index) for batch in update.batches]
        orders.append([rows.index(row) for row in np.concatenate(batches).tolist()])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]


@pytest.mark.usefixtures("small_pools")
def test_a_slice_of_updates_plans_nothing_and_is_the_same_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = sampler(random_lengths(8)).updates(2)
    everything = list(updates)
    again = sampler(random_lengths(8)).updates(2)
    with monkeypatch.context() as patch:
        patch.setattr(batching, "bucket", None)
        rest = again[3:]
        assert isinstance(rest, Updates)
        assert len(rest) == len(everything) - 3
    assert [u.num_tokens for u in rest] == [u.num_tokens for u in everything[3:]]
    with pytest.raises(IndexError):
        again[len(again)]


@pytest.mark.usefixtures("small_pools")
def test_two_pools_in_turn_are_planned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = sampler(random_lengths(8)).updates(0)
    calls = []
    monkeypatch.setattr(batching, "bucket", lambda *a: calls.append(1) or bucket(*a))
    for _ in range(5):  # who prepares the next update is ahead of who makes this one
        assert updates[0].num_tokens
        assert updates[-1].num_tokens
    assert len(calls) == 2
    assert updates.pool_of(0)[0] is updates[0]
    assert len(updates.pool_of(0)) < len(updates)


def test_the_pools_of_a_large_corpus_have_about_the_tokens_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "_POOL_PAIRS", 5000)
    lengths = np.random.default_rng(0).integers(3, 80, (21_000, 2)).astype(np.uint16)
    lengths[:7000] //= 3  # one corpus is shorter than the other
    mix = make_mix([CorpusRange("a", 0, 7000, 2.0), CorpusRange("b", 7000, 14_000, 1.0)], {})
    updates = sampler(lengths, 400, tokens_per_update=2000, mix=mix).updates(0)
    tokens = [update.num_tokens for update in updates]
    assert updates.num_pairs == 28_000
    assert np.mean(tokens) == pytest.approx(2000, rel=0.01)
    assert np.std(tokens) < 200
    drawn = np.bincount(np.concatenate([r for u in updates for r in u.batches]))
    assert drawn.tolist() == [2] * 7000 + [1] * 14_000


def test_a_corpus_that_is_left_out_bounds_nothing() -> None:
    lengths = np.array([[3, 4], [500, 5], [6, 7]], dtype=np.uint16)
    corpora = [CorpusRange(name, i, 1, 1.0) for i, name in enumerate("abc")]
    one = sampler(lengths, 10, mix=make_mix(corpora, {"b": 0}))
    assert one.longest == 7
    assert one.rows_to_try().tolist() == [0, 2]


def test_what_is_tried_of_a_large_corpus_holds_its_longest_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "_POOL_PAIRS", 50)
    for seed in CASES:
        lengths = random_lengths(seed)
        one = sampler(lengths)
        rows = one.rows_to_try()
        assert len(rows) <= 51
        assert int(lengths[rows].max()) == one.longest == int(lengths.max())


@pytest.mark.usefixtures("small_pools")
def test_a_run_that_stops_in_a_later_pool_goes_on_with_the_same_bits(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_data(tmp_path, tokenizer, [(5 + i % 7, 4 + i % 5) for i in range(100)])
    arguments = [*RUN, "tokens_per_update=60"]
    assert train(tmp_path, tmp_path / "whole", *arguments, "max_updates=17") == 0
    for end in (8, 17):  # in the third of four pools, and in the next epoch
        assert train(tmp_path, tmp_path / "parts", *arguments, f"max_updates={end}") == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert read_records(tmp_path / "parts", "epoch")[-1]["epoch"] == 1


@pytest.mark.slow
def test_forty_million_pairs_are_planned_in_bounded_time_and_memory() -> None:
    lengths = np.random.default_rng(0).integers(3, 40, (40_000_000, 2), dtype=np.uint16)
    one = sampler(lengths, 4096, tokens_per_update=25_000)
    tracemalloc.start()
    start = time.process_time()
    updates = one.updates(11)
    assert updates[len(updates) * 3 // 4].num_tokens == pytest.approx(25_000, rel=0.2)
    assert time.process_time() - start < 30  # about 4 on a free core
    assert tracemalloc.get_traced_memory()[1] < 500e6
    tracemalloc.stop()
