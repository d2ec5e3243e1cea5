"""A run that was killed or stopped, anywhere and however often, ends with the bits of one that was
not.
"""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from faults import train_and_die, train_and_record, train_and_signal
from ranks import child, ranks, run_ranks
from tiny import assert_near, assert_same_tensors, sentences, tokenizer_config
from toy import (
    assert_resumes_exactly,
    assert_same_weights,
    command,
    make_run,
    read_records,
    read_values,
    read_weights,
    train,
    write_corpus,
)

from nmt.checkpoint import load_info
from nmt.config import DType, ModelConfig, Part, TrainConfig
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import DataInfo, ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import EXIT_STOPPED, ConfigError, DataError
from nmt.model.transformer import Transformer
from nmt.training.checkpoints import TrainerState, seed_update
from nmt.training.checks import stop_signals
from nmt.training.initial_weights import (
    adapt_vocabulary,
    load_initial_weights,
    use_initial_architecture,
)
from nmt.training.run_folder import check_fingerprint, make_fingerprint
from nmt.training.validation import Validation

SMALL = ["valid_bleu=false", "max_updates=20"]
# dropout and accumulation are on in any case; several epochs pass
RICH = [
    *SMALL,
    "ema_decay=0.9",
    "optimizer.name=muon",
    "optimizer.schedule=wsd",
    "optimizer.peak_learning_rate=0.003",
    "r_drop=0.5",
    "model.attention_dropout=0.1",
]


