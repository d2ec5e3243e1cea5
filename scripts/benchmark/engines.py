"""The engines of benchmark.yaml, and the Python environments of peers, created at first use."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from workers import WorkerError

ROOT = Path(__file__).resolve().parent.parent.parent
_COMMON_PACKAGES = ("torch", "transformers", "ctranslate2", "sentencepiece")

BENCHMARK: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("benchmark.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An entry of `train` or `translate` in benchmark.yaml."""

    environment: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    own_limit: bool = False


TRAIN = {name: Engine(**entry) for name, entry in BENCHMARK["train"].items()}
TRANSLATE = {name: Engine(**entry) for name, entry in BENCHMARK["translate"].items()}


def environment_python(name: str, cache_dir: Path, *, install: bool) -> Path:
    """Return the Python of an environment; create the environment if it does not exist.

    Without `install`, and for `nmt`, return the Python of this process. Raises `WorkerError` with
    the message of pip if the installation fails.
    """
    if name == "nmt" or not install:
        return Path(sys.executable)
    folder = cache_dir / "environments" / name
    python = folder / "bin" / "python"
    marker = folder / "installed.json"
    pip_calls = BENCHMARK["environments"][name]
    if marker.exists() and json.loads(marker.read_text()) == pip_calls:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text(_common_constraints(), encoding="utf-8")
    for pip_call in pip_calls:
        arguments = pip_call.split()
        if "--no-constraints" in arguments:
            arguments.remove("--no-constraints")
        else:
            arguments += ["-c", str(constraints)]
        _run([str(python), "-m", "pip", "install", "--quiet", *arguments])
    marker.write_text(json.dumps(pip_calls), encoding="utf-8")
    return python


def _common_constraints() -> str:
    """Return the lines of constraints.txt for packages that all engines share."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.split("==")[0] in _COMMON_PACKAGES)


def _run(command: list[str]) -> None:
    """Run a command without our PYTHONPATH; raise `WorkerError` if it fails."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        error = re.search(r"^ERROR.*", result.stderr, re.MULTILINE)
        last_line = result.stderr.strip().split("\n")[-1]
        raise WorkerError(f"not installed: {error[0] if error else last_line or 'pip failed'}")
