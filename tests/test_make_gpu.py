"""scripts/gpu.py, rehearsed on a CPU: all parts, at a tiny size."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nmt.model.fast.layers import has_bfloat16_kernels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "gpu.py"
# each of these starts processes that import everything again, or compiles
SLOW = [["tests"], ["base_compiled"], ["several_devices"], ["translation"]]
QUICK = ["machine", "data", "base_plain", "precision", "bleu"]  # in the order they run


def rehearse(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Rehearse on random text; return the exit status and the content of gpu.json."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioubdfgklmnprst", k=rng.randint(2, 9))) for _ in range(300)]
    for split, num_lines in (("train", 80), ("val", 8), ("test", 8)):
        for lang in ("en", "de"):
            lines = [" ".join(rng.choices(words, k=rng.randint(2, 9))) for _ in range(num_lines)]
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{lang}").write_text(text, encoding="utf-8", newline="\n")
    # without `site`, and so without nmt, as on a machine where it is not installed
    command = [sys.executable, "-S", str(SCRIPT), f"--text={folder}", f"--output={folder / 'out'}"]
    command += ["--rehearse", *arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("-packages")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the same process
    }
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, json.loads((folder / "out" / "gpu.json").read_text("utf-8"))


def check_figures(content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the figures of each part; all of `names` must have succeeded."""
    results = content["parts"]
    assert list(results) == names
    for name, result in results.items():
        assert result["status"] == "ok", (name, result.get("reason"))
    return {name: result["figures"] for name, result in results.items()}


@pytest.mark.long
def test_parts_run_on_a_cpu_and_their_figures_are_written(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "missing_package-1.0-py3-none-any.whl", "w") as file:
        info = "missing_package-1.0.dist-info"
        file.writestr("missing_package.py", "ANSWER = 42\n")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: missing-package\nVersion: 1.0\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    (wheels / "torch-9.9-py3-none-any.whl").touch()  # installed already, so it is not unpacked
    status, content = rehearse(tmp_path, f"--wheels={wheels}", "--parts", *QUICK)
    figures = check_figures(content, QUICK)
    assert status == 0
    assert content["installed"] == ["missing_package-1.0-py3-none-any.whl"]
    assert (tmp_path / "out/packages/missing_package.py").exists()
    assert figures["base_plain"]["target_tokens_per_second"] > 0
    assert 0 < figures["base_plain"]["model_flops_utilisation"] < 1
    assert len(figures["precision"]["curves"]["bfloat16"]) == 4
    assert figures["precision"]["gap"] <= figures["precision"]["limit"]
    assert set(figures["bleu"]) == {"training_seconds", "float32", "bfloat16"}
    page = (tmp_path / "out/gpu.md").read_text("utf-8")
    head = (ROOT / "docs/benchmarks/gpu.md").read_text("utf-8").split("## Results")[0]
    assert page.startswith(head)
    assert "| base_plain | ok" in page


@pytest.mark.long
@pytest.mark.parametrize("names", SLOW, ids="-".join)
def test_the_other_parts_run_on_a_cpu_too(tmp_path: Path, names: list[str]) -> None:
    if "translation" in names and not has_bfloat16_kernels():
        pytest.skip("this torch or CPU has no bfloat16 matrix multiplication")
    status, content = rehearse(tmp_path, "--parts", "data", *names)
    figures = check_figures(content, ["data", *names])
    assert status == 0
    if "tests" in figures:
        assert figures["tests"]["passed"] >= 6
    if "several_devices" in figures:
        assert figures["several_devices"]["largest_difference"] < 1e-3
    if "translation" in figures:
        assert {"nmt-float32", "nmt-bfloat16"} <= set(figures["translation"]["tokens_per_second"])


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_speed_of_training_without_a_gradient_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_script().Job(tmp_path, tmp_path)
    module: Any = sys.modules["parts"]
    for norm in (0.0, float("nan")):
        records = [{"gradient_norm": norm}] * (job.speed_updates // job.log_every)
        monkeypatch.setattr(module, "train", lambda *_, records=records: records)
        with pytest.raises(module.PartError, match="gradient"):
            module.measure_training(job, model="base", compiled=True)


def test_a_part_that_fails_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    script = load_script()
    job = script.Job(tmp_path, tmp_path)
    pid_path = tmp_path / "pid"

    def refused(job: Any) -> dict[str, Any]:
        raise script.PartError("no such thing")

    def skipped(job: Any) -> dict[str, Any]:
        raise script.PartSkipped("there is one device")

    def broken(job: Any) -> dict[str, Any]:
        raise ValueError("a bug")

    def killed(job: Any) -> dict[str, Any]:
        print("at work", flush=True)
        os.kill(os.getpid(), 9)
        return {}

    def hanging(job: Any) -> dict[str, Any]:
        print("still at work", flush=True)
        if os.fork() == 0:  # ends with the part
            pid_path.write_text(str(os.getpid()))
        time.sleep(3600)
        return {}

    def fine(job: Any) -> dict[str, Any]:
        return {"answer": 42}

    expected = {
        refused: "no such thing",
        broken: "ValueError: a bug",
        killed: "at work",
    }
    for function, reason in expected.items():
        result = script.run_part("part", function, job, 600.0)
        assert result["status"] == "failed", reason
        assert result["reason"] == reason
    for seconds in (3, 30, 300):  # it may need some to begin
        result = script.run_part("part", hanging, job, float(seconds))
        if pid_path.exists() and pid_path.read_text():
            break
    assert result["status"] == "failed"
    assert result["reason"] == f"not done after {seconds} seconds; last line: still at work"
    assert script.run_part("part", skipped, job, 600.0)["status"] == "left out"
    pid = int(pid_path.read_text())
    for _ in range(12_000):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or ") Z" in state.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} goes on")
    assert script.run_part("part", fine, job, 600.0)["figures"] == {"answer": 42}
