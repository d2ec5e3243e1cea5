"""The largest batch, and real shortage of memory in a process of its own."""

from __future__ import annotations

import copy
import ctypes
import importlib
import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import child
from tiny import assert_same_tensors, hidden_states, tiny_model
from torch.nn.utils import parameters_to_vector
from toy import call_before

from nmt.config import (
    Adapter,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    Schedule,
    Sharding,
    TrainConfig,
)
from nmt.data import Lengths, Rows
from nmt.data.batch import bucket_by_length
from nmt.errors import ConfigError
from nmt.model.transformer import Transformer
from nmt.runtime.distributed import World
from nmt.training import build
from nmt.training import preflight as preflights
from nmt.training.costs import peak_memory_bytes
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.preflight import (
    _search_max_tokens,
    check_batches_fit,
    check_model_fits,
    is_out_of_memory,
    largest_batches,
)

CPU = torch.device("cpu")
ADVICE = "buy some"
SPARE_BYTES = 60 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h: larger blocks are mapped, and unmapped when they are freed


def draw_lengths(count: int, longest: int, seed: int = 0) -> Lengths:
    draw = np.random.default_rng(seed)
    return np.clip(draw.lognormal(2.5, 0.7, (count, 2)), 2, longest).astype(np.int32)


def run_batch(model: Transformer, lengths: Lengths, rows: Rows) -> None:
    """Run random pairs of these lengths forward and backward."""
    (src_size, tgt_size) = lengths[rows].max(axis=0)
    count = len(rows)
    src = torch.randint(4, 20, (count, int(src_size)))
    tgt = torch.randint(4, 20, (count, int(tgt_size)))
    hidden = hidden_states(model, src, torch.as_tensor(lengths[rows, 0]), tgt).flatten(0, 1)
    weight = model.embedding.weight
    smoothed_cross_entropy(hidden, weight, tgt.flatten(), smoothing=0.1)[0].backward()


