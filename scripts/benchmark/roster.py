"""Who plays: the limit and the engines that were asked for, each with its job."""

from __future__ import annotations

from pathlib import Path

from engines import Engine
from environments import python_of
from players import Player, PlayerError, Record
from settings import Settings

LIMIT = "limit"


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
            players.append(Player(name, python, engine.driver, own, folder))
    return players, reasons
