"""Several ranks give the results of one: gradients, figures, validation, skipped updates.

The ranks are real processes that communicate through gloo.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks, run_ranks
from test_gradients import (
    accumulate,
    assert_close,
    change,
    exact_gradient,
    gradient,
    gradient_norm,
    without_dropout,
)
from tiny import assert_same_tensors, tiny_config
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import parameters_to_vector
from toy import make_run, read_weights, train, write_data

from nmt.checkpoint import load_info
from nmt.config import DType
from nmt.data.batching import UpdatePlan
from nmt.data.binary import HeldOutText
from nmt.data.languages import LanguagePair
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DeviceError
from nmt.model.fast import layers
from nmt.runtime.distributed import (
    World,
    broadcast_from_main,
    choose_num_processes,
    find_dtype,
    find_world,
    gather,
    is_launched,
    process_group,
    sum_over_ranks,
)
from nmt.training import validation
from nmt.training.build import Run
from nmt.training.learner import Learner, UpdateResult, choose_training_dtype

CPU = torch.device("cpu")
LENGTHS = [(1, 1), (40, 2), (2, 45), (3, 3), (7, 1), (1, 30), (12, 12), (5, 1), (60, 60), (2, 2)]
LENGTHS += [(9, 4), (1, 2)]
BATCHES = [[8], [0, 3, 4, 7, 9], [1, 2, 5, 6], [10, 11]]  # 60, 8, 89 and 6 target tokens
# by number of ranks: the batches of each rank
LAYOUTS: dict[int, list[list[list[list[int]]]]] = {
    2: [[BATCHES[:2], BATCHES[2:]], [BATCHES[:1], BATCHES[1:]], [BATCHES, []]],
    4: [[[batch] for batch in BATCHES], [BATCHES[:1], [], BATCHES[1:3], BATCHES[3:]]],
}


@pytest.fixture(scope="module")
def data_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of twelve sentence pairs of very unequal length."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer, LENGTHS)
    return folder


def make_update(batches: list[list[int]]) -> UpdatePlan:
    """Make the update of all pairs, of which this rank has `batches`."""
    src, tgt = np.array(LENGTHS).sum(0).tolist()
    rows = [np.array(batch, dtype=np.int64) for batch in batches]
    return UpdatePlan(rows, num_tokens=tgt, num_src_tokens=src)


@contextmanager
def connected(data_dir: Path, **changes: Any) -> Iterator[Run]:
    """Set up a run on this rank, or on the only one."""
    world = find_world()
    with process_group(world, CPU, 60):
        setup = make_run(data_dir, data_dir / "run", world, **changes)
        with setup.learner.ranks_connected():
            yield setup


# --- gradients


def share(folder: Path, data_dir: Path) -> None:
    """Save the gradient of each layout on this rank, and the number of exchanged numbers.

    Two ranks also save the results of updates that are finite only on rank 0.
    """
    exchanges = []

    def counting(group, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations
        exchanges.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    changes: dict[str, Any] = {"ema_decay": 0.5}
    if find_world().size == 4:  # two passes through the model, in one exchange
        changes |= {"r_drop": 1.0, "model": tiny_config(dropout=0.1)}
    with connected(data_dir, **changes) as setup:
        without_dropout(setup.learner)
        learner = setup.learner
        world = setup.world
        learner.objective.register_comm_hook(None, counting)  # type: ignore[operator]
        exchanged = []
        for layout in LAYOUTS[world.size]:
            exchanges.clear()
            accumulate(learner, make_update(layout[world.rank]))
            exchanged.append((gradient(learner.model), sum(exchanges)))
            learner.zero_grad()
        torch.save(exchanged, folder / f"{world.size}-{world.rank}.pt")
        if world.size == 2:
            results = [update_with(learner, fault, world.rank) for fault in FAULTS]
            torch.save(results, folder / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def shared(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `share` saves."""
    folder = tmp_path_factory.mktemp("shared")
    for size in LAYOUTS:
        run_ranks(folder, size, share, folder, data_dir)
    return folder


