"""One Python environment for each peer, made with pip from PyPI at first use.

What a peer needs to run at all on today's Python and torch stands here, and nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from players import PlayerError

ROOT = Path(__file__).resolve().parent.parent.parent
_PINNED = ("torch", "transformers", "ctranslate2", "sentencepiece")  # in constraints.txt

NAMES = ("transformers", "ctranslate2", "fairseq", "joeynmt", "opennmt")
_OPENNMT_NEEDS = "configargparse ctranslate2 fasttext-wheel flask pyahocorasick pyonmttok pyyaml"
_OPENNMT_NEEDS += " rapidfuzz sacrebleu six spacy tensorboard waitress"
_STEPS: dict[str, list[str]] = {
    "transformers": ["torch transformers sentencepiece"],
    "ctranslate2": ["ctranslate2 sentencepiece"],
    # the package fairseq does not start on Python 3.11; this is a repair by third parties
    "fairseq": ["torch sentencepiece", "fairseq-fixed==0.12.3.1"],
    # it imports importlib_metadata without asking for it
    "joeynmt": ["torch", "joeynmt==2.3.0 importlib_metadata sentencepiece==0.2.0"],
    # its pins exclude every torch of the last years
    "opennmt": ["torch sentencepiece", "--no-deps OpenNMT-py==3.5.1", _OPENNMT_NEEDS],
}


def python_of(name: str, cache_dir: Path, *, installs: bool) -> Path:
    """Return the Python of an engine's environment, which is made when it is not there.

    `nmt` is the environment that this runs in; without `installs` all engines are looked for there.
    Raises `PlayerError` with pip's reason when a peer cannot be installed.
    """
    if name == "nmt" or not installs:
        return Path(sys.executable)
    folder = cache_dir / "environments" / name
    done = folder / "installed.json"
    steps = _STEPS[name]
    python = folder / "bin" / "python"
    if done.exists() and json.loads(done.read_text()) == steps:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text(_constraints(), encoding="utf-8")
    for step in steps:
        options = [] if "==" in step and name == "joeynmt" else ["-c", str(constraints)]
        _run([str(python), "-m", "pip", "install", "--quiet", *options, *step.split()])
    done.write_text(json.dumps(steps), encoding="utf-8")
    return python


def _constraints() -> str:
    """Return the lines of constraints.txt that name what engines must have in common."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    return "".join(f"{line}\n" for line in lines if line.split("==")[0] in _PINNED)


def _run(command: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        lines = [line for line in result.stderr.split("\n") if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise PlayerError(f"not installed: {errors[0] if errors else 'pip failed'}")