@pytest.fixture(scope="module")
def finished_run(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on 1 rank."""
    run = tmp_path_factory.mktemp("resume") / "one"
    assert train(toy_data, run, RICH) == 0
    return run


@pytest.fixture(scope="module")
def two_rank_run(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on 2 ranks."""
    folder = tmp_path_factory.mktemp("resume")
    run_ranks(folder, 2, train, toy_data, folder / "two", RICH)
    return folder / "two"


@pytest.fixture(scope="module")
def short(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 plain updates."""
    run = tmp_path_factory.mktemp("resume") / "short"
    assert train(toy_data, run, SMALL, "max_updates=4") == 0
    return run


def die(folder: Path, fault: str, number: int, *arguments: object) -> None:
    """Run nmt-train in a process that is killed at call `number` of a place."""
    with child(folder / "log", train_and_die, fault, number, "0", *arguments) as process:
        assert process.wait() == -9, process.stderr


def assert_same_run(run_dir: Path, other_run_dir: Path) -> None:
    """Compare weights, validations and logged updates of two runs."""
    assert_same_weights(run_dir, other_run_dir)
    for key in ("valid_loss", "nll"):
        for field in ("update", "valid_loss"):
            assert read_values(run_dir, key, field) == read_values(other_run_dir, key, field)
    assert not list((other_run_dir / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    finished_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    deaths = [("save", 1), ("update", 7), ("rename", 2), ("link", 1), ("validation", 1)]
    for fault, number in [*deaths, ("remove", 3)]:
        die(tmp_path, fault, number, toy_data, tmp_path / "run", RICH)
    free = ["log_every_updates=5", "keep_last=9"]  # settings that change no weights
    assert train(toy_data, tmp_path / "run", RICH, free) == 0
    assert_same_run(finished_run, tmp_path / "run")


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_go_on_with_the_same_bits(
    two_rank_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    task = ranks(tmp_path, 2, train_and_die, "update", 9, "1", toy_data, run, RICH)
    with task as (first, second):
        assert second.wait() == -9
        assert first.wait() == 1, first.stderr
        assert "nmt-train: the connection to another rank is lost" in first.stderr
    newest = (run / "checkpoints/latest").resolve().name
    assert newest in ("step-00000004", "step-00000008")  # the save of 8 may have been in progress
    run_ranks(tmp_path, 2, train, toy_data, run, RICH)
    assert_same_weights(two_rank_run, run)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_every_pair_once(
    toy_data: Path, tmp_path: Path
) -> None:
    record = tmp_path / "rows"
    run = tmp_path / "run"
    recorded: dict[int, list[int]] = defaultdict(list)  # by update
    for size, start, end in ((2, 0, 4), (1, 4, 12)):
        options = [*SMALL, f"max_updates={end}"]
        run_ranks(tmp_path, size, train_and_record, record, toy_data, run, options)
        for rank in range(size):
            path = record.with_suffix(f".{rank}")
            for update, line in enumerate(path.read_text().splitlines(), start):
                recorded[update] += json.loads(line)
            path.unlink()
        log = (tmp_path / "rank0.log").read_text(encoding="utf-8")
        assert ("the data order is unchanged" in log) == (end > 4)
    lengths = ParallelData(toy_data, "train").lengths
    sampler = TokenBatchSampler(lengths, 100, tokens_per_update=200, seed=1)
    planned = []
    for epoch in range(3):
        for planned_update in sampler.plan_epoch(epoch):
            planned.append(np.concatenate(planned_update.batches).tolist())
    assert list(recorded.values()) == planned[:12]


def test_dropout_differs_between_ranks_and_positions_in_the_data() -> None:
    def draw(key: tuple[int, int, int, int]) -> tuple[float, ...]:
        seed, epoch, epoch_position, rank = key
        state = TrainerState(num_updates=9, epoch=epoch, epoch_position=epoch_position)
        seed_update(seed, state, rank)
        return tuple(torch.rand(4).tolist())

    keys = [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0)]
    samples = list(map(draw, keys))
    assert len(set(samples)) == len(keys)
    assert list(map(draw, reversed(keys))) == samples[::-1]


@pytest.mark.slow
def test_a_schedule_free_run_may_end_anywhere_and_go_on_with_the_same_bits(
    toy_data: Path, tmp_path: Path
) -> None:
    options = ["valid_bleu=false", "optimizer.name=schedule_free", "optimizer.schedule=constant"]
    uncut = assert_resumes_exactly(toy_data, tmp_path, options, ends=(3, 5, 9))
    losses = read_values(uncut, "valid_loss", "valid_loss")
    assert losses[-1] == read_values(tmp_path / "cut", "valid_loss", "valid_loss")[-1]


def test_a_validation_that_failed_is_repeated_by_the_same_command(
    short: Path, toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "max_updates=4"]
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "compute_loss", Mock(side_effect=DataError("no data")))
        assert train(toy_data, run, options) == 2
    assert not read_records(run, "valid_loss")
    assert train(toy_data, run, options) == 0
    assert_same_run(short, run)
    assert read_values(run, "valid_loss") == [4]


# --- signals


@pytest.mark.parametrize(
    ("number", "fault", "call", "saved"),
    [
        # when a validation is due
        pytest.param(signal.SIGUSR1, "update", 9, 10, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "validation", 1, 11, marks=pytest.mark.slow),
        # in the thread that writes, while updates go on
        pytest.param(signal.SIGUSR1, "save", 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    finished_run: Path,
    toy_data: Path,
    tmp_path: Path,
    number: signal.Signals,
    fault: str,
    call: int,
    saved: int | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    log = tmp_path / "log"
    with child(log, train_and_signal, number, fault, call, "0", toy_data, run, RICH) as process:
        assert process.wait() == EXIT_STOPPED == 75
        last_line = process.stderr.splitlines()[-1]
    newest = (run / "checkpoints/latest").resolve().name
    assert f"nmt-train: stopped by {number.name} after update {int(newest[5:])}," in last_line
    assert last_line.endswith("which is saved; the same command goes on")
    assert saved is None or newest == f"step-{saved:08d}"
    if saved == 10:  # a validation may take longer than the sender of the signal waits
        assert not read_records(run, "valid_loss")
    assert train(toy_data, run, RICH) == 0
    assert f"resuming after update {int(newest[5:])} from" in capfd.readouterr().err
    assert_same_run(finished_run, run)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both(
    two_rank_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    number = signal.SIGTERM
    task = ranks(tmp_path, 2, train_and_signal, number, "update", 6, "1", toy_data, run, RICH)
    with task as (first, second):
        assert first.wait() == second.wait() == EXIT_STOPPED
    assert "stopped by a signal to another rank after update 7" in first.stderr.splitlines()[-1]
    assert "stopped by SIGTERM after update 7" in second.stderr.splitlines()[-1]
    run_ranks(tmp_path, 2, train, toy_data, run, RICH)
    assert_same_run(two_rank_run, run)


@pytest.mark.slow
def test_a_signal_at_the_last_update_is_no_stop_and_ctrl_c_ends_at_once_with_130(
    finished_run: Path, toy_data: Path, tmp_path: Path
) -> None:
    for number, call, code, expected_end, newest in (
        (signal.SIGTERM, 20, 0, "done after 20 updates", "step-00000020"),
        (signal.SIGINT, 7, 130, "nmt-train: interrupted\n", "step-00000004"),
    ):
        run = tmp_path / number.name
        log = tmp_path / "log"
        task = child(log, train_and_signal, number, "update", call, "0", toy_data, run, RICH)
        with task as process:
            assert process.wait() == code
            assert expected_end in process.stderr[-200:]
            if number is signal.SIGINT:
                assert "the same command goes on after update 4\n" in process.stderr
        assert (run / "checkpoints/latest").resolve().name == newest
    assert_same_run(finished_run, tmp_path / "SIGTERM")


def test_signals_are_noted_in_their_order_and_handlers_put_back() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with stop_signals() as received:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler


# --- refused runs


def test_a_run_does_not_go_on_with_other_settings_or_data(
    short: Path, toy_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}

    files = contents()
    src = (toy_data.parent / "train.src.txt").read_text(encoding="utf-8")
    (tmp_path / "more").write_text(src.replace("red", "blue", 1), encoding="utf-8")
    data_dir = tmp_path / "data"
    changes = [f"data_dir={data_dir}", f"data.train.src={tmp_path / 'more'}"]
    assert command("preprocess", write_corpus(toy_data.parent), changes) == 0
    assert train(data_dir, short, SMALL, "seed=5") == 2
    last_line = capfd.readouterr().err.splitlines()[-1]
    assert re.search(
        r"short/.* belongs to another run \(data was \w+, is \w+, tokenizer was", last_line
    )
    assert "seed was 1, is 5" in last_line
    assert contents() == files
    # each of the others by itself
    lengths = ParallelData(toy_data, "train").lengths
    samplers = {0: TokenBatchSampler(lengths, 100, tokens_per_update=200, seed=1)}
    meta = DataInfo(2, data_sha256="a" * 64, tokenizer_sha256="b" * 64)
    config = TrainConfig()
    saved = make_fingerprint(config, meta, samplers)
    changes: dict[str, Any] = {"max_tokens": 150, "tokens_per_update": 300, "seed": 5}
    changes |= {"label_smoothing": 0.2, "ema_decay": 0.5, "init_from": "run"}
    changes |= {"model.dropout": 0.2, "optimizer.warmup_steps": 7, "noise.mask": 0.1}
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        change = {group: replace(getattr(config, group), **{name: value})} if group else {}
        changed = replace(config, **change or {key: value})
        fingerprint = make_fingerprint(changed, meta, samplers)
        with pytest.raises(ConfigError, match=rf"^short .* run \({key} was [^,]*, is [^,]*\);"):
            check_fingerprint("short", saved, fingerprint)
    # a file is known by its content
    files_of_lemmas = [tmp_path / name for name in ("lemmas.tsv", "copy.tsv", "other.tsv")]
    fingerprints = []
    for path, text in zip(files_of_lemmas, ("a\tb\n", "a\tb\n", "a\tc\n"), strict=True):
        path.write_text(text)
        augment = replace(config.augment, terminology=0.1)
        changed = replace(config, augment=augment, lemmas=str(path))
        fingerprints.append(make_fingerprint(changed, meta, samplers))
    check_fingerprint("short", fingerprints[0], fingerprints[1])
    with pytest.raises(ConfigError, match=r"another run \(lemmas was \w+, is \w+\);"):
        check_fingerprint("short", fingerprints[0], fingerprints[2])
    free = replace(config, max_updates=7, keep_last=9, validate_every_updates=3)
    check_fingerprint("short", saved, make_fingerprint(free, meta, samplers))


def test_a_run_on_a_machine_with_another_number_format_says_so(
    toy_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fingerprints = []
    for is_faster in (False, True):
        monkeypatch.setattr("nmt.training.learner.is_bfloat16_faster", lambda x=is_faster: x)
        run = make_run(toy_data, tmp_path / str(is_faster), dtype=DType.auto)
        fingerprints.append(run.fingerprint)
    with caplog.at_level("INFO"):
        check_fingerprint("step", fingerprints[0], fingerprints[1])
    assert "changed setting: dtype was float32, is bfloat16" in caplog.text


# --- init_from


@pytest.mark.slow
def test_init_from_takes_the_weights_and_a_killed_run_goes_on_from_its_own(
    short: Path, toy_data: Path, tmp_path: Path
) -> None:
    options = [*SMALL, f"init_from={short}", "max_updates=12"]
    still = ["optimizer.schedule=cosine", "optimizer.peak_learning_rate=1e-12"]
    still += ["max_updates=1", "log_every_updates=1"]
    assert train(toy_data, tmp_path / "still", options, still) == 0
    old = read_weights(short)
    new = read_weights(tmp_path / "still")
    assert_near(new, old, atol=1e-9, rtol=0)
    (record,) = read_records(tmp_path / "still", "nll")  # a new schedule
    assert record["update"] == 1
    assert record["learning_rate"] == pytest.approx(1e-12 * 16**-0.5 * 20**-1.5)
    assert train(toy_data, tmp_path / "whole", options) == 0
    die(tmp_path, "update", 9, toy_data, tmp_path / "run", options)
    with child(tmp_path / "again", train, toy_data, tmp_path / "run", options) as process:
        assert process.wait() == 0
        assert re.search("resuming after update [48] ", process.stderr)
        assert "starting with the weights" not in process.stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/latest/config.json"
    newest.write_bytes(newest.read_bytes()[:-9])  # the one before is taken
    assert train(toy_data, tmp_path / "run", options) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "run")
    assert not torch.equal(
        old["embedding.weight"], read_weights(tmp_path / "run")["embedding.weight"]
    )


def test_init_from_refuses_another_architecture_and_keeps_rows_of_shared_pieces(
    short: Path, toy_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nmt")
    old = Tokenizer.load(toy_data / "tokenizer.model")
    config = TrainConfig(data_dir=str(toy_data), init_from=str(short))
    expected = "model.d_model=32: init_from=.*short/checkpoints/step-.* has 16; leave it out"
    with pytest.raises(ConfigError, match=expected):
        use_initial_architecture(replace(config, model=ModelConfig(d_model=32)))
    assert use_initial_architecture(config).model.num_encoder_layers == 1
    old_weights = read_weights(short)
    info = load_info(short / "checkpoints/latest")
    new = train_tokenizer([*sentences(50), "red house"], tokenizer_config(vocab_size=300))
    fresh = Transformer(info.model, new.vocab_size).state_dict()
    carried = load_initial_weights(replace(config, model=info.model), new, fresh)
    frozen = replace(config, model=info.model, freeze=[Part.embeddings])
    with pytest.raises(ConfigError, match=r"freeze=\[embeddings\]: \d+ pieces .* stay untrained"):
        load_initial_weights(frozen, new, fresh)
    old_pieces = old.all_pieces()
    old_rows = []
    new_rows = []
    for row, piece in enumerate(new.all_pieces()):
        if piece in old_pieces:
            old_rows.append(old_pieces.index(piece))
            new_rows.append(row)
    assert 261 <= len(new_rows) < new.vocab_size
    assert 0 < np.equal(old_rows, new_rows).sum() < len(new_rows)
    embedding = "embedding.weight"
    expected_embedding = fresh[embedding].clone()
    expected_embedding[new_rows] = old_weights[embedding][old_rows]
    assert_same_tensors(carried, old_weights | {embedding: expected_embedding})
    assert f"{len(new_rows)} of {new.vocab_size} rows are kept" in caplog.text
    old_bias = torch.arange(float(old.vocab_size))
    output = {"output_weight": old_weights[embedding] + 1, "output_bias": old_bias}
    old_state = old_weights | output
    new_state = fresh | {
        "output_weight": fresh[embedding],
        "output_bias": torch.zeros(new.vocab_size),
    }
    carried = adapt_vocabulary(old_state, old, new_state, new)
    for name in output:
        assert torch.equal(old_state[name][old_rows], carried[name][new_rows]), name
