"""The pairs that an epoch draws: weights, temperature, stages, pools and resuming."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import write_folder
from tiny import tiny_config
from toy import assert_resumes_exactly, call_before, make_run, read_values, train

from nmt.config import StageConfig, TrainConfig
from nmt.data import batching, mixing
from nmt.data.binary import ParallelData
from nmt.data.mixing import CorpusRange, compute_pairs_per_epoch, make_mix
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.runtime.distributed import World
from nmt.training.batches import BatchMaker
from nmt.training.build import build_run
from nmt.training.learner import Learner

SIZES = {"a": 30, "b": 7, "c": 100}


def corpora(**weights: float) -> list[CorpusRange]:
    """Return the corpora of SIZES, one after the other."""
    ranges = []
    start = 0
    for name, size in SIZES.items():
        ranges.append(CorpusRange(name, start, size, weights.get(name, 1.0)))
        start += size
    return ranges


def count_pairs(mix: mixing.Mix, name: str, epochs: range) -> Any:
    """Count how often each pair of a corpus comes in some epochs."""
    rows = np.concatenate([mix.draw_rows(0, epoch) for epoch in epochs])
    counts = np.bincount(rows, minlength=137)
    return np.split(counts, [30, 37])[list(SIZES).index(name)]


# --- weights


def test_a_pair_comes_as_often_as_its_weight_says_and_repeats_after_all_others() -> None:
    # weight, number of epochs, and how often each pair comes in them
    weights = [(0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 1, 3)]
    weights += [(0.5, 2, 1), (0.25, 4, 1), (1.5, 2, 3), (0.3, 10, 3)]
    for name, (weight, num_epochs, times) in itertools.product(SIZES, weights):
        mix = make_mix(corpora(), {name: weight})
        for first in (0, 3 * num_epochs):
            for end in range(1, num_epochs + 1):
                counts = count_pairs(mix, name, range(first, first + end))
                assert counts.max() - counts.min() <= 1, (name, weight)
                assert counts.sum() == pytest.approx(end * weight * SIZES[name], abs=1)
            assert (counts == times).all(), (name, weight)
    assert make_mix(corpora(), {}).draw_rows(3, 5).tolist() == list(range(137))  # in order
    assert make_mix(corpora(a=3, b=0), {"b": 1, "c": 0}).count_pairs(0) == [90, 7, 0]


def test_half_an_epoch_is_drawn_at_random_and_of_a_large_corpus_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mix = make_mix(corpora(), {"c": 0.5})
    draws = itertools.product((0, 1), (0, 2, 4))
    assert len({tuple(sorted(mix.draw_rows(seed, epoch).tolist())) for seed, epoch in draws}) == 6
    assert mix.draw_rows(1, 4).tolist() == make_mix(corpora(c=0.5), {}).draw_rows(1, 4).tolist()
    monkeypatch.setattr(mixing, "_MAX_BLOCKS", 16)
    for size in (15, 16, 17, 95, 96, 97, 100):  # blocks of 1 to 7, the last whole or not
        mix = make_mix([CorpusRange("x", 5, size, 0.5)], {})
        for seed in range(5):
            rows = np.concatenate([mix.draw_rows(seed, 0), mix.draw_rows(seed, 1)])
            assert sorted(rows) == list(range(5, 5 + size))


def test_pools_share_an_epoch_and_every_corpus_of_it() -> None:
    mix = make_mix(corpora(), {"a": 0.5, "b": 3})
    for num_pools, epoch in itertools.product((1, 2, 5), (0, 1)):
        rows: list[int] = []
        for pool in range(num_pools):
            pool_rows = mix.draw_rows(1, epoch, pool, num_pools)
            assert (pool_rows >= 37).sum() == pytest.approx(100 / num_pools, abs=1)
            rows.extend(pool_rows.tolist())
        assert sorted(rows) == sorted(mix.draw_rows(1, epoch).tolist())


# --- temperature


def test_temperature_evens_out_the_shares_and_keeps_the_length_of_the_epoch() -> None:
    sizes = [1000, 10, 90]
    weights = [1.0, 2.0, 0.0]
    assert compute_pairs_per_epoch(sizes, weights, 1.0) == [1000, 20, 0]
    hot = compute_pairs_per_epoch(sizes, weights, 2.0)
    assert sum(hot) == pytest.approx(1020)
    assert hot[1] / hot[0] == pytest.approx(2 * (10 / 1000) ** 0.5)
    even = compute_pairs_per_epoch(sizes, weights, 1e9)
    assert even[1] / even[0] == pytest.approx(2)
    assert hot[2] == even[2] == 0
    heated = compute_pairs_per_epoch([*SIZES.values()], [1, 1, 1], 5.0)
    assert make_mix(corpora(), {}, 5.0).pairs_per_epoch == heated
    for size in range(1, 200):  # temperature does not change a single corpus
        assert compute_pairs_per_epoch([size], [0.7], 3.3) == [0.7 * size]


# --- errors


def test_an_impossible_mix_is_one_line_of_error() -> None:
    for weights, text in [
        ({"bb": 1}, r"mix\.bb: .* did you mean b\?"),
        ({"news": 1}, r"mix\.news: .* valid: a, b, c"),
        (dict.fromkeys(SIZES, 0), "an epoch would be empty"),
        (dict.fromkeys(SIZES, 0.001), "an epoch would be empty"),
    ]:
        with pytest.raises(ConfigError, match=text) as caught:
            make_mix(corpora(), weights)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"mix\.news: .* data\.train, without names"):
        make_mix([CorpusRange("", 0, 5, 1.0)], {"news": 1})
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"^mix\.a="):
            TrainConfig(mix={"a": weight})


# --- in a run


@pytest.fixture
def data_dir(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Three corpora whose first source token tells them apart."""
    draw = np.random.default_rng(0)
    pairs: dict[str, list[Any]] = {}
    for first_token, (name, size) in enumerate(SIZES.items(), start=4):
        pairs[name] = []
        for length in draw.integers(2, 9, size):
            ids = draw.integers(10, 330, (2, length)).tolist()
            pairs[name].append(([first_token, *ids[0]], ids[1]))
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    meta = {"src_lang": "en", "tgt_lang": "de", "tokenizer_sha256": tokenizer.sha256}
    write_folder(tmp_path, pairs, 330, weights={"b": 4.0}, pairs_a_shard=40, **meta)
    return tmp_path


