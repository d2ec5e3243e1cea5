"""Check before the first update that the model and the largest batches fit in memory."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from nmt.config import Adapter, Optimizer, Sharding, TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket_by_length
from nmt.data.batching import TokenBatchSampler, Update
from nmt.errors import ConfigError
from nmt.runtime.distributed import gather
from nmt.training.costs import device_memory_bytes, peak_memory_bytes
from nmt.training.learner import Learner

_NUM_BISECTIONS = 3  # between a max_tokens that fits and one that does not
_SAFE_SHARE = 0.9  # of a max_tokens that fits: memory is fragmented when shapes change
_OUT_OF_MEMORY = re.compile(  # messages of CPU, Windows, MPS, cuBLAS, oneDNN and the C++ library
    "can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    "could not create a memory|could not create a primitive|bad_alloc"
)


def check_model_fits(
    model: nn.Module, config: TrainConfig, device: torch.device, world_size: int
) -> None:
    """Raise a `ConfigError` if weights, average, gradients and moments exceed the device's memory.

    The error says from how many devices on `sharding=full` holds them. The moments of Adafactor and
    Muon, and of parameters that are only partly trained, are not counted.
    """
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # weights and average exist at least once on each device
    unsharded_bytes = weight_bytes * (2 if config.ema_decay else 1)
    state_bytes = unsharded_bytes
    if config.adapter is Adapter.none and not config.freeze:
        has_adam_moments = config.optimizer.name in (Optimizer.adam, Optimizer.adamw)
        state_bytes += weight_bytes * (3 if has_adam_moments else 1)
    needed_bytes = state_bytes
    if config.sharding is Sharding.full:
        needed_bytes = max(unsharded_bytes, state_bytes // world_size)
    memory_bytes = device_memory_bytes(device)
    if memory_bytes == 0 or needed_bytes <= memory_bytes:
        return
    remedy = "use a smaller model"
    if unsharded_bytes <= memory_bytes:
        num_devices = math.ceil(state_bytes / (_SAFE_SHARE * memory_bytes))
        remedy = f"set sharding=full on {num_devices} devices or more, or {remedy}"
    raise ConfigError(
        f"weights, gradients and moments take {needed_bytes / 1e9:.2f} GB on each device, and "
        f"{device} has {memory_bytes / 1e9:.2f} GB; {remedy}"
    )


def try_largest_batches(
    learner: Learner, samplers: Iterable[TokenBatchSampler], planned: list[Update]
) -> int:
    """Run the largest batches of all stages, given by their `samplers`, forward and backward.

    Return the peak memory in bytes. `planned` are updates of this rank, whose batches are at most a
    little smaller than the batches of other epochs. Raises a `ConfigError` if memory is too small.
    """
    lengths = learner.batch_maker.lengths
    costs = [batch_cost(lengths[rows]) for plan in planned for rows in plan.batches]
    expected_cost = int(1.1 * max(costs, default=0))
    peaks = []
    for sampler in samplers:
        max_tokens = min(sampler.max_tokens, max(sampler.longest, expected_cost))
        peaks.append(_try_largest_of(learner, sampler.rows_to_try(), max_tokens))
    return max(peaks)


def _try_largest_of(learner: Learner, rows: Rows, max_tokens: int) -> int:
    """Run the largest batches of the pairs `rows`; return the peak memory in bytes."""
    config = learner.config
    remedies = [] if config.activation_checkpointing else ["activation_checkpointing=true"]
    if learner.sharded is not None:
        max_tokens = max(gather(max_tokens))  # all ranks must run the same number of batches
    elif learner.world.size > 1:
        remedies.append("sharding=full")
    remedy = f"set {' or '.join(remedies)}" if remedies else "use a smaller model"
    learner.objective.train()
    peak_bytes = preflight(
        lambda batch: learner.run_without_update(rows[batch]),
        learner.batch_maker.lengths[rows],
        max_tokens,
        device=learner.device,
        reserved_bytes=learner.missing_moment_bytes(),
        remedy=remedy,
    )
    learner.zero_grad()
    return peak_bytes


def preflight(
    run: Callable[[Rows], None],
    lengths: Lengths,
    max_tokens: int,
    *,
    device: torch.device,
    reserved_bytes: int,
    remedy: str,
) -> int:
    """Run the largest batches of pairs of `lengths` (N, 2); return the `peak_memory_bytes`.

    `run` goes forward and backward. Gradients stay until the caller drops them, as between the
    batches of an update. `reserved_bytes` are allocated meanwhile, for the moments of Adam. If
    memory does not suffice, raises a `ConfigError` with a max_tokens that was tried and fits, and
    the `remedy`.
    """

    def fits(tokens: int) -> bool:
        batches = largest_batches(lengths, tokens)
        is_enough = True
        try:
            # ones, since an operating system only allocates memory that is written to
            reserved = torch.ones(reserved_bytes, dtype=torch.uint8, device=device)
            for rows in [*batches, batches[0]]:  # the first again, with gradients in memory
                run(rows)
            del reserved
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            is_enough = False
        if not is_enough:
            gc.collect()  # not in the except block, where the error's frames hold the tensors
        torch.cuda.empty_cache()  # does nothing without a GPU in use
        return is_enough

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if fits(max_tokens):
        return peak_memory_bytes(device)
    batch = lengths[largest_batches(lengths, max_tokens)[0]]
    problem = (
        f"out of memory: max_tokens={max_tokens} makes batches such as {len(batch)} pairs of "
        f"{batch[:, 0].max()} source and {batch[:, 1].max()} target tokens"
    )
    fitting_tokens = _search_max_tokens(fits, int(lengths.max()), max_tokens)
    if fitting_tokens is None:
        raise ConfigError(f"{problem}, but not even the longest pair fits; {remedy}")
    raise ConfigError(f"{problem}; set max_tokens={fitting_tokens}, which fits, or {remedy}")


def largest_batches(lengths: Lengths, max_tokens: int) -> list[Rows]:
    """Return the batches that may need the most memory, the one with most positions first.

    They are the largest in positions on both sides, on one side, and in squared lengths (attention
    of the whole batch).
    """
    batches = bucket_by_length(lengths, max_tokens, np.arange(len(lengths)))
    sizes = np.array([(len(rows), *lengths[rows].max(axis=0)) for rows in batches], dtype=np.int64)
    num_rows, src, tgt = sizes.T  # (batches,) each
    measures = [
        num_rows * (src + tgt),
        num_rows * src,
        num_rows * tgt,
        num_rows * (src**2 + src * tgt + tgt**2),
    ]
    largest = dict.fromkeys(int(measure.argmax()) for measure in measures)
    return [batches[i] for i in largest]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means too little memory, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def _search_max_tokens(fits: Callable[[int], bool], minimum: int, too_large: int) -> int | None:
    """Search for a max_tokens between `minimum` and `too_large` that fits; None if none does."""
    fitting = too_large
    while not fits(fitting := max(fitting // 2, minimum)):
        if fitting == minimum:
            return None
        too_large = fitting
    for _ in range(_NUM_BISECTIONS):
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return max(int(fitting * _SAFE_SHARE), minimum)
