"""Try everything that needs a GPU, on a machine that has one, in at most nine minutes.

    make gpu                                     text in shared/data/multi30k, results in build/gpu
    make gpu wheels=DIR text=DIR output=DIR      what the machine's Python lacks comes from DIR
    python scripts/gpu.py --rehearse             the same on a processor, at a tiny size

Each part is a process of its own with a limit of time, so that one failure does not end the rest.
After each, `gpu.json` and `gpu.md` are written anew. The exit status is 1 if a part failed.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_suffix("")))

from page import describe, page  # noqa: E402
from parts import LEFT_OUT, PARTS, REHEARSAL, ROOT, Job, PartError, exiting  # noqa: E402

ALL_SECONDS = 540

# --- running them


def run_part(part: Callable[[Job], dict[str, Any]], job: Job, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, and of its own group; return what became of it."""
    name, start = part.__name__, time.perf_counter()
    answer, log = job.output / f"{name}.answer", job.output / f"{name}.log"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        with log.open("w", encoding="utf-8") as file, exiting():
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            try:
                content = {"status": "ok", "figures": part(job)}
            except PartError as error:
                content = {"status": "failed", "reason": str(error)}
            answer.write_text(json.dumps(content), encoding="utf-8")
    is_late = not wait(pid, start + seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # it, or what it left behind
    if is_late:
        os.waitpid(pid, 0)
    said = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    last = said[-1].strip()[:300] if said else "no word"
    result: dict[str, Any] = {"status": "failed", "reason": last}
    if is_late:
        result["reason"] = f"not done after {seconds:.0f} seconds; last line: {last}"
    elif answer.exists():
        result = json.loads(answer.read_text(encoding="utf-8"))
        reason = result.get("reason", "")
        if reason.startswith(LEFT_OUT):
            result = {"status": "left out", "reason": reason.removeprefix(LEFT_OUT)}
        elif "exit status" in reason:
            result["reason"] = f"{reason}: {last}"
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def wait(pid: int, deadline: float) -> bool:
    """Wait for a process until a time of `perf_counter`; say whether it has ended."""
    while time.perf_counter() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False


def install(wheels: Path | None, packages: Path) -> list[str]:
    """Unpack the wheels of packages that this Python lacks, without a network, beside the rest of
    it; return their files. torch stays as it is.
    """
    there = {re.sub(r"[-_.]+", "-", d.name).lower() for d in importlib.metadata.distributions()}
    found = sorted(wheels.glob("*.whl")) if wheels else []
    missing = [
        wheel for wheel in found if wheel.name.split("-")[0].replace("_", "-").lower() not in there
    ]
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--target", str(packages), *map(str, missing)], check=True)
    sys.path[:0] = [str(ROOT), str(packages)]
    libraries = map(str, packages.glob("nvidia/*/lib"))  # dlopen looks there in new processes
    searched = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(searched)
    before = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(packages), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    return [wheel.name for wheel in missing]


def import_all() -> None:
    """Import what parts need, so that their processes begin with it. Nothing is computed here, and
    CUDA not begun, which a fork would not survive.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for devices without CUDA
    import torch._dynamo  # noqa: F401  # with the first step of an optimizer

    import nmt

    nmt.__path__.append(str(ROOT))  # where it is not installed, `nmt.configs` is configs/

    import nmt.cli.compose
    import nmt.evaluate
    import nmt.export.export_model
    import nmt.preprocess.prepare
    import nmt.training.train
    import nmt.translate.translator  # noqa: F401


def main() -> int:
    """Run the parts and write what they found; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--text", type=Path, default=ROOT / "shared" / "data" / "multi30k")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is missing")
    parser.add_argument("--parts", nargs="+", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--rehearse", action="store_true", help="on a processor, at a tiny size")
    options = parser.parse_args()
    start = time.perf_counter()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    installed = install(options.wheels, output / "packages")
    os.chdir(ROOT)
    import_all()
    job = Job(output, options.text.resolve())
    if options.rehearse:
        job = replace(job, device="cpu", **REHEARSAL)
    slower = 20 if job.is_rehearsal else 1  # than a GPU, on a machine that is busy
    results: dict[str, Any] = {}
    for part, limit in PARTS.items():
        name, left = part.__name__, slower * ALL_SECONDS - (time.perf_counter() - start)
        if options.parts and name not in options.parts:
            continue
        if left < min(limit, 20):
            results[name] = {"status": "failed", "reason": "no time is left", "seconds": 0.0}
        else:
            results[name] = run_part(part, job, min(slower * limit, left))
        num_devices = results[name].get("figures", {}).get("devices", job.num_devices)
        job = replace(job, num_devices=num_devices)
        print(f"{name}: {describe(results[name])}", flush=True)
        content = {"rehearsal": job.is_rehearsal, "installed": installed, "parts": results}
        write(output / "gpu.json", json.dumps(content, indent=1))
        write(output / "gpu.md", page(content))
    return int(any(result["status"] == "failed" for result in results.values()))


def write(path: Path, text: str) -> None:
    """Write a file in one step."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