@pytest.fixture(scope="module")
def exact(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The gradient of all pairs by the oracle of single sentences in float64."""
    learner = make_run(data_dir, tmp_path_factory.mktemp("run")).learner
    return exact_gradient(learner, list(range(len(LENGTHS))))


@pytest.mark.slow
def test_gradients_are_the_same_however_ranks_share_the_batches(
    shared: Path, exact: dict[str, Tensor]
) -> None:
    for size, layouts in LAYOUTS.items():
        for rank in range(size):
            exchanged = torch.load(shared / f"{size}-{rank}.pt")
            assert len(exchanged) == len(layouts)
            for rank_gradient, num_exchanged in exchanged:
                assert_close(rank_gradient, exact)  # each weight once, however many batches
                assert num_exchanged == len(parameters_to_vector(exact.values())), (size, rank)


# --- figures and skipped updates


def update_with(learner: Learner, fault: str, rank: int) -> tuple[UpdateResult, dict[str, Any]]:
    """Make an update with a fault only on rank 1; return its result and the new state."""
    original = learner.compute_loss
    if rank == 1:
        learner.compute_loss = losses_with(learner, fault)  # type: ignore[method-assign]
    is_asked = rank == 1 and fault == "loss"
    result = change(learner, make_update(LAYOUTS[2][0][rank]), stop=is_asked)
    learner.compute_loss = original  # type: ignore[method-assign]
    return result, snapshot(learner)


def snapshot(learner: Learner) -> dict[str, Any]:
    """Copy the weights, their average and Adam's moments."""
    weights = learner.model.state_dict()
    average = learner.averaged_model.state_dict()
    moments = learner.optimizers[0].state_dict()["state"]
    return copy.deepcopy({"weights": weights, "average": average, "moments": moments})


def losses_with(learner: Learner, fault: str) -> Any:
    """Return `learner.compute_loss` with the loss, or only its gradient, multiplied."""
    original = learner.compute_loss
    of_loss, of_gradient = FAULTS[fault]

    def changed(batch: Any) -> tuple[Tensor, Tensor]:
        loss, nll = original(batch)
        loss.register_hook(lambda gradient: gradient * of_gradient)
        return loss + (loss * (of_loss - 1)).detach(), nll

    return changed


FAULTS = {
    "none": (1.0, 1.0),
    "loss": (float("nan"), 1.0),
    "gradient": (1.0, float("inf")),
    "none again": (1.0, 1.0),
}


@pytest.mark.slow
def test_ranks_agree_on_the_figures_of_an_update_which_are_sums_over_them(
    shared: Path, data_dir: Path, tmp_path: Path, exact: dict[str, Tensor]
) -> None:
    ranks = [torch.load(shared / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    names = ("nll_sum", "gradient_norm", "num_positions", "flops", "is_stop_requested", "is_finite")
    for (result, state), (other_result, other_state) in zip(ranks[0], ranks[1], strict=True):
        for name in names:
            np.testing.assert_equal(getattr(result, name), getattr(other_result, name))
        assert_same_tensors(state, other_state)
    (first, state), (bad_loss, after_loss), (bad_gradient, after_gradient) = ranks[0][:3]
    good, state_after = ranks[0][-1]
    assert first.is_finite
    assert good.is_finite
    for result in (bad_loss, bad_gradient):
        assert not result.is_finite
        assert result.is_stop_requested == (result is bad_loss)
        assert math.isfinite(result.loss_sum) == (result is bad_gradient)
        assert math.isfinite(result.gradient_norm) == (result is bad_loss)
    assert not first.is_stop_requested
    single = change(make_run(data_dir, tmp_path).learner, make_update(BATCHES))
    for name in ("loss_sum", "nll_sum", "num_positions", "flops"):
        assert getattr(first, name) == pytest.approx(getattr(single, name), rel=1e-6), name
    assert first.gradient_norm == pytest.approx(gradient_norm(exact), rel=1e-6)
    # an update that is not finite on one rank changes nothing on any
    assert_same_tensors(after_loss, state)
    assert_same_tensors(after_gradient, state)
    for name in ("weights", "average"):
        vector = parameters_to_vector(state_after[name].values())
        assert vector.isfinite().all()
        assert not torch.equal(vector, parameters_to_vector(state[name].values()))
    for name in ("exp_avg", "step"):
        assert not torch.equal(state["moments"][0][name], state_after["moments"][0][name])


# --- validation


def validate(folder: Path, data_dir: Path, run_dir: Path) -> None:
    """Save the validation figures of this rank as JSON."""
    validation._BATCH_LINES = 3
    model = load_info(run_dir / "checkpoints/latest").model
    options = {"valid_bleu": True, "valid_beam_size": 2, "max_tokens": 60, "model": model}
    with connected(data_dir, **options) as setup:
        setup.learner.model.load_state_dict(read_weights(run_dir))
        record = setup.validation(setup.learner.model)
        world = setup.world
        (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(record))


def test_each_part_of_the_validation_set_is_of_one_rank(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_run(data_dir, tmp_path, max_tokens=60)
    losses = []
    lines = list[str]()
    text = HeldOutText("", LanguagePair("en", "de"), list("abcdefgh"), list("abcdefgh"))

    def translate(sources: list[str], **_: str) -> list[str]:
        lines.extend(sources)
        return sources

    everything = [dict(enumerate(text.sources))]  # as if from all ranks
    monkeypatch.setattr(validation, "_BATCH_LINES", 2)
    for world in (World(), World(0, 3), World(1, 3), World(2, 3)):
        setup.validation.world = world
        losses.append(setup.validation.compute_loss(setup.learner.model)["valid_loss"])
        with monkeypatch.context() as patch:
            patch.setattr(validation, "gather", lambda _: everything)
            setup.validation._translate(SimpleNamespace(translate=translate), text)  # type: ignore[arg-type]
    assert sum(losses[1:]) == pytest.approx(losses[0])
    assert min(losses) > 0
    assert sorted(lines) == sorted(2 * text.sources)


@pytest.mark.slow
def test_validation_figures_are_the_same_for_any_number_of_ranks(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_BATCH_LINES", 3)  # put back at the end
    learnt = ["max_updates=100", "valid_bleu=false", "optimizer.schedule=inverse_sqrt"]
    learnt += ["validate_every_updates=100", "checkpoint_every_updates=100"]
    learnt += ["optimizer.peak_learning_rate=0.17"]
    learnt += ["model.dropout=0", "model.norm=pre"]
    assert train(toy_data, tmp_path / "run", learnt) == 0
    validate(tmp_path, toy_data, tmp_path / "run")
    run_ranks(tmp_path, 3, validate, tmp_path, toy_data, tmp_path / "run")
    paths = list(tmp_path.glob("?-?.json"))
    assert len(paths) == 4
    (record,) = set(map(Path.read_text, paths))
    assert json.loads(record)["valid_bleu"] > 0


# --- exchanges


def exchange(folder: Path) -> None:
    """Check every exchange; then rank 1 does not answer.

    The time limit holds from then on, since a busy machine may take longer for the exchanges.
    """
    world = find_world()
    limits: list[timedelta] = []
    connect = dist.init_process_group

    def connect_patiently(backend: str, timeout: timedelta) -> None:
        limits.append(timeout)
        connect(backend)

    dist.init_process_group = connect_patiently
    with process_group(world, CPU, 1):
        assert gather(world.rank * 10) == [0, 10]
        assert broadcast_from_main(f"from {world.rank}") == "from 0"
        assert sum_over_ranks(torch.tensor([1.0, world.rank])) == [2.0, 1.0]
        distributed_c10d._set_pg_timeout(limits[0])
        if world.rank == 0:
            gather("in vain")
        while not (folder / "given up").exists():
            time.sleep(0.01)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, exchange, tmp_path) as (first, second):
        assert first.wait() == 1
        (tmp_path / "given up").touch()
        assert second.wait() == 0, second.stderr
    last_line = first.stderr.splitlines()[-1]
    assert "PeerError: no answer from another rank within timeout_seconds=1; run" in last_line


def test_a_process_alone_exchanges_nothing_and_a_size_without_a_rank_is_no_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gather(3) == [3]
    assert broadcast_from_main("here") == "here"
    assert sum_over_ranks(torch.tensor([1.5, 2.0])) == [1.5, 2.0]
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a shell of a cluster may have it
    assert find_world() == World()
    assert not is_launched()
    monkeypatch.setenv("RANK", "1")
    assert is_launched()


# --- devices


def test_the_device_of_a_rank_is_the_current_one_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks synchronize with the current device, not with the device of the tensors."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    second = torch.device("cuda", 1)
    with process_group(World(), second, 60):
        assert devices == [second]


def test_several_processes_on_one_numbered_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="devices=2: device=cuda:0 is a single device; use"):
        choose_num_processes(2, "cuda:0")
    assert choose_num_processes(1, "cuda:0") == 1
    assert choose_num_processes(2, "cpu") == 2


def test_a_cpu_has_every_format_and_float32_by_default() -> None:
    for choice in DType:
        expected = "float32" if choice is DType.auto else choice.value
        assert find_dtype(choice, CPU) is getattr(torch, expected)
    with pytest.raises(
        DeviceError,
        match="dtype=float16: the device mps of this machine does not support it; use dtype=flo",
    ):
        find_dtype(DType.float16, torch.device("mps"))


def test_auto_trains_in_bfloat16_on_a_cpu_that_is_faster_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_faster, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("nmt.training.learner.is_bfloat16_faster", lambda x=is_faster: x)
        assert choose_training_dtype(DType.auto, CPU) is expected
        assert choose_training_dtype(DType.float32, CPU) is torch.float32
        assert choose_training_dtype(DType.bfloat16, CPU) is torch.bfloat16


def test_bfloat16_is_faster_on_cpus_with_its_instructions_that_are_not_from_intel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_instructions, suits_onednn, expected in (
        (True, True, True),
        (True, False, False),  # an Intel CPU, which multiplies bfloat16 numbers more slowly
        (False, True, False),
    ):
        monkeypatch.setattr(layers, "has_bfloat16_kernels", lambda x=has_instructions: x)
        monkeypatch.setattr(layers, "is_onednn_faster", lambda x=suits_onednn: x)
        assert layers.is_bfloat16_faster() is expected


def test_a_cpu_without_instructions_for_half_formats_is_told_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for capability, rank, expected in (
        ("AVX2", "0", ["bfloat16", "float16"]),
        ("AVX2", "1", []),  # one rank says it for all
        ("AVX512", "0", []),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        for choice in DType:
            find_dtype(choice, CPU)
        assert re.findall(r"dtype=(\w+):", caplog.text) == expected
        caplog.clear()
