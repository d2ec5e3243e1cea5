"""Check before the first update that the model and the largest batches fit in memory."""

# N pairs

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
import torch
from torch import nn

from nmt.config import Adapter, Optimizer, Sharding, TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.batch import batch_cost, bucket_by_length
from nmt.data.batching import TokenBatchSampler, UpdatePlan
from nmt.errors import ConfigError
from nmt.runtime.distributed import gather
from nmt.training.costs import device_memory_bytes, peak_memory_bytes
from nmt.training.learner import Learner

_NUM_BISECTIONS = 3  # number of steps between a max_tokens that fits and one that does not
# a batch is not tested if another tested batch has at least this share of its size
_SIMILAR_SHARE = 0.98
# assumed limit of the cost of all batches of a run, relative to the largest batch of some updates
_MAX_COST_RATIO = 1.1
SAFE_SHARE = 0.9
"""A run may use this share of the memory, or of a `max_tokens` that fits. The rest is for
fragmentation, which batches of different shapes cause.
"""
_OUT_OF_MEMORY = re.compile(  # messages of CPU, Windows, MPS, cuBLAS, oneDNN and the C++ library
    "can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    "could not create a memory|could not create a primitive|bad_alloc"
)


def check_model_fits(
    model: nn.Module, config: TrainConfig, device: torch.device, world_size: int
) -> None:
    """Raise a `ConfigError` if weights, average, gradients and moments exceed the device's memory.

    The error says with how many devices `sharding=full` would suffice. Moments of Adafactor and
    Muon are not counted, nor are gradients and moments of models that are only partly trained.
    """
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # bytes that each device needs before sharding divides the weights among the devices
    unsharded_bytes = weight_bytes
    if config.ema_decay:
        unsharded_bytes += weight_bytes
    state_bytes = unsharded_bytes
    if config.adapter is Adapter.none and not config.freeze:
        state_bytes += weight_bytes  # gradients
        if config.optimizer.name not in (Optimizer.adafactor, Optimizer.muon):
            state_bytes += 2 * weight_bytes  # two moments
    needed_bytes = state_bytes
    if config.sharding is Sharding.full:
        needed_bytes = max(unsharded_bytes, state_bytes // world_size)
    memory_bytes = device_memory_bytes(device)
    if memory_bytes == 0 or needed_bytes <= memory_bytes:
        return
    advice = "use a smaller model"
    if unsharded_bytes <= memory_bytes:
        num_devices = math.ceil(state_bytes / (SAFE_SHARE * memory_bytes))
        advice = f"set sharding=full on {num_devices} devices or more, or {advice}"
    raise ConfigError(
        f"weights, gradients and moments take {needed_bytes / 1e9:.2f} GB on each device, and "
        f"{device} has {memory_bytes / 1e9:.2f} GB; {advice}"
    )


def try_largest_batches(
    learner: Learner, samplers: Iterable[TokenBatchSampler], plans: list[UpdatePlan]
) -> int:
    """Run the largest batches of all stages forward and backward; return the peak memory in bytes.

    There is one sampler for each stage. `plans` are a sample of the updates. Assumes that no batch
    of this rank costs more than `_MAX_COST_RATIO` times the largest batch in `plans`. Costs are in
    tokens, padding included. Raises a `ConfigError` if memory is too small.
    """
    lengths = learner.batch_maker.lengths
    batches = chain.from_iterable(plan.batches for plan in plans)
    costs = [batch_cost(lengths[rows]) for rows in batches]
    max_cost = int(_MAX_COST_RATIO * max(costs, default=0))
    peaks = []
    for sampler in samplers:
        largest_cost = max(max_cost, sampler.max_length)  # a batch may have only the longest pair
        max_tokens = min(sampler.max_tokens, largest_cost)
        peaks.append(_run_largest_batches(learner, sampler.memory_test_rows(), max_tokens))
    return max(peaks)


def _run_largest_batches(learner: Learner, rows: Rows, max_tokens: int) -> int:
    """Call `check_batches_fit` with the pairs `rows`; return the peak memory in bytes."""
    settings_to_try = []
    if not learner.config.activation_checkpointing:
        settings_to_try.append("activation_checkpointing=true")
    if learner.sharded is not None:
        max_tokens = max(gather(max_tokens))  # all ranks must run the same number of batches
    elif learner.world.size > 1:
        settings_to_try.append("sharding=full")
    advice = "use a smaller model"
    if settings_to_try:
        advice = f"set {' or '.join(settings_to_try)}"
    learner.objective.train()

    def run_batch(indices: Rows) -> None:
        """Run the pairs at `indices` of `rows`."""
        learner.run_without_update(rows[indices])

    peak_bytes = check_batches_fit(
        run_batch,
        learner.batch_maker.lengths[rows],
        max_tokens,
        device=learner.device,
        reserved_bytes=learner.future_moment_bytes(),
        advice=advice,
    )
    learner.zero_grad()
    return peak_bytes


def check_batches_fit(
    run_batch: Callable[[Rows], None],
    lengths: Lengths,
    max_tokens: int,
    *,
    device: torch.device,
    reserved_bytes: int,
    advice: str,
) -> int:
    """Run the largest batches of pairs of `lengths` (N, 2); return the peak memory in bytes.

    `run_batch` goes forward and backward and keeps the gradients, which the caller clears. During
    the test, `reserved_bytes` are allocated for moments that Adam does not have yet. If memory is
    too small, raises a `ConfigError` that names a `max_tokens` that fits and ends with `advice`.
    """

    def measure(tried_max_tokens: int) -> int | None:
        batches = largest_batches(lengths, tried_max_tokens)
        return measure_batches(run_batch, batches, device=device, reserved_bytes=reserved_bytes)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    peak_bytes = measure(max_tokens)
    if peak_bytes is not None:
        return peak_bytes
    rows = largest_batches(lengths, max_tokens)[0]
    src_length, tgt_length = lengths[rows].max(axis=0)
    problem = (
        f"out of memory: max_tokens={max_tokens} makes batches such as {len(rows)} pairs of "
        f"{src_length} source and {tgt_length} target tokens"
    )

    def batches_fit(tried_max_tokens: int) -> bool:
        return measure(tried_max_tokens) is not None

    longest = int(lengths.max())
    fitting_max_tokens = _search_max_tokens(batches_fit, minimum=longest, too_large=max_tokens)
    if fitting_max_tokens is None:
        raise ConfigError(f"{problem}, but not even the longest pair fits; {advice}")
    raise ConfigError(f"{problem}; set max_tokens={fitting_max_tokens}, which fits, or {advice}")


def measure_batches(
    run_batch: Callable[[Rows], None],
    batches: list[Rows],
    *,
    device: torch.device,
    reserved_bytes: int,
) -> int | None:
    """Run batches forward and backward; return the peak memory in bytes, None if out of memory.

    The first batch runs once more at the end, when all gradients are in memory. During all batches,
    `reserved_bytes` are allocated for moments that Adam does not have yet.
    """
    is_enough_memory = True
    try:
        # ones, since an operating system only allocates memory that is written to
        reserved = torch.ones(reserved_bytes, dtype=torch.uint8, device=device)
        for rows in [*batches, batches[0]]:
            run_batch(rows)
        del reserved
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_enough_memory = False
    if not is_enough_memory:
        # not in the `except` block, where the traceback of the error still keeps the tensors alive
        gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU in use
    return peak_memory_bytes(device) if is_enough_memory else None


def largest_batches(lengths: Lengths, max_tokens: int) -> list[Rows]:
    """Return the batches that may need the most memory.

    These are at most four: the batches with the most tokens, the most source tokens, the most
    target tokens, and the most attention weights, in this order and with padding. A batch is left
    out if an earlier one is nearly as large.
    """
    batches = bucket_by_length(lengths, max_tokens, np.arange(len(lengths)))
    num_rows = np.array([len(rows) for rows in batches], dtype=np.int64)  # (batches,)
    longest = np.array([lengths[rows].max(axis=0) for rows in batches], dtype=np.int64)
    # the lengths of both sides with padding, (batches,) each
    src = longest[:, 0]
    tgt = longest[:, 1]
    num_tokens = num_rows * (src + tgt)
    num_attention_weights = num_rows * (src**2 + src * tgt + tgt**2)  # per layer and head
    selected: list[int] = []  # indices of batches
    for counts in (num_tokens, num_rows * src, num_rows * tgt, num_attention_weights):
        largest = int(counts.argmax())
        min_count = _SIMILAR_SHARE * counts[largest]
        if not (counts[selected] >= min_count).any():
            selected.append(largest)
    return [batches[index] for index in selected]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a CPU or a GPU has too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def _search_max_tokens(
    batches_fit: Callable[[int], bool], minimum: int, too_large: int
) -> int | None:
    """Search for a max_tokens from `minimum` to `too_large` that fits; return None if none does.

    Halves `too_large` until the batches fit, and bisects the last interval. The result is
    `SAFE_SHARE` of the largest size that fits, but at least `minimum`.
    """
    candidate = max(too_large // 2, minimum)
    while not batches_fit(candidate):
        if candidate == minimum:
            return None
        too_large = candidate
        candidate = max(candidate // 2, minimum)
    largest_fitting = candidate
    for _ in range(_NUM_BISECTIONS):
        middle = (largest_fitting + too_large) // 2
        if batches_fit(middle):
            largest_fitting = middle
        else:
            too_large = middle
    return max(int(largest_fitting * SAFE_SHARE), minimum)