def plan_under_limit(lengths: Lengths, max_tokens: int, path: Path) -> None:
    """Limit the memory of this process, try `max_tokens`, and train an epoch with the advised size.

    Writes the message, the number of updates, and whether three times the advised size fails.
    """
    torch.set_num_threads(1)
    # Give every freed tensor back at once: otherwise, the blocks that glibc keeps take a share of
    # the memory that differs from run to run.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    linear = importlib.import_module("nmt.model.fast.layers")
    # oneDNN keeps the memory of failed attempts
    linear.is_onednn_faster = lambda _num_packed=0: False
    model = tiny_model(d_model=64, d_ff=256, vocab_size=500).train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    size_kib = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    assert size_kib is not None
    limit = int(size_kib[1]) * 1024 + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def run(rows: Rows) -> None:
        run_batch(model, lengths, rows)

    ballast = 2 * 4 * len(parameters_to_vector(model.parameters()))
    with pytest.raises(ConfigError) as info:
        check_batches_fit(
            run, lengths, max_tokens, device=CPU, reserved_bytes=ballast, advice=ADVICE
        )
    message = str(info.value)
    advised = int(message.split("max_tokens=")[2].split(",")[0])
    batches = bucket_by_length(lengths, advised, np.random.default_rng(1).permutation(len(lengths)))
    for rows in batches:
        run(rows)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    thrice_fails = False
    try:
        run(largest_batches(lengths, 3 * advised)[0])
    except (RuntimeError, MemoryError) as error:
        thrice_fails = is_out_of_memory(error)
    path.write_text(json.dumps([message, len(batches), thrice_fails]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is Linux's")
def test_too_large_batches_are_refused_with_a_size_that_then_trains(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with child(tmp_path / "log", plan_under_limit, draw_lengths(600, 60), 12_000, path) as process:
        assert process.wait() == 0, process.stderr
    message, num_updates, thrice_fails = json.loads(path.read_text())
    pattern = (
        r"out of memory: max_tokens=12000 makes batches such as \d+ pairs of \d+ source and \d+ "
        r"target tokens; set max_tokens=(\d+), which fits, or buy some"
    )
    match = re.fullmatch(pattern, message)
    assert match is not None, message
    assert 500 < int(match[1]) < 12_000
    assert num_updates > 2
    assert thrice_fails  # the advice is no more cautious than it must be


@pytest.mark.slow
def test_weights_stay_and_the_peak_holds_the_ballast(tmp_path: Path) -> None:
    with child(tmp_path / "log", hold_ballast) as process:  # whose peak is small yet
        assert process.wait() == 0, process.stderr


def hold_ballast() -> None:
    """Run the largest batches beside as much memory as this process has ever held."""
    model = tiny_model().train()
    lengths = draw_lengths(50, 20)
    weights = copy.deepcopy(model.state_dict())
    held = peak_memory_bytes(CPU)
    # `held` is more than ever was free below the peak
    options = {"device": CPU, "reserved_bytes": held, "advice": ADVICE}
    peak = check_batches_fit(lambda rows: run_batch(model, lengths, rows), lengths, 200, **options)
    assert peak > 1.2 * held
    assert_same_tensors(model.state_dict(), weights)


def test_no_batch_of_an_epoch_is_more_than_two_percent_larger_than_those_tried() -> None:
    lengths = draw_lengths(3000, 50)

    def measure(rows: Rows) -> list[int]:
        count = len(rows)
        src, tgt = lengths[rows].max(axis=0).tolist()
        squares = src * src + src * tgt + tgt * tgt
        return [count * (src + tgt), count * src, count * tgt, count * squares]

    tried = list(map(measure, largest_batches(lengths, 700)))
    largest = np.max(tried, axis=0)
    assert tried[0][0] == largest[0]
    for epoch in range(5):
        order = np.random.default_rng(epoch).permutation(len(lengths))
        measures = list(map(measure, bucket_by_length(lengths, 700, order)))
        assert (0.98 * np.max(measures, axis=0) <= largest).all()
    equal_lengths = np.full((100, 2), 9, dtype=np.int32)
    assert len(largest_batches(equal_lengths, 90)) == 1


def test_shortage_of_memory_differs_from_other_errors() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        # more than any machine has
        (lambda _: torch.empty(1 << 60, dtype=torch.uint8), ConfigError, "longest pair fits"),
        (lambda _: np.empty(1 << 60, dtype=np.uint8), ConfigError, "longest pair fits"),
        (lambda _: torch.zeros(2) @ torch.zeros(3), RuntimeError, "size"),
    ]
    for run, kind, message in cases:
        with pytest.raises(kind, match=message):
            check_batches_fit(
                run, draw_lengths(9, 9), 50, device=CPU, reserved_bytes=0, advice=ADVICE
            )
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_model_whose_state_is_larger_than_the_device_is_refused_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    weights = 4 * len(parameters_to_vector(model.parameters()))
    full = {"sharding": Sharding.full}
    paths = {"data_dir": "", "run_dir": ""}
    schedule_free = OptimizerConfig(name=Optimizer.schedule_free, schedule=Schedule.constant)
    cases: list[tuple[dict[str, Any], int, float]] = [  # settings, ranks, times the weights
        ({}, 1, 4),  # weights, gradients and two moments
        ({}, 2, 4),  # DDP has all on each
        ({"ema_decay": 0.9}, 1, 5),
        ({"optimizer": OptimizerConfig(name=Optimizer.adafactor)}, 1, 2),
        ({"optimizer": schedule_free}, 1, 4),
        ({"adapter": Adapter.lora, "init_from": "run"}, 1, 1),
        (full, 2, 2),
        (full, 8, 1),  # whole weights, before they are divided
    ]
    for settings, num_ranks, times in cases:
        config = TrainConfig(**paths, **settings)
        for memory_bytes, is_enough in (
            (int(times * weights), True),
            (int(times * weights) - 1, False),
        ):
            monkeypatch.setattr(
                preflights, "device_memory_bytes", lambda _, memory_bytes=memory_bytes: memory_bytes
            )
            if is_enough:
                check_model_fits(model, config, CPU, num_ranks)
                continue
            with pytest.raises(ConfigError, match="use a smaller model") as info:
                check_model_fits(model, config, CPU, num_ranks)
            assert ("sharding=full" in str(info.value)) == (times > 1), settings
    monkeypatch.setattr(preflights, "device_memory_bytes", lambda _: weights)
    with pytest.raises(ConfigError, match="set sharding=full on 5 devices"):  # 4 / 0.9
        check_model_fits(model, TrainConfig(**paths), CPU, 1)


def test_a_model_that_is_too_large_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_types = []

    def note_device(*_: Any, **__: Any) -> None:
        device_types.append(torch.empty(0).device.type)

    call_before(monkeypatch, build, "Transformer", note_device)
    monkeypatch.setattr(preflights, "device_memory_bytes", lambda _: 1)
    tokenizer: Any = SimpleNamespace(tgt=SimpleNamespace(vocab_size=9), src_vocab_size=None)
    config = TrainConfig(model=ModelConfig(d_model=8, num_heads=2))
    with pytest.raises(ConfigError, match="use a smaller model"):
        build.build_model(config, tokenizer, World(), CPU)
    assert device_types == ["meta"]


def test_the_advised_max_tokens_fits_and_is_near_the_largest_that_fits() -> None:
    for max_fitting in range(8, 4096, 31):
        advised = _search_max_tokens(
            lambda tokens, max_fitting=max_fitting: tokens <= max_fitting, 8, 4096
        )
        assert advised is not None
        assert max(8, 0.8 * max_fitting - 1) <= advised <= max_fitting, max_fitting
    assert _search_max_tokens(lambda _: False, 8, 4096) is None
