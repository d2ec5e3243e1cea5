"""What may end a run early: too little memory before the first update, losses that are not finite
(and spikes, which are logged), and signals.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean, stdev
from types import FrameType

import numpy as np
import torch
from torch import nn

from nmt.config import Adapter, Optimizer, Sharding, TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.batch import bucket
from nmt.errors import ConfigError, first_of
from nmt.training.costs import device_memory_bytes, peak_memory_bytes

# --- memory

_NUM_HALVINGS_AGAIN = 3  # of the gap between what fits and what does not
_MARGIN = 0.9  # of what fits is advised: memory is fragmented when shapes change
_MESSAGES = re.compile(  # CPU, Windows, Apple's GPU, cuBLAS, oneDNN and the C++ library
    "can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    "could not create a memory|could not create a primitive|bad_alloc"
)


def check_model_fits(
    model: nn.Module, config: TrainConfig, device: torch.device, num_ranks: int
) -> None:
    """Raise a `ConfigError` when weights, average, gradients and moments alone exceed the memory of
    `device`, with the number of devices that `sharding=full` needs. Adafactor's moments, those of
    Muon and whatever only a part of the weights has are left out.
    """
    one = sum(parameter.nbytes for parameter in model.parameters())
    whole = one * (2 if config.ema_decay else 1)  # at least once on each device
    is_partial = config.adapter is not Adapter.none or bool(config.freeze)
    has_moments = config.optimizer.name in (Optimizer.adam, Optimizer.adamw)
    state = whole if is_partial else whole + one * (3 if has_moments else 1)
    there = device_memory_bytes(device)
    is_sharded = config.sharding is Sharding.full
    needed = max(whole, state // num_ranks) if is_sharded else state
    if not 0 < there < needed:
        return
    least = math.ceil(state / (_MARGIN * there))
    remedy = f"set sharding=full on {least} devices or more, or "
    raise ConfigError(
        f"weights, gradients and moments take {needed / 1e9:.2f} GB on each device, and {device} "
        f"has {there / 1e9:.2f} GB; {remedy if whole <= there else ''}use a smaller model"
    )


def preflight(
    run: Callable[[Rows], None], lengths: Lengths, max_tokens: int, *,
    device: torch.device, ballast_bytes: int, remedy: str,
) -> int:  # fmt: skip
    """Run the largest batches of pairs of `lengths` (N, 2) before the first update; return the
    `peak_memory_bytes`.

    `run` goes forward and backward; gradients stay, as between the batches of an update, until the
    caller drops them. `ballast_bytes` will exist later, such as the moments of Adam. Raises
    `ConfigError` when memory does not suffice, with a max_tokens that does, as was tried, and what
    else to do, the `remedy`.
    """

    def fits(tokens: int) -> bool:
        batches = largest_batches(lengths, tokens)
        has_failed = False
        try:
            # written to, since an operating system does not allocate it before
            ballast = torch.ones(ballast_bytes, dtype=torch.uint8, device=device)
            for rows in [*batches, batches[0]]:  # when gradients of others are there
                run(rows)
            del ballast
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            has_failed = True
        if has_failed:
            gc.collect()  # only here, where the error no longer holds the tensors of its frames
        torch.cuda.empty_cache()  # does nothing without a GPU in use
        return not has_failed

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if fits(max_tokens):
        return peak_memory_bytes(device)
    batch = lengths[largest_batches(lengths, max_tokens)[0]]
    what = f"out of memory: max_tokens={max_tokens} makes batches such as {len(batch)} pairs of "
    what += f"{batch[:, 0].max()} source and {batch[:, 1].max()} target tokens"
    most = _most_tokens(fits, int(lengths.max()), max_tokens)
    if most is None:
        raise ConfigError(f"{what}, but not even the longest pair fits alone; {remedy}")
    raise ConfigError(f"{what}; set max_tokens={most}, which fits, or {remedy}")


def largest_batches(lengths: Lengths, max_tokens: int) -> list[Rows]:
    """Return the batches that may need the most memory, the one with most positions first: those of
    most positions, on both sides or one, and of most squared lengths, for attention as a whole.
    """
    batches = bucket(lengths, max_tokens, np.arange(len(lengths)))
    sizes = np.array([(len(rows), *lengths[rows].max(axis=0)) for rows in batches], dtype=np.int64)
    rows, src, tgt = sizes.T  # (batches,) each
    measures = [rows * (src + tgt), rows * src, rows * tgt, rows * (src**2 + src * tgt + tgt**2)]
    worst = dict.fromkeys(int(measure.argmax()) for measure in measures)
    return [batches[i] for i in worst]


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means too little memory, on whatever device."""
    is_plain = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_plain or (isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error))))


def _most_tokens(fits: Callable[[int], bool], fewest: int, too_many: int) -> int | None:
    """Search for a max_tokens from `fewest` to `too_many` that fits; None when none does."""
    most = too_many
    while not fits(most := max(most // 2, fewest)):
        if most == fewest:
            return None
        too_many = most
    for _ in range(_NUM_HALVINGS_AGAIN):
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    return max(int(most * _MARGIN), fewest)


# --- losses

_WINDOW = 100  # updates that a loss is compared with
_SPIKE = 6.0  # standard deviations above their mean, and
_SPIKE_SHARE = 0.1  # this share of the mean, since a smooth curve hardly deviates
_SHOWN = 20  # pair numbers in a message


def describe_batches(batches: list[tuple[Rows, float]]) -> str:
    """Name the pairs of all batches without a finite loss, else of the one with the highest; a
    batch comes with its loss in nats a target token.
    """
    suspects = [batch for batch in batches if not math.isfinite(batch[1])]
    suspects = suspects or [max(batches, key=lambda batch: batch[1])]
    rows = np.concatenate([rows for rows, _ in suspects]).tolist()
    pairs = first_of(rows, _SHOWN)
    return f"loss {suspects[0][1]:.4g} for pairs {pairs} of the training set, from 0"


class SpikeDetector:
    """Finds losses far above those before them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Judge the loss of an update, in nats a token, and remember it."""
        before = list(self._losses)
        self._losses.append(loss)
        if len(before) < _WINDOW:
            return False
        mean = fmean(before)
        return loss > mean + max(_SPIKE * stdev(before), _SPIKE_SHARE * mean)


# --- signals, by which schedulers announce the end


@contextlib.contextmanager
def listen() -> Iterator[list[signal.Signals]]:
    """Yield a list that SIGTERM and SIGUSR1 are added to during the block, in the main thread; the
    run stops after the update.
    """
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = {signal.SIGTERM, getattr(signal, "SIGUSR1", signal.SIGTERM)}  # Windows has the first
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
