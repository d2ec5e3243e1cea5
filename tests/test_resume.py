"""A run that was killed, anywhere and however often, ends with the bits of one that was not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from faults import train_and_die, train_and_record
from ranks import child, ranks, run_ranks
from toy import (
    assert_same_weights,
    command,
    read_records,
    read_weights,
    train,
    write_corpus,
)

from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import open_split
from nmt.training.checkpoints import TrainerState, seed_update

SMALL = ["valid_bleu=false", "max_updates=20"]
# dropout and accumulation are on in any case; several epochs pass
RICH = [
    *SMALL,
    "ema_decay=0.9",
    "optimizer.schedule=cosine",
    "optimizer.peak_learning_rate=0.003",
    "model.attention_dropout=0.1",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data folder and runs that nothing disturbed, on 1 and on 2 ranks."""
    folder = tmp_path_factory.mktemp("resume")
    assert command("preprocess", *write_corpus(folder)) == 0
    assert train(folder / "data", folder / "one", *RICH) == 0
    run_ranks(folder, 2, train, folder / "data", folder / "two", *RICH)
    return folder


def die(folder: Path, place: str, number: int, *arguments: object) -> None:
    """Run nmt-train in a process that is killed at call `number` of a place."""
    with child(folder / "log", train_and_die, place, number, "0", *arguments) as one:
        assert one.wait() == -9, one.stderr


@pytest.mark.parametrize(
    "deaths",
    [
        [("update", 7), ("save", 1), ("update", 9), ("validation", 1)],
        [("save", 1), ("rename", 2), ("link", 1), ("remove", 3)],
    ],
    ids=["between", "writing"],
)
def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    root: Path, tmp_path: Path, deaths: list[tuple[str, int]]
) -> None:
    for place, number in deaths:
        die(tmp_path, place, number, root / "data", tmp_path / "run", *RICH)
    assert train(root / "data", tmp_path / "run", *RICH) == 0
    assert_same_weights(root / "one", tmp_path / "run")
    logged = [
        [r["update"] for r in read_records(tmp_path / "run", k)] for k in ("nll", "valid_loss")
    ]
    assert logged == [[5, 10, 15, 20], [10, 20]]
    kept = [
        [r["valid_loss"] for r in read_records(run, "valid_loss")]
        for run in (root / "one", tmp_path / "run")
    ]
    assert kept[0] == kept[1]
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


def test_two_ranks_of_which_one_is_killed_go_on_with_the_same_bits(
    root: Path, tmp_path: Path
) -> None:
    places = (root / "data", tmp_path / "run", *RICH)
    with ranks(tmp_path, 2, train_and_die, "update", 9, "1", *places) as (first, second):
        assert second.wait() == -9
        assert first.wait(30) == 1, first.stderr
        assert "nmt-train: the connection to another rank is lost" in first.stderr
    newest = (tmp_path / "run/checkpoints/latest").resolve().name
    assert newest in ("step-00000004", "step-00000008")  # that may have been on its way
    run_ranks(tmp_path, 2, train, *places)
    assert_same_weights(root / "two", tmp_path / "run")


def test_another_number_of_ranks_goes_on_with_every_pair_once(root: Path, tmp_path: Path) -> None:
    places = (tmp_path / "rows", root / "data", tmp_path / "run", *SMALL)
    recorded: list[list[int]] = []
    for size, end in ((2, 4), (1, 9), (2, 14)):
        run_ranks(tmp_path, size, train_and_record, *places, f"max_updates={end}")
        paths = [tmp_path / f"rows.{rank}" for rank in range(size)]
        parts = [[json.loads(x) for x in path.read_text().splitlines()] for path in paths]
        recorded += [[i for part in update for i in part] for update in zip(*parts, strict=True)]
        log = (tmp_path / "rank0.log").read_text(encoding="utf-8")
        assert ("no pair is repeated" in log) == (end > 4)
        for path in paths:
            path.unlink()
    lengths = open_split(root / "data", "train").lengths()
    sampler = TokenBatchSampler(lengths, 100, tokens_per_update=200, seed=1)
    planned = [u.batches for epoch in range(3) for u in sampler.updates(epoch)]
    assert recorded == [[int(i) for rows in batches for i in rows] for batches in planned[:14]]


def test_a_run_on_two_ranks_is_that_on_one(root: Path, tmp_path: Path) -> None:
    # eps makes the step linear in the gradient, so that rounding is not blown up
    still = [*SMALL, "max_updates=5", "model.dropout=0", "optimizer.eps=1", "valid_bleu=true"]
    assert train(root / "data", tmp_path / "one", *still) == 0
    run_ranks(tmp_path, 2, train, root / "data", tmp_path / "two", *still)
    one, two = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-6
    for key in ("loss", "gradient_norm", "valid_loss", "valid_bleu"):
        values = [read_records(tmp_path / run, key)[-1][key] for run in ("one", "two")]
        assert values[1] == pytest.approx(values[0], rel=1e-5), key


