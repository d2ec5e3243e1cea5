"""What a run would take: plan, memory, speed and time, from some updates that really are made.

Measuring and wording are apart; neither writes a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice

from nmt.data import Lengths
from nmt.data.batch import padding_share
from nmt.data.batching import Update, Updates
from nmt.distributed import from_main

_SECONDS, _MOST_UPDATES = 10.0, 20  # of measuring, whichever ends first; at least one update


@dataclass(frozen=True)
class Pace:
    """What the measured updates took, over all ranks."""

    num_updates: int
    seconds: float
    num_tokens: int  # target
    num_src_tokens: int
    flops: float  # of the model's products for real tokens

    @property
    def seconds_a_token(self) -> float:
        """Seconds a token of either side; sides have about equal shares in every update."""
        return self.seconds / (self.num_tokens + self.num_src_tokens)


@dataclass(frozen=True)
class Plan:
    """An epoch, over all ranks but for `num_batches` and `padding_share` of this one."""

    num_pairs: int
    num_updates: int
    num_batches: int
    num_tokens: int  # target
    num_src_tokens: int
    padding_share: float  # 0 to 1

    @property
    def tokens_an_update(self) -> float:
        """Tokens of both sides in the mean update."""
        return (self.num_tokens + self.num_src_tokens) / self.num_updates


def make_plan(updates: Updates, lengths: Lengths) -> Plan:
    """Sum up the updates of an epoch over pairs of `lengths` (N, 2); of a large corpus those of the
    first pool, which stand for the others.
    """
    planned = updates.pool_of(0)
    batches = [rows for update in planned for rows in update.batches]
    scale = len(updates) / len(planned)
    return Plan(
        num_pairs=updates.num_pairs,
        num_updates=len(updates),
        num_batches=round(scale * len(batches)),
        num_tokens=round(scale * sum(update.num_tokens for update in planned)),
        num_src_tokens=round(scale * sum(update.num_src_tokens for update in planned)),
        padding_share=padding_share(lengths, batches),
    )


def measure_pace(step: Callable[[Update], float], updates: Sequence[Update]) -> Pace:
    """Make some updates for about 10 seconds; all ranks make the same.

    `step` makes one update and returns its operations over all ranks, when its work is done. The
    first update warms up libraries; one that takes all the time by itself is measured nevertheless.
    """
    first = _timed(step, updates[:1])
    count = min(_MOST_UPDATES, int(_SECONDS / first.seconds))
    count = from_main(count)  # clocks of ranks differ
    if count == 0:
        return first
    return _timed(step, list(islice(cycle(updates), 1, 1 + count)))


def _timed(step: Callable[[Update], float], updates: Sequence[Update]) -> Pace:
    start = time.perf_counter()
    flops = sum(step(update) for update in updates)
    return Pace(
        num_updates=len(updates),
        seconds=time.perf_counter() - start,
        num_tokens=sum(update.num_tokens for update in updates),
        num_src_tokens=sum(update.num_src_tokens for update in updates),
        flops=flops,
    )


def seconds_left(plan: Plan, pace: Pace, num_updates: int) -> float:
    """Return how long `num_updates` of the plan's mean size take at that pace."""
    return num_updates * plan.tokens_an_update * pace.seconds_a_token


def report(
    plan: Plan,
    pace: Pace,
    *,
    num_updates: int,
    memory: str,
    flops_per_second: float,
    now: datetime,
) -> str:
    """Word the answer of a dry run, a line a subject.

    `num_updates` are still to be made; `memory` says what was measured, and of what;
    `flops_per_second` is what all devices could do in products of this model.
    """
    update_seconds = seconds_left(plan, pace, 1)
    total_seconds = seconds_left(plan, pace, num_updates)
    end = now + timedelta(seconds=total_seconds)
    lines = {
        "plan": f"{plan.num_pairs:,} pairs; {plan.num_updates:,} updates an epoch of "
        f"{plan.num_batches / plan.num_updates:.1f} batches a rank and "
        f"{plan.num_tokens / plan.num_updates:,.0f} target tokens; "
        f"{plan.padding_share:.1%} padding; "
        f"{num_updates:,} updates are {num_updates / plan.num_updates:,.1f} epochs",
        "memory": memory,
        "speed": f"{pace.num_src_tokens / pace.seconds:,.0f} source and "
        f"{pace.num_tokens / pace.seconds:,.0f} target tokens a second; "
        f"{update_seconds:.3g} seconds an update (from {pace.num_updates}); "
        f"{pace.flops / pace.seconds / 1e9:,.0f} GFLOP/s of the model, "
        f"{pace.flops / pace.seconds / flops_per_second:.0%} of the rate of its products",
        "time": f"{_hours(total_seconds)} hours:minutes without validation and checkpoints; "
        f"begun now, it ends {end:%Y-%m-%d %H:%M}",
    }
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def _hours(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d}"
