"""Find the largest `max_tokens` whose batches fit in memory (`max_tokens=auto`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch

from nmt.config import TrainConfig
from nmt.data import Rows
from nmt.data.batching import TokenBatchSampler
from nmt.errors import ConfigError
from nmt.runtime.distributed import World, gather
from nmt.training.build import build_run
from nmt.training.costs import reset_peak_memory, usable_memory_bytes
from nmt.training.learner import Learner
from nmt.training.preflight import SAFE_SHARE, largest_batches, measure_batches

log = logging.getLogger(__name__)
_MIN_GAIN = 1.05  # stop if the next size is below this multiple of the largest size that fits


def find_max_tokens(config: TrainConfig, world: World, device: torch.device) -> int:
    """Return the largest `max_tokens` whose batches fit on the devices of all ranks.

    The result is at most the size of a whole update: a larger number would change nothing. Builds a
    run, and runs batches of growing size forward and backward. Raises a `ConfigError` if not even
    the longest pair fits.
    """
    run = build_run(config, world, device)
    usable_bytes = usable_memory_bytes(device) or sys.maxsize  # 0: unknown, only errors count
    if device.type == "cpu":
        usable_bytes //= world.local_size  # ranks share the memory of their machine
    limit_bytes = min(gather(int(SAFE_SHARE * usable_bytes)))
    max_tokens = max(sampler.max_tokens for sampler in run.samplers.values())
    with run.learner.ranks_connected():
        for sampler in run.samplers.values():
            max_tokens = _find_for_stage(run.learner, sampler, max_tokens, limit_bytes)
    log.info("max_tokens=auto: %d fits in %.2f GB of %s", max_tokens, limit_bytes / 1e9, device)
    return max_tokens


def _find_for_stage(
    learner: Learner, sampler: TokenBatchSampler, maximum: int, limit_bytes: int
) -> int:
    """Return the largest `max_tokens` up to `maximum` that fits in the stage of a sampler."""
    rows = sampler.memory_test_rows()
    lengths = learner.batch_maker.lengths[rows]
    reserved_bytes = learner.future_moment_bytes()
    learner.objective.train()

    def run_batch(indices: Rows) -> None:
        learner.run_without_update(rows[indices], only_largest=True)

    def measure(max_tokens: int) -> int | None:
        reset_peak_memory(learner.device)
        batches = largest_batches(lengths, max_tokens)
        peak_bytes = measure_batches(
            run_batch, batches, device=learner.device, reserved_bytes=reserved_bytes
        )
        learner.zero_grad()
        peaks = []
        for rank_peak in gather(peak_bytes):  # so that all ranks try the same next size
            if rank_peak is None:
                return None
            peaks.append(rank_peak)
        return max(peaks)

    max_tokens = search_max_tokens(measure, sampler.max_length, maximum, limit_bytes)
    if max_tokens is None:
        raise ConfigError(
            "max_tokens=auto: not even the longest pair fits in memory; set "
            "activation_checkpointing=true, or use a smaller model"
        )
    return max_tokens


def search_max_tokens(
    measure: Callable[[int], int | None], minimum: int, maximum: int, limit_bytes: int
) -> int | None:
    """Return the largest `max_tokens` from `minimum` to `maximum` that fits; None if none does.

    `measure` runs the largest batches of a size and returns their peak memory in bytes, or None if
    they ran out of memory. Each trial at most doubles the size. A line through the last two peaks
    predicts the size that reaches `limit_bytes`. No trial exceeds this size, since an operating
    system may kill a process that takes too much memory. After a failed trial, the search bisects.
    """
    fitting_peak = measure(minimum)
    if fitting_peak is None or fitting_peak > limit_bytes:
        return None
    largest_fitting = minimum  # the largest size that was measured and fits
    upper_bound = maximum  # after a failed trial, one less than its size
    bytes_per_token = 0.0  # additional memory of a token, between the last two peaks
    ran_out_of_memory = False
    while largest_fitting < upper_bound:
        candidate = min(2 * largest_fitting, upper_bound)
        if upper_bound < maximum:  # a trial has failed: bisect
            candidate = (largest_fitting + upper_bound + 1) // 2
        if bytes_per_token > 0:
            num_more_tokens = int((limit_bytes - fitting_peak) / bytes_per_token)
            candidate = min(candidate, largest_fitting + num_more_tokens)
        smallest_useful = min(_MIN_GAIN * largest_fitting, maximum)
        if candidate < smallest_useful:
            break
        peak_bytes = measure(candidate)
        if peak_bytes is None or peak_bytes > limit_bytes:
            upper_bound = candidate - 1
            if peak_bytes is None:
                ran_out_of_memory = True
            continue
        bytes_per_token = (peak_bytes - fitting_peak) / (candidate - largest_fitting)
        largest_fitting = candidate
        fitting_peak = peak_bytes
    if ran_out_of_memory:
        return max(int(SAFE_SHARE * largest_fitting), minimum)
    return largest_fitting
