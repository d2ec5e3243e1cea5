"""Estimate the memory, the speed and the duration of a run from a few updates (`dry_run=true`)."""

# N pairs

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, cycle, islice

import torch

from nmt.config import TrainConfig, settings_to_compare
from nmt.data import Lengths
from nmt.data.batch import padding_share
from nmt.data.batching import EpochPlan, UpdatePlan
from nmt.runtime.distributed import World, broadcast_from_main, gather
from nmt.training.build import Run, build_run
from nmt.training.costs import device_memory_bytes, peak_memory_bytes, synchronize
from nmt.training.learner import Learner
from nmt.training.preflight import try_largest_batches
from nmt.training.schedule import learning_rate

log = logging.getLogger(__name__)
MEASURING_SECONDS = 10.0  # about how long updates are measured
_MAX_MEASURED_UPDATES = 20
# Settings that change neither the memory nor the time of an update. `cost_settings` also leaves out
# most settings of the optimizer.
_SETTINGS_WITHOUT_COST = ("seed", "max_updates", "label_smoothing")


@dataclass(frozen=True)
class Measurement:
    """The time and the operations of some updates, for all ranks together."""

    plans: Sequence[UpdatePlan]  # plans of the measured updates
    seconds: float
    flops: float  # operations of the model on non-padding tokens


@dataclass(frozen=True)
class _DryRunResult:
    """The measured part of a dry run. Runs of a sweep with the same cost share it."""

    measurement: Measurement
    memory: str  # description of the memory, for the report
    peak_flops_per_second: float


_results: dict[tuple[object, ...], _DryRunResult] = {}
"""The results of this process, keyed by `cost_settings`."""


def dry_run(config: TrainConfig, world: World, device: torch.device) -> str:
    """Run the largest batches and a few updates; return a report on the planned run.

    Neither reads nor writes the run folder. Runs of a sweep with the same `cost_settings`, such as
    runs with different seeds, need the same memory and time. So only the first one is measured.
    """
    run = build_run(config, world, device)
    epoch_plan = run.sampler_at(0).plan_epoch(0)
    key = cost_settings(config)
    if key in _results:
        log.info("memory and speed were measured for an earlier run, which costs the same")
    else:
        _results[key] = _measure(run, epoch_plan)
    result = _results[key]
    return render_report(
        epoch_plan,
        run.learner.batch_maker.lengths,
        result.measurement,
        num_updates=config.max_updates,
        memory=result.memory,
        peak_flops_per_second=result.peak_flops_per_second,
        start=datetime.now(),
    )


def cost_settings(config: TrainConfig) -> tuple[object, ...]:
    """Return the settings that may change the memory or the time of an update.

    A dropout rate is replaced by whether it is above zero, since its size does not matter.
    """
    settings: list[object] = []
    for key, value in settings_to_compare(config).items():
        is_optimizer_setting = key.startswith("optimizer.") and key != "optimizer.name"
        if is_optimizer_setting or key in _SETTINGS_WITHOUT_COST:
            continue
        if key.startswith("model.") and key.endswith("dropout"):
            value = bool(value)
        settings.append((key, value))
    # `settings_to_compare` leaves these out, since a resumed run may change them
    settings += [config.data_dir, config.device, config.num_threads]
    settings.append(config.activation_checkpointing)
    return tuple(settings)


def _measure(run: Run, epoch_plan: EpochPlan) -> _DryRunResult:
    """Run the largest batches and a few updates, which change the weights."""
    learner = run.learner
    lengths = learner.batch_maker.lengths

    def run_update(plan: UpdatePlan) -> float:
        batches = learner.batch_maker.make_batches(plan)
        lr = learning_rate(1, run.config)
        result = learner.update(plan, batches, lr, is_stop_requested=False)
        synchronize(learner.device)
        return result.flops

    with learner.ranks_connected():
        peak_bytes = try_largest_batches(learner, run.samplers.values(), epoch_plan.pool_of(0))
        first_plan = first_batches(epoch_plan[0], lengths)
        measurement = measure_updates(run_update, epoch_plan, first_plan)
        peak_bytes = max(peak_bytes, peak_memory_bytes(learner.device))
        return _DryRunResult(
            measurement=measurement,
            memory=_describe_memory(learner, peak_bytes),
            peak_flops_per_second=learner.measure_peak_flops_per_second(),
        )


def first_batches(plan: UpdatePlan, lengths: Lengths) -> UpdatePlan:
    """Return a small part of `plan`: the first batch of each rank. `lengths` are (N, 2)."""
    batches = plan.batches[:1]  # empty if this rank has no batch
    num_src_tokens = sum(int(lengths[rows, 0].sum()) for rows in batches)
    num_tgt_tokens = sum(int(lengths[rows, 1].sum()) for rows in batches)
    return UpdatePlan(
        batches,
        num_tokens=sum(gather(num_tgt_tokens)),
        num_src_tokens=sum(gather(num_src_tokens)),
    )


