"""What the launcher of `nmt-train` starts for each device: one rank, with the configuration in a
file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from nmt.cli import train
from nmt.cli.compose import to_config
from nmt.cli.main import log_to_stderr
from nmt.config import TrainConfig
from nmt.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USER,
    NmtError,
    RankError,
    StoppedError,
)


def main(path: str) -> int:
    """Train one rank and return its exit status; the launcher tells the user why it failed."""
    log_to_stderr()
    config_yaml = Path(path).read_text(encoding="utf-8")
    composed = OmegaConf.create(config_yaml)
    try:
        train.run(*to_config(composed, TrainConfig))  # type: ignore[arg-type]
    except StoppedError:
        return EXIT_STOPPED
    except NmtError:
        return EXIT_USER
    except RankError:
        return EXIT_BUG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
