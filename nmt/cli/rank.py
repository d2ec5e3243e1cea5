"""Train as one rank: `python -m nmt.cli.rank CONFIG_FILE LAUNCHER_PID`.

The launcher, `nmt-train`, starts one such process for each device.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from nmt.cli.parent import exit_after_launcher
from nmt.errors import EXIT_INTERRUPTED, ONE_LINE_ERRORS


def main(config_path: str, launcher_pid: str) -> int:
    """Train with the config in a YAML file; return the exit status."""
    exit_after_launcher(int(launcher_pid))
    # a signal during the imports, which take seconds, ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from omegaconf import OmegaConf
    from torch.distributed.elastic.multiprocessing.errors import record

    from nmt.cli.compose import to_settings
    from nmt.cli.main import log_to_stderr
    from nmt.cli.train import run_rank
    from nmt.config import TrainConfig
    from nmt.runtime.manifest import set_verify

    signal.signal(signal.SIGINT, signal.default_int_handler)
    log_to_stderr()
    content: Any = OmegaConf.to_container(OmegaConf.load(config_path))
    settings = to_settings(content, TrainConfig)
    config: TrainConfig = OmegaConf.to_object(settings)  # type: ignore[assignment]
    config_yaml = OmegaConf.to_yaml(settings)
    set_verify(config.verify)
    try:
        record(run_rank)(config, config_yaml)  # reports errors to the launcher
    except ONE_LINE_ERRORS as error:
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(config_path=sys.argv[1], launcher_pid=sys.argv[2]))
