"""`max_tokens=auto`: the largest batch that fits in a simulated memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from toy import assert_same_weights, command, train, write_corpus

from nmt.cli import train as train_command
from nmt.config import Sharding, TrainConfig
from nmt.data.batch import batch_cost
from nmt.errors import ConfigError
from nmt.training import costs
from nmt.training.auto_batch import search_max_tokens
from nmt.training.costs import usable_memory_bytes
from nmt.training.learner import Learner

CPU = torch.device("cpu")
MINIMUM = 60
MAXIMUM = 25_000


class SimulatedMemory:
    """A device on which a batch takes `bytes_per_token` for each token and `state_bytes` more."""

    def __init__(self, state_bytes: int, bytes_per_token: int, size_bytes: int) -> None:
        self.state_bytes = state_bytes
        self.bytes_per_token = bytes_per_token
        self.size_bytes = size_bytes
        self.peaks: list[int] = []

    def peak_bytes(self, max_tokens: int) -> int:
        return self.state_bytes + self.bytes_per_token * max_tokens

    def measure(self, max_tokens: int) -> int | None:
        """Return the peak of a trial; None if it needs more memory than the device has."""
        self.peaks.append(self.peak_bytes(max_tokens))
        return self.peaks[-1] if self.peaks[-1] <= self.size_bytes else None


def test_the_largest_number_is_found_whose_peak_is_below_the_limit() -> None:
    for state_bytes, bytes_per_token in itertools.product((0, 10**6, 10**8), (100, 9_999)):
        for limit_bytes in range(10**5, 3 * 10**8, 4 * 10**6 + 1):
            memory = SimulatedMemory(state_bytes, bytes_per_token, size_bytes=10**12)
            max_tokens = search_max_tokens(memory.measure, MINIMUM, MAXIMUM, limit_bytes)
            if memory.peak_bytes(MINIMUM) > limit_bytes:
                assert max_tokens is None
                continue
            assert max_tokens is not None
            assert MINIMUM <= max_tokens <= MAXIMUM
            assert memory.peak_bytes(max_tokens) <= limit_bytes
            if max_tokens < MAXIMUM:
                assert memory.peak_bytes(int(1.06 * max_tokens) + 2) > limit_bytes
            for peak_bytes in memory.peaks:  # a process that takes much more may be killed
                assert peak_bytes <= max(limit_bytes, 2 * memory.peaks[0]) * 1.001
            assert len(memory.peaks) <= 16


def test_a_trial_that_runs_out_of_memory_leaves_a_number_that_fits_with_a_tenth_to_spare() -> None:
    for size_bytes in range(10**6, 2 * 10**8, 7 * 10**6 + 3):
        memory = SimulatedMemory(10**5, 5_000, size_bytes)
        # the limit is wrong, as where a driver holds memory that it does not report
        max_tokens = search_max_tokens(memory.measure, MINIMUM, MAXIMUM, limit_bytes=10**12)
        assert max_tokens is not None
        assert memory.peak_bytes(max_tokens) <= size_bytes
        if max_tokens < MAXIMUM:
            assert memory.peak_bytes(int(max_tokens / 0.9 * 1.11) + 2) > size_bytes
    nothing_fits = SimulatedMemory(10**5, 5_000, size_bytes=1)
    assert search_max_tokens(nothing_fits.measure, MINIMUM, MAXIMUM, 10**12) is None


def test_memory_that_does_not_grow_allows_a_whole_update() -> None:
    assert search_max_tokens(lambda _: 7, MINIMUM, MAXIMUM, 7) == MAXIMUM
    assert search_max_tokens(lambda _: 7, MINIMUM, MINIMUM, 7) == MINIMUM


@pytest.fixture
def device_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a device on which batches of more tokens than the last item run out of memory."""
    capacity = [150]
    run = Learner.run_without_update

    def run_or_fail(learner: Learner, rows: Any, **options: bool) -> None:
        if batch_cost(learner.batch_maker.lengths[rows]) > capacity[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        run(learner, rows, **options)

    monkeypatch.setattr(Learner, "run_without_update", run_or_fail)
    return capacity


@pytest.mark.slow
def test_a_run_records_its_number_and_goes_on_with_it(
    tmp_path: Path,
    device_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command("preprocess", write_corpus(tmp_path)) == 0
    data_dir = tmp_path / "data"
    run_dir = tmp_path / "run"
    options = ["valid_bleu=false", "tokens_per_update=500"]
    assert train(data_dir, run_dir, options, "max_tokens=auto", "max_updates=4") == 0
    max_tokens = OmegaConf.load(run_dir / "config.yaml").max_tokens
    assert 0.85 * device_tokens[-1] <= max_tokens <= device_tokens[-1]

    # the same command on a device with more memory, and a command with only the run's folder
    device_tokens.append(400)
    with monkeypatch.context() as context:
        context.setattr(train_command, "find_max_tokens", pytest.fail)
        assert train(data_dir, run_dir, options, "max_tokens=auto", "max_updates=8") == 0
        assert f"max_tokens=auto: {max_tokens}, as recorded in" in capfd.readouterr().err
        assert command("train", f"run_dir={run_dir}", "max_updates=12") == 0
    assert OmegaConf.load(run_dir / "config.yaml").max_tokens == max_tokens
    explicit = [*options, f"max_tokens={max_tokens}", "max_updates=12"]
    assert train(data_dir, tmp_path / "explicit", explicit) == 0
    assert_same_weights(run_dir, tmp_path / "explicit")

    # a new run on the larger device, whose batches may be whole updates
    device_tokens.append(10_000)
    assert train(data_dir, tmp_path / "large", options, "max_tokens=auto", "max_updates=2") == 0
    assert OmegaConf.load(tmp_path / "large/config.yaml").max_tokens == 500
    device_tokens.append(3)
    assert train(data_dir, tmp_path / "small", options, "max_tokens=auto", "max_updates=2") == 2
    assert "not even the longest pair fits" in capfd.readouterr().err


@pytest.mark.slow
def test_a_dry_run_and_a_yaml_file_accept_auto(
    tmp_path: Path, device_tokens: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("preprocess", write_corpus(tmp_path)) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text("max_tokens: auto\ntokens_per_update: 500\nmodel: {d_model: 16}\n", "utf-8")
    settings = [f"experiment={mine}", "device=cpu", "model=tiny", "model.num_heads=2"]
    folders = [f"data_dir={tmp_path / 'data'}", f"run_dir={tmp_path / 'run'}"]
    assert command("train", settings, folders, "dry_run=true") == 0
    output = capfd.readouterr()
    assert "max_tokens=auto: 1" in output.err
    assert "memory" in output.out
    assert not (tmp_path / "run").exists()
    assert command("train", folders, "max_tokens=automatic") == 2
    assert "max_tokens=automatic: must be a whole number" in capfd.readouterr().err


def test_auto_is_refused_with_sharding() -> None:
    with pytest.raises(ConfigError, match="max_tokens=auto does not work with sharding=full"):
        TrainConfig(max_tokens=None, sharding=Sharding.full)


MEASURE = """
import torch
from nmt.training import costs
from nmt.training.costs import peak_memory_bytes, reset_peak_memory, usable_memory_bytes

cpu = torch.device("cpu")
block_bytes = 200 << 20
torch.ones(block_bytes, dtype=torch.uint8)
high_peak = peak_memory_bytes(cpu)
reset_peak_memory(cpu)
low_peak = peak_memory_bytes(cpu)
assert low_peak < high_peak - 0.8 * block_bytes
torch.ones(block_bytes, dtype=torch.uint8)
assert peak_memory_bytes(cpu) > low_peak + 0.8 * block_bytes
assert low_peak < usable_memory_bytes(cpu) <= 1.1 * costs.device_memory_bytes(cpu)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak")
def test_the_memory_of_a_cpu_is_measured() -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE], check=False)  # has the assertions
    assert result.returncode == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux has this file")
def test_a_container_limits_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    for name, text in (("memory.max", "max\n"), ("memory.limit_in_bytes", "1000000\n")):
        limits.append(tmp_path / name)
        limits[-1].write_text(text, encoding="ascii")
    monkeypatch.setattr(costs, "_CONTAINER_LIMITS", (*limits, tmp_path / "missing"))
    assert usable_memory_bytes(CPU) == 1_000_000
