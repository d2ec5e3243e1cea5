"""Packages of npm, and scripts with the modules of the exported page, for tests of JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

WEB_STATIC = Path(__file__).parents[1] / "nmt/export/web_static"

NPM = shutil.which("npm")
needs_node = pytest.mark.skipif(NPM is None, reason="needs node and npm (Debian: npm)")


def unpack_package(package: str, node_modules: Path) -> Path:
    """Download a package, such as `axe-core@4.14.1`, and return its folder in `node_modules`."""
    name, _, _ = package.rpartition("@")
    folder = node_modules / name
    folder.mkdir(parents=True)
    command = [str(NPM), "pack", "--silent", "--pack-destination", str(folder), package]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            member.name = member.name.removeprefix("package/")
            tar.extract(member, folder, filter="data")
    archive.unlink()
    return folder


def run_script(folder: Path, script: str, data: Any) -> Any:
    """Run a script of JavaScript that can import the page's modules; return its JSON output."""
    shutil.copytree(WEB_STATIC, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "script.js").write_text(script)
    command = ["node", str(folder / "script.js")]
    pipes = {"input": json.dumps(data), "capture_output": True, "text": True}
    result = subprocess.run(command, check=False, **pipes)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