def test_dropout_differs_between_ranks_and_places_in_the_data() -> None:
    def draw(seed: int, epoch: int, update_in_epoch: int, rank: int) -> list[float]:
        state = TrainerState(update=9, epoch=epoch, update_in_epoch=update_in_epoch)
        seed_update(seed, state, rank)
        return torch.rand(4).tolist()  # type: ignore[no-any-return]

    keys = [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0)]
    drawn = [draw(*key) for key in keys]
    assert all(one != other for i, one in enumerate(drawn) for other in drawn[:i])
    assert [draw(*key) for key in reversed(keys)] == drawn[::-1]


# --- what is refused


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def short(root: Path) -> Path:
    """A run of 4 updates with the plain recipe."""
    assert train(root / "data", root / "short", *SMALL, "max_updates=4") == 0
    return root / "short"


def test_a_run_does_not_go_on_with_other_settings(
    root: Path, short: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(short)
    changes = "max_tokens=150 tokens_per_update=300 seed=5 model.dropout=0.2 label_smoothing=0"
    for change in f"{changes} optimizer.warmup_steps=7 ema_decay=0.5".split():
        assert train(root / "data", short, *SMALL, change) == 2, change
        key, value = change.split("=")
        last = capfd.readouterr().err.splitlines()[-1]
        assert re.search(rf"short/.* belongs to another run \({key} was .*, is {value}", last)
        assert contents(short) == before, change


def test_a_run_does_not_go_on_with_other_data(
    root: Path, short: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(short)
    arguments = [a.replace(str(root / "data"), str(tmp_path / "data")) for a in write_corpus(root)]
    same = (root / "train.src.txt").read_text(encoding="utf-8")
    (tmp_path / "more").write_text(same.replace("red", "blue", 1), encoding="utf-8")
    arguments.append(f"data.train.src={tmp_path / 'more'}")
    assert command("preprocess", *arguments) == 0
    assert train(tmp_path / "data", short, *SMALL) == 2
    assert re.search(r"\(data was \w+, is \w+, tokenizer was \w+, is", capfd.readouterr().err)
    assert contents(short) == before


def test_settings_that_change_no_weights_may_change(root: Path, tmp_path: Path) -> None:
    free = ["log_every_updates=1", "validate_every_updates=3", "checkpoint_every_updates=5"]
    assert train(root / "data", tmp_path / "run", *RICH[:1], *RICH[2:], "max_updates=20") == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000020")
    assert train(root / "data", tmp_path / "run", *RICH, *free, "keep_last=9") == 0
    assert_same_weights(root / "one", tmp_path / "run")


# --- init_from


def test_init_from_takes_the_weights_and_begins_a_new_schedule(
    root: Path, short: Path, tmp_path: Path
) -> None:
    still = ["optimizer.learning_rate_scale=1e-12", "max_updates=1", "log_every_updates=1"]
    assert train(root / "data", tmp_path / "run", *SMALL, f"init_from={short}", *still) == 0
    old, new = read_weights(short), read_weights(tmp_path / "run")
    assert max(float((old[name] - new[name]).abs().max()) for name in old) < 1e-9
    (record,) = read_records(tmp_path / "run", "nll")
    assert record["update"] == 1
    assert record["learning_rate"] == pytest.approx(1e-12 * 16**-0.5 * 20**-1.5)


def test_a_killed_run_with_init_from_goes_on_instead_of_beginning_again(
    root: Path, short: Path, tmp_path: Path
) -> None:
    options = [*SMALL, f"init_from={short}", "max_updates=12"]
    assert train(root / "data", tmp_path / "whole", *options) == 0
    die(tmp_path, "update", 9, root / "data", tmp_path / "run", *options)
    with child(tmp_path / "again", train, root / "data", tmp_path / "run", *options) as one:
        assert one.wait() == 0
        assert re.search("go on after update [48],", one.stderr)
        assert "begin with the weights" not in one.stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "run")
    assert not torch.equal(
        *(read_weights(r)["embedding.weight"] for r in (short, tmp_path / "run"))
    )


def test_init_from_refuses_another_tokenizer_and_other_shapes(
    root: Path, short: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, f"init_from={short}"]
    assert train(root / "data", tmp_path / "run", *options, "model.d_ff=64") == 2
    assert "do not fit the model's config" in capfd.readouterr().err.splitlines()[-1]
    arguments = [a.replace(str(root / "data"), str(tmp_path / "data")) for a in write_corpus(root)]
    assert command("preprocess", *arguments, "tokenizer.vocab_size=300") == 0
    assert train(tmp_path / "data", tmp_path / "run", *options) == 2
    assert "its tokenizer is not the one of data_dir=" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run/config.yaml").exists()
