"""What a report says about the machine and the run."""

from __future__ import annotations

import os
import platform
import re
import shlex
from datetime import date
from pathlib import Path

import torch

from nmt import __version__


def facts(arguments: list[str], seconds: float) -> dict[str, str]:
    """Return machine, versions and command, by name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "date": date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores seen, {memory / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "nmt": f"{__version__} on torch {torch.__version__}",
        "command": "python " + shlex.join(arguments),
        "minutes": f"{seconds / 60:.1f}",
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        text = path.read_text(encoding="utf-8")
        name = re.search(r"model name\s*:\s*(.+)", text)
        flags = re.search(r"flags\s*:\s*(.+)", text)
        wanted = ("avx2", "avx512f", "avx512_vnni", "amx_bf16")
        has = [flag for flag in wanted if flags and flag in flags[1].split()]
        if name:
            return " ".join([name[1], f"({', '.join(has)})"])
    return platform.processor() or platform.machine()