RUN = ["valid_bleu=false", "tokens_per_update=100", "max_updates=8"]


@pytest.fixture
def updates(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """The number of pairs of each corpus, for every update that a run makes."""
    counters: list[Counter[str]] = []
    data = ParallelData(data_dir, "train")

    def count_corpora(learner: Learner, update: Any, *_: Any, **__: Any) -> None:
        counter = Counter[str]()
        for row in np.concatenate(update.batches).tolist():
            first_token = data[row][0][0]
            counter["abc"[first_token - 4]] += 1
        counters.append(counter)

    call_before(monkeypatch, Learner, "update", count_corpora)
    return counters


def test_a_run_draws_the_pairs_of_the_mix(data_dir: Path, updates: list[Counter[str]]) -> None:
    lengths = ParallelData(data_dir, "train").lengths[:, 1]
    num_tokens = 2 * int(lengths[:30].sum()) + 4 * int(lengths[30:37].sum())
    an_epoch = f"max_updates={round(num_tokens / 100)}"
    assert train(data_dir, data_dir / "run", RUN, "mix.a=2", "mix.c=0", an_epoch) == 0
    assert sum(updates, Counter()) == {"a": 60, "b": 28}


def test_a_pair_that_an_epoch_repeats_has_other_noise_in_another_update(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: dict[int, dict[int, Any]] = defaultdict(dict)  # by row and draw
    change_pairs = BatchMaker.change_pairs

    def record_sources(batch_maker: BatchMaker, rows: Any, draw: int = 0, *more: Any) -> Any:
        pairs = change_pairs(batch_maker, rows, draw, *more)
        for pair in pairs:
            sources[pair.row][draw] = pair.src.tolist()
        return pairs

    monkeypatch.setattr(BatchMaker, "change_pairs", record_sources)
    mix = ["mix.a=4", "mix.b=0", "mix.c=0", "noise.mask=0.5", "max_updates=5"]  # less than an epoch
    assert train(data_dir, data_dir / "run", RUN, mix) == 0
    num_repeated = 0
    num_changed = 0
    for draws in sources.values():
        first, *later = draws.values()
        if later:
            num_repeated += 1
            num_changed += later[0] != first
    assert num_repeated > 4
    assert num_changed > 0.8 * num_repeated


@pytest.mark.slow
def test_a_run_resumes_only_with_its_mix(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(data_dir, data_dir / "run", RUN, "mix.a=2", "max_updates=4") == 0
    for changed in (["mix.a=3"], ["mix.a=1"], ["mix_temperature=2"], ["mix.a=2", "mix.c=0"]):
        assert train(data_dir, data_dir / "run", RUN, changed) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "mixture was after update 0: 60 of 30 pairs of a + 28 of 7 " in error
    assert train(data_dir, data_dir / "run", RUN, "mix.a=2") == 0
    assert train(data_dir, data_dir / "run", RUN) == 0  # the run has recorded its mix


@pytest.mark.slow
def test_a_mixed_run_that_stops_in_any_pool_goes_on_with_the_same_bits(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_POOL_PAIRS", 30)
    mix = ["mix.a=0.5", "mix_temperature=2", "model.dropout=0.1"]
    mix += ["tokens_per_update=250", "validate_every_updates=100", "checkpoint_every_updates=100"]
    run_dir = assert_resumes_exactly(data_dir, data_dir, RUN, mix, ends=(3, 8, 12))
    assert read_values(run_dir, "epoch", "epoch")[-1] >= 2


# --- stages


STAGES = ["stages.late.start=7", "stages.late.mix.b=1", "stages.late.mix.a=0"]
STAGES += ["stages.first.start=3", "stages.first.mix.c=0", "model.dropout=0.1"]


@pytest.mark.slow
def test_a_stage_draws_its_own_mix_from_its_update_on(
    data_dir: Path, updates: list[Counter[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(data_dir, data_dir / "run", RUN, STAGES, "max_updates=10", "mix.b=4") == 0
    assert set(sum(updates[:3], Counter())) == {"a", "b", "c"}
    assert set(sum(updates[3:7], Counter())) == {"a", "b"}
    assert set(sum(updates[7:], Counter())) == {"b", "c"}
    error = capfd.readouterr().err
    assert "a stage begins: an epoch draws 30 of 30 pairs of a + 28 of 7 pairs of b + 0 of" in error
    assert "a stage begins: an epoch draws 0 of 30 pairs of a + 7 of 7 pairs of b + 100" in error


@pytest.mark.slow
def test_a_stage_begins_a_new_epoch_wherever_the_run_is_cut(data_dir: Path) -> None:
    rare = ["checkpoint_every_updates=100", "validate_every_updates=100"]
    # at a start and before one
    assert_resumes_exactly(data_dir, data_dir, RUN, STAGES, rare, ends=(3, 6, 7, 10))


def test_the_data_of_a_stage_does_not_depend_on_the_ranks(data_dir: Path) -> None:
    stages = {"x": StageConfig(start=3, mix={"a": 0.5})}
    runs = []
    for world in (World(0, 1), World(0, 2), World(1, 2)):
        runs.append(make_run(data_dir, data_dir / "none", world, stages=stages))
    for update, epoch in ((0, 0), (2, 1), (3, 2), (9, 5)):
        plans = [run.sampler_at(update).plan_epoch(epoch) for run in runs]
        for single, first, second in zip(plans[0], plans[1], plans[2], strict=True):
            shared = np.concatenate(first.batches + second.batches)
            assert sorted(shared) == sorted(np.concatenate(single.batches))


def test_only_the_first_rank_warns_of_a_short_run(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = TrainConfig(
        data_dir=str(data_dir), model=tiny_config(), max_updates=2, device="cpu", valid_bleu=False
    )
    for rank, count in ((0, 1), (1, 0)):
        caplog.clear()
        build_run(config, World(rank=rank, size=2), torch.device("cpu"))
        assert caplog.text.count("the learning rate still rises") == count


@pytest.mark.slow
def test_impossible_stages_are_one_line(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(data_dir, data_dir / "run", RUN, STAGES, "max_updates=2") == 0
    err = capsys.readouterr().err
    assert "the last stage begins after update 7, but the run ends after max_updates=2" in err
    assert "the learning rate still rises after max_updates=2" in err
    for options, text in (
        (["stages.first.mix.c=2"], "after update 3: "),
        ([*STAGES, "stages.late.start=8"], "after update 8: 0 of 30 pairs of a + 7 of 7"),
        ([*STAGES, "stages.late.start=3"], "stages.first.start=3: two stages start there"),
        ([*STAGES, "stages.late.mix.a=-1"], "stages.late.mix.a=-1.0: must be a number from 0"),
        ([*STAGES, "stages.late.mix.aa=1"], "mix.aa: no corpus of data_dir has this name"),
    ):
        assert train(data_dir, data_dir / "run", RUN, options) == 2, options
        assert text in capsys.readouterr().err.strip().splitlines()[-1], options


@pytest.mark.slow
def test_patience_counts_only_in_the_last_stage(data_dir: Path) -> None:
    often = ["validate_every_updates=1", "checkpoint_every_updates=1", "max_updates=30"]
    # no validation is better than the first
    often += ["optimizer.schedule=cosine", "optimizer.peak_learning_rate=1e-30", "patience=2"]
    assert train(data_dir, data_dir / "run", RUN, STAGES, often) == 0
    validated = read_values(data_dir / "run", "valid_loss")
    assert validated == [*range(1, 10)]  # two after update 7
