"""Packages and containers: builds have the same bytes, and settings of nmt-serve exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from nmt.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]


def build(folder: Path, umask: int) -> dict[str, bytes]:
    """Build in a temporary folder of its own; return the files by name."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    command = [sys.executable, str(ROOT / "scripts/build.py"), "--output", str(folder / "dist")]
    environment = os.environ | {"TMPDIR": str(temporary), "TZ": f"UTC{umask % 8}"}
    result = subprocess.run(
        command, env=environment, umask=umask, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_bytes() for path in (folder / "dist").iterdir()}


@pytest.mark.long
def test_builds_in_other_folders_at_other_times_have_the_same_bytes(tmp_path: Path) -> None:
    first = build(tmp_path / "a", umask=0o022)
    time.sleep(3)  # timestamps in wheels are even seconds
    second = build(tmp_path / "a longer name" / "b", umask=0o077)
    assert {Path(name).suffix for name in first} == {".whl", ".gz"}
    assert first == second
    for path in (tmp_path / "a/dist").iterdir():
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                assert "nmt/configs/model/base.yaml" in wheel.namelist()
        else:
            with tarfile.open(path) as archive:
                folder = path.name.removesuffix(".tar.gz")
                assert f"{folder}/configs/model/base.yaml" in archive.getnames()


def test_containers_and_the_systemd_unit_use_settings_of_nmt_serve() -> None:
    accepted = {setting.key for setting in COMMANDS["serve"].accepted_settings}
    folder = ROOT / "docs/serve"
    container = (folder / "Containerfile").read_text(encoding="utf-8")
    compose = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["nmt-serve"]
    unit = (folder / "nmt-serve.service").read_text(encoding="utf-8")
    lines = {
        "Containerfile": " ".join(re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]", container, re.M)),
        "compose.yaml": " ".join(service["command"]),
        "nmt-serve.service": re.findall(r"^ExecStart=\S+ (.*)", unit, re.M)[0],
    }
    for name, line in lines.items():
        keys = re.findall(r"(\w+)=", line)
        assert "model_dir" in keys, name
        assert set(keys) <= accepted, name
    arguments = re.findall(r"^ARG (\w+)=", container, re.M)
    assert list(service["build"]["args"]) == arguments
    assert (folder / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert re.search("^USER 1000$", container, re.M)


def test_containers_are_built_from_the_package_without_data_and_keys() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    included = {line[1:] for line in lines if line.startswith("!")}
    assert included >= {"nmt", "configs", "pyproject.toml", "setup.cfg", "constraints.txt"}
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    files = re.findall(r"^(?:long_description = file:|license_files =) (\S+)$", setup, re.M)
    assert len(files) == 2
    assert included >= set(files)
    for private in ("data", "runs", "docs", ".venv", ".git"):
        assert private not in included, private


@pytest.mark.slow
def test_ci_ends_a_step_that_ignores_sigterm(tmp_path: Path) -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    definition = re.search(r"^end\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    assert definition is not None
    commands = f"""
set -meuo pipefail
declare -A pids
folder={tmp_path}/steps
mkdir $folder
{definition[0]}
(trap '' TERM; touch {tmp_path}/started; exec sleep 600) &
pids[step]=$!
while [ ! -e {tmp_path}/started ]; do sleep 0.05; done
end
wait ${{pids[step]}} || echo $?
"""
    result = subprocess.run(
        ["bash", "-c", commands], capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout == f"{128 + 9}\n"
    assert not (tmp_path / "steps").exists()
