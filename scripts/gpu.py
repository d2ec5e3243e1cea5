"""Test and benchmark nmt on a machine with a GPU, in at most nine minutes.

    make gpu                                     text in shared/data/multi30k, results in build/gpu
    make gpu wheels=DIR text=DIR output=DIR      installs missing packages from the wheels in DIR
    python scripts/gpu.py --rehearse             the same on a CPU, at a tiny size

Each part runs in a process with a time limit, so that a failure does not end the others. After
each part, `gpu.json` and `gpu.md` are written again. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_suffix("")))

from page import describe, make_page  # noqa: E402
from parts import PARTS, REHEARSAL, ROOT, Job, PartError, PartFunction, PartSkipped, exiting  # noqa: E402

TOTAL_SECONDS = 540
REHEARSAL_SLOWDOWN = 20  # factor of all time limits on a CPU


def main() -> int:
    """Run the parts and write their results; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--text", type=Path, default=ROOT / "shared" / "data" / "multi30k")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of missing packages")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size")
    options = parser.parse_args()
    start_seconds = time.perf_counter()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    installed = install_wheels(options.wheels, output / "packages")
    os.chdir(ROOT)
    import_everything()
    job = Job(output, options.text.resolve())
    slowdown = 1
    if options.rehearse:
        job = replace(job, device="cpu", **REHEARSAL)
        slowdown = REHEARSAL_SLOWDOWN
    results: dict[str, Any] = {}
    for name, (run_function, limit_seconds) in PARTS.items():
        if name not in options.parts:
            continue
        seconds_left = slowdown * TOTAL_SECONDS - (time.perf_counter() - start_seconds)
        if seconds_left < min(limit_seconds, 20):
            result = {"status": "failed", "reason": "no time is left", "seconds": 0.0}
        else:
            max_seconds = min(slowdown * limit_seconds, seconds_left)
            result = run_part(name, run_function, job, max_seconds)
        results[name] = result
        if name == "machine" and "figures" in result:
            job = replace(job, num_devices=result["figures"].get("devices", 1))
        print(f"{name}: {describe(result)}", flush=True)
        content = {"rehearsal": job.is_rehearsal, "installed": installed, "parts": results}
        write_atomically(output / "gpu.json", json.dumps(content, indent=1))
        write_atomically(output / "gpu.md", make_page(content))
    return int(any(result["status"] == "failed" for result in results.values()))


def run_part(name: str, run_function: PartFunction, job: Job, max_seconds: float) -> dict[str, Any]:
    """Run a part in a forked process with a time limit.

    Returns its status, its seconds, and its figures or the reason of the failure.
    """
    start_seconds = time.perf_counter()
    answer_file = job.output / f"{name}.answer"
    answer_file.unlink(missing_ok=True)
    log_file = job.output / f"{name}.log"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with log_file.open("w", encoding="utf-8") as log, exiting():
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log
            try:
                answer: dict[str, Any] = {"status": "ok", "figures": run_function(job)}
            except PartSkipped as error:
                answer = {"status": "left out", "reason": str(error)}
            except PartError as error:
                answer = {"status": "failed", "reason": str(error)}
            answer_file.write_text(json.dumps(answer), encoding="utf-8")
    has_ended = wait_until(start_seconds + max_seconds, pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the process, or children that it left running
    if not has_ended:
        os.waitpid(pid, 0)
    log_text = log_file.read_text("utf-8", "replace").strip()
    last_line = log_text.splitlines()[-1].strip()[:300] if log_text else "no output"
    if not has_ended:
        reason = f"not done after {max_seconds:.0f} seconds; last line: {last_line}"
        answer = {"status": "failed", "reason": reason}
    elif answer_file.exists():
        answer = json.loads(answer_file.read_text(encoding="utf-8"))
        if "exit status" in answer.get("reason", ""):
            answer["reason"] += f": {last_line}"
    else:
        answer = {"status": "failed", "reason": last_line}
    answer["seconds"] = round(time.perf_counter() - start_seconds, 1)
    return answer


def wait_until(deadline: float, pid: int) -> bool:
    """Wait for a process until `perf_counter` reaches the deadline; return whether it has ended."""
    while time.perf_counter() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def install_wheels(wheels_dir: Path | None, packages: Path) -> list[str]:
    """Install wheels of packages that are missing into the folder `packages`; return their names.

    Needs no network. Installed packages, such as torch, stay unchanged.
    """
    installed = {normalize_name(package.name) for package in importlib.metadata.distributions()}
    wheels = sorted(wheels_dir.glob("*.whl")) if wheels_dir else []
    missing_wheels = []
    for wheel in wheels:
        if normalize_name(wheel.name.split("-")[0]) not in installed:
            missing_wheels.append(wheel)
    if missing_wheels:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--target", str(packages)]
        command += map(str, missing_wheels)
        subprocess.run(command, check=True)
    sys.path[:0] = [str(ROOT), str(packages)]
    prepend_to_variable("PYTHONPATH", [ROOT, packages])
    # so that new processes find the shared libraries of CUDA
    prepend_to_variable("LD_LIBRARY_PATH", list(packages.glob("nvidia/*/lib")))
    return [wheel.name for wheel in missing_wheels]


def normalize_name(package: str) -> str:
    """Return the name of a package with lower-case letters and hyphens."""
    return re.sub(r"[-_.]+", "-", package).lower()


def prepend_to_variable(name: str, paths: list[Path]) -> None:
    """Prepend paths to an environment variable such as PYTHONPATH."""
    entries = [str(path) for path in paths]
    if os.environ.get(name):
        entries.append(os.environ[name])
    os.environ[name] = os.pathsep.join(entries)


def import_everything() -> None:
    """Import all modules that the parts need, so that their forks start quickly.

    Does not initialize CUDA, which would not survive a fork.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # count devices without initializing CUDA
    import torch._dynamo  # noqa: F401  # otherwise imported by the first step of an optimizer

    import nmt

    nmt.__path__.append(str(ROOT))  # so that `nmt.configs` exists if nmt is not installed

    import nmt.cli.compose
    import nmt.evaluate
    import nmt.export.export_model
    import nmt.preprocess.prepare
    import nmt.training.train
    import nmt.translate.translator  # noqa: F401


def write_atomically(path: Path, text: str) -> None:
    """Write a file, so that readers see the old or the new content, never a part of it."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
