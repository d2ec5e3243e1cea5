"""`dry_run=true`: the plan, memory, speed and time of a run, estimated from some updates."""

# N pairs

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice

import torch

from nmt.config import TrainConfig
from nmt.data import Lengths
from nmt.data.batch import padding_share
from nmt.data.batching import Update, Updates
from nmt.runtime.distributed import World, from_main
from nmt.training.build import build_run
from nmt.training.costs import device_memory_bytes, peak_memory_bytes, synchronize
from nmt.training.learner import Learner
from nmt.training.preflight import try_largest_batches
from nmt.training.schedule import learning_rate

PACE_SECONDS = 10.0  # for measuring updates
_MAX_UPDATES = 20  # that are measured


def dry_run(config: TrainConfig, world: World, device: torch.device) -> str:
    """Try the largest batches and make some updates; return an estimate of the run, in lines.

    Nothing is read from or written to the run folder.
    """
    run = build_run(config, world, device)
    learner = run.learner
    updates = run.sampler_at(0).updates(0)

    def make_update(plan: Update) -> float:
        batches = learner.batch_maker.make(plan)
        result = learner.update(plan, batches, learning_rate(1, config), is_stop_requested=False)
        synchronize(device)
        return result.flops

    with learner.connected():
        peak_bytes = try_largest_batches(learner, run.samplers.values(), updates.pool_of(0))
        pace = measure_pace(make_update, updates)
        peak_bytes = max(peak_bytes, peak_memory_bytes(device))
        return render_report(
            updates,
            learner.batch_maker.lengths,
            pace,
            num_updates=config.max_updates,
            memory=_describe_memory(learner, peak_bytes),
            flops_per_second=learner.measure_rate(),
            start=datetime.now(),
        )


def _describe_memory(learner: Learner, peak_bytes: int) -> str:
    memory_bytes = device_memory_bytes(learner.device)
    scope = "the process" if learner.device.type == "cpu" else "tensors"
    if memory_bytes:
        scope += f", of {memory_bytes / 1e9:.2f} GB,"
    sharding = "; sharding=full is not needed"
    if learner.sharded is not None:
        sharding = f", 1/{learner.world.size} of them by sharding=full"
    elif learner.world.size > 1:
        sharding += f", and leaves 1/{learner.world.size} of that"
    return (
        f"{peak_bytes / 1e9:.2f} GB of {scope} on each device, at the peak; weights, gradients and "
        f"moments are {learner.state_bytes() / 1e9:.2f} GB{sharding}"
    )


@dataclass(frozen=True)
class Pace:
    """The cost of the measured updates, over all ranks."""

    updates: Sequence[Update]
    seconds: float
    flops: float  # of the model, without padding


def measure_pace(make_update: Callable[[Update], float], updates: Sequence[Update]) -> Pace:
    """Make updates for about `PACE_SECONDS`, the same number on all ranks.

    `make_update` returns the operations of an update over all ranks, when its work is done. The
    first update warms up libraries; it is measured only if it takes all the time.
    """

    def measure(plans: Sequence[Update]) -> Pace:
        start = time.perf_counter()
        flops = sum(make_update(plan) for plan in plans)
        return Pace(plans, time.perf_counter() - start, flops)

    first = measure([updates[0]])
    # of rank 0, since the clocks of the ranks differ
    count = from_main(min(_MAX_UPDATES, int(PACE_SECONDS / first.seconds)))
    if count == 0:
        return first
    return measure(list(islice(cycle(updates), 1, 1 + count)))


def render_report(
    updates: Updates,
    lengths: Lengths,
    pace: Pace,
    *,
    num_updates: int,
    memory: str,
    flops_per_second: float,
    start: datetime,
) -> str:
    """Return the output of a dry run for a run of `num_updates` that starts at `start`.

    `updates` are an epoch of pairs of `lengths` (N, 2); of a large corpus only the first pool is
    planned. They are assumed to take as long per token of both sides as the updates of `pace`.
    `flops_per_second` is the peak throughput of all devices in this model's matrices.
    """
    planned = updates.pool_of(0)
    batches = [rows for plan in planned for rows in plan.batches]
    src_planned = sum(plan.num_src_tokens for plan in planned)
    tgt_planned = sum(plan.num_tokens for plan in planned)
    src_measured = sum(plan.num_src_tokens for plan in pace.updates)
    tgt_measured = sum(plan.num_tokens for plan in pace.updates)
    seconds_per_token = pace.seconds / (tgt_measured + src_measured)
    update_seconds = (tgt_planned + src_planned) / len(planned) * seconds_per_token
    minutes = round(num_updates * update_seconds / 60)
    end = start + timedelta(seconds=num_updates * update_seconds)
    lines = {
        "plan": f"{updates.num_pairs:,} pairs; {len(updates):,} updates an epoch of "
        f"{len(batches) / len(planned):.1f} batches a rank and "
        f"{tgt_planned / len(planned):,.0f} target tokens; "
        f"{padding_share(lengths, batches):.1%} padding; "
        f"{num_updates:,} updates are {num_updates / len(updates):,.1f} epochs",
        "memory": memory,
        "speed": f"{src_measured / pace.seconds:,.0f} source and "
        f"{tgt_measured / pace.seconds:,.0f} target tokens a second; "
        f"{update_seconds:.3g} seconds an update (from {len(pace.updates)}); "
        f"{pace.flops / pace.seconds / 1e9:,.0f} GFLOP/s of the model, "
        f"{pace.flops / pace.seconds / flops_per_second:.0%} of the peak of its matrix "
        "multiplications",
        "time": f"{minutes // 60}:{minutes % 60:02d} hours:minutes without validation and "
        f"checkpoints; started now, it ends {end:%Y-%m-%d %H:%M}",
    }
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())
