"""Who plays: the limit and the engines that were asked for, each with its job."""

from __future__ import annotations

from pathlib import Path

from engines import Engine
from environments import python_of
from players import Player, PlayerError, Record
from report import median_of
from settings import Settings

LIMIT = "limit"
OWN_LIMIT = "limit of "  # an engine that has one


def gather(
    engines: dict[str, Engine],
    job: Record,
    settings: Settings,
    folder: Path,
    *,
    limit: Record,
) -> tuple[list[Player], dict[str, str]]:
    """Return the players, and why engines that were asked for cannot play.

    `limit` is what its driver is told beside the job; environments are made where they lack.
    """
    here = python_of("nmt", settings.cache_dir, installs=False)
    players = [Player(LIMIT, here, "limit.py", job | limit, folder)]
    reasons = {}
    for name in settings.choose(engines):
        engine = engines[name]
        try:
            python = python_of(engine.environment, settings.cache_dir, installs=settings.installs)
        except PlayerError as error:
            reasons[name] = str(error)
            settings.say(f"  {name}: {error}")
        else:
            own = job | {"options": engine.options}
            if engine.has_own_limit:
                players.append(Player(OWN_LIMIT + name, here, "limit.py", own | limit, folder))
            players.append(Player(name, python, engine.driver, own, folder))
    return players, reasons


def take_limits(turns: dict[str, list[Record]], key: str) -> tuple[dict[str, float], Record]:
    """Take the turns of all limits out of `turns`; return the rate of each engine's limit, which is
    the one of all unless it has its own, and those turns by name.
    """
    taken = {name: turns.pop(name) for name in list(turns) if name.startswith(LIMIT)}
    medians = median_of(taken, lambda turn: turn[key])
    found = {name: medians.get(OWN_LIMIT + name, medians.get(LIMIT)) for name in turns}
    return {name: rate for name, rate in found.items() if rate is not None}, taken
