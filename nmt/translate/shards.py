"""One job cut over the processes of a launcher, such as torchrun, and its parts joined in order.

The input is cut into blocks of `window_lines` lines; process r of n translates the blocks r, r + n,
r + 2n ... to a file of its own. They share a file system and nothing else: no process group.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.errors import ConfigError, NmtError
from nmt.files import sync
from nmt.translate.job import Counts, State, read_state

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 60.0


@dataclass(frozen=True)
class Shard:
    """The share of this process."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Shard:
        """Read RANK and WORLD_SIZE, which launchers set; without them there is one process."""
        values = (environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1"))
        if not all(value.isdigit() for value in values) or not int(values[0]) < int(values[1]):
            raise ConfigError(
                f"RANK={values[0]}, WORLD_SIZE={values[1]}: set by a launcher, the rank must be "
                "from 0 to below the world size; start with torchrun, or unset both"
            )
        return cls(int(values[0]), int(values[1]))

    def owns(self, line: int, window_lines: int) -> bool:
        """Say whether the window that starts at `line` is this process's."""
        return line // window_lines % self.world_size == self.rank

    def part_path(self, output: Path, rank: int | None = None) -> Path:
        """Name the file that a process (None: this one) appends to."""
        name = f"{output.name}.partial"
        if self.world_size > 1:
            name += f".{self.rank if rank is None else rank}-of-{self.world_size}"
        return output.with_name(name)


def finish(
    output: Path, shard: Shard, state: State, job: dict[str, Any], window_lines: int
) -> Counts:
    """Make the whole output appear in one step, remove the parts, and return the counts of all.

    Rank 0 does that and waits for the others, who have nothing to do here.
    """
    counts = Counts()
    counts.add(state.counts)
    if shard.rank:
        return counts
    own = shard.part_path(output)
    if shard.world_size == 1:
        os.replace(own, output)
    else:
        paths = [shard.part_path(output, rank) for rank in range(shard.world_size)]
        for rank, path in enumerate(paths[1:], start=1):
            counts.add(_wait(path, rank, state, job).counts)
        num_lines = _join(paths, output, window_lines)
        assert num_lines == state.lines, (num_lines, state.lines)
    sync(output.parent)
    pattern = re.compile(re.escape(output.name) + r"\.partial(\.\d+-of-\d+)?(\.json(\.tmp)?)?")
    for path in list(output.parent.iterdir()):  # also those of a world of another size
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)
    return counts


def _wait(path: Path, rank: int, own: State, job: dict[str, Any]) -> State:
    """Wait until the part of another rank is done; it must be of the same input."""
    noticed = time.monotonic()
    while True:
        state, _ = read_state(path, job)
        is_same = (state.lines, state.sha256) == (own.lines, own.sha256)
        if state.is_done and is_same:
            return state
        if time.monotonic() - noticed > _NOTICE_SECONDS:
            if state.is_done:
                raise NmtError(
                    f"{path} is of another input; it changed meanwhile: give the same command again"
                )
            log.info("waiting for rank %d, which has come to line %d", rank, state.lines)
            noticed = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _join(paths: Sequence[Path], output: Path, window_lines: int) -> int:
    """Write the blocks of all parts in turn; return the number of lines."""
    num_lines = 0
    whole = output.with_name(f"{output.name}.partial.joined")
    with contextlib.ExitStack() as stack:
        joined = stack.enter_context(whole.open("wb"))
        streams = [stack.enter_context(path.open("rb")) for path in paths]
        for stream in itertools.cycle(streams):
            block = 0
            for line in itertools.islice(stream, window_lines):
                joined.write(line)
                block += 1
            num_lines += block
            if block < window_lines:  # the last one
                break
    sync(whole)
    os.replace(whole, output)
    return num_lines
