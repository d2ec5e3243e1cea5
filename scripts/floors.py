"""Print the lowest version that setup.cfg allows of each dependency, as constraints for pip."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.cfg"


def main() -> None:
    """Print one line `name==version` per dependency that has a lower bound."""
    setup = configparser.ConfigParser()
    setup.read(SETUP, encoding="utf-8")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    floors = set()
    for line in "\n".join(texts).splitlines():
        match = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", line.strip())
        if match:
            floors.add(f"{match[1]}=={match[2]}")
    print("\n".join(sorted(floors)))


if __name__ == "__main__":
    main()