def _describe_memory(learner: Learner, peak_bytes: int) -> str:
    """Say how much memory a device needs, how much it has, and what sharding saves.

    For example: "3.21 GB of tensors, of 80.00 GB, on each device, at the peak; weights, gradients
    and moments are 1.05 GB; sharding=full is not needed". The moments are the optimizer's state.
    """
    memory_owner = "the process" if learner.device.type == "cpu" else "tensors"
    memory_bytes = device_memory_bytes(learner.device)
    if memory_bytes:
        memory_owner += f", of {memory_bytes / 1e9:.2f} GB,"
    sharding_note = "; sharding=full is not needed"
    if learner.sharded is not None:
        sharding_note = f", 1/{learner.world.size} of them by sharding=full"
    elif learner.world.size > 1:
        sharding_note += f", and leaves 1/{learner.world.size} of that"
    return (
        f"{peak_bytes / 1e9:.2f} GB of {memory_owner} on each device, at the peak; weights, "
        f"gradients and moments are {learner.state_bytes() / 1e9:.2f} GB{sharding_note}"
    )


def measure_updates(
    run_update: Callable[[UpdatePlan], float],
    plans: Sequence[UpdatePlan],
    first_plan: UpdatePlan,
) -> Measurement:
    """Time updates for about `MEASURING_SECONDS`. All ranks run the same number of updates.

    `first_plan` runs first, to estimate the time of a whole update. If a whole update would take
    more than `MEASURING_SECONDS`, `first_plan` runs once more, and the second run is measured. If
    the first run has already taken more than `MEASURING_SECONDS`, it is the measurement.

    Args:
        run_update: runs an update, waits for the device, and returns the operations of all ranks.
        plans: the updates to time.
        first_plan: `plans[0]` or a small part of it.
    """

    def measure(measured_plans: Sequence[UpdatePlan]) -> Measurement:
        start_seconds = time.perf_counter()
        flops = sum(run_update(plan) for plan in measured_plans)
        return Measurement(measured_plans, time.perf_counter() - start_seconds, flops)

    first_measurement = measure([first_plan])
    seconds_per_token = first_measurement.seconds / first_plan.num_tokens
    seconds_per_update = seconds_per_token * plans[0].num_tokens
    num_updates = min(_MAX_MEASURED_UPDATES, int(MEASURING_SECONDS / seconds_per_update))
    num_updates = broadcast_from_main(num_updates)  # the ranks measure different times
    if num_updates == 0:
        is_very_slow = broadcast_from_main(first_measurement.seconds > MEASURING_SECONDS)
        if is_very_slow:
            return first_measurement
        return measure([first_plan])
    # begins with `plans[1]`, since a part of `plans[0]` has run already
    plans_from_second = islice(cycle(plans), 1, None)
    return measure(list(islice(plans_from_second, num_updates)))


def render_report(
    epoch_plan: EpochPlan,
    lengths: Lengths,
    measurement: Measurement,
    *,
    num_updates: int,
    memory: str,
    peak_flops_per_second: float,
    start: datetime,
) -> str:
    """Return the report on a run of `num_updates` that starts at `start`.

    An epoch is planned in pools of updates. The report assumes that all updates are like the
    updates in the first pool of `epoch_plan`, and that each source or target token takes the
    measured time. `lengths` (N, 2) are the lengths of all pairs, and
    `peak_flops_per_second` is the result of `Learner.measure_peak_flops_per_second`.
    """
    plans = epoch_plan.pool_of(0)
    rank_batches = list(chain.from_iterable(plan.batches for plan in plans))
    tgt_tokens_per_update = sum(plan.num_tokens for plan in plans) / len(plans)
    src_tokens_per_update = sum(plan.num_src_tokens for plan in plans) / len(plans)
    measured_tgt_tokens = sum(plan.num_tokens for plan in measurement.plans)
    measured_src_tokens = sum(plan.num_src_tokens for plan in measurement.plans)
    seconds_per_token = measurement.seconds / (measured_tgt_tokens + measured_src_tokens)
    seconds_per_update = (tgt_tokens_per_update + src_tokens_per_update) * seconds_per_token
    flops_per_second = measurement.flops / measurement.seconds
    run_seconds = num_updates * seconds_per_update
    hours, minutes = divmod(round(run_seconds / 60), 60)
    end = start + timedelta(seconds=run_seconds)
    batches_per_update = len(rank_batches) / len(plans)
    num_epochs = num_updates / len(epoch_plan)
    plan_text = (
        f"{epoch_plan.num_pairs:,} pairs; {len(epoch_plan):,} updates an epoch of "
        f"{batches_per_update:.1f} batches a rank and "
        f"{tgt_tokens_per_update:,.0f} target tokens; "
        f"{padding_share(lengths, rank_batches):.1%} padding; "
        f"{num_updates:,} updates are {num_epochs:,.1f} epochs"
    )
    src_tokens_per_second = measured_src_tokens / measurement.seconds
    tgt_tokens_per_second = measured_tgt_tokens / measurement.seconds
    speed_text = (
        f"{src_tokens_per_second:,.0f} source and {tgt_tokens_per_second:,.0f} target tokens a "
        f"second; {seconds_per_update:.3g} seconds an update (from {len(measurement.plans)}); "
        f"{flops_per_second / 1e9:,.0f} GFLOP/s of the model, "
        f"{flops_per_second / peak_flops_per_second:.0%} of the peak of its matrix "
        "multiplications"
    )
    time_text = (
        f"{hours}:{minutes:02d} hours:minutes without validation and checkpoints; started now, it "
        f"ends {end:%Y-%m-%d %H:%M}"
    )
    sections = {"plan": plan_text, "memory": memory, "speed": speed_text, "time": time_text}
    return "\n".join(f"{title:<8}{text}" for title, text in sections.items())
