"""Packages of npm for the tests that run JavaScript."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

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
