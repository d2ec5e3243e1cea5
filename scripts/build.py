"""Build the wheel and the source distribution reproducibly: equal commits give equal bytes.

    python scripts/build.py [--output dist]

Builds from a copy of the files that git tracks, with fixed permissions. All timestamps are the time
of the commit, or the environment variable SOURCE_DATE_EPOCH if it is set.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Build both, and print their SHA-256 checksums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args().output.resolve()
    timestamp = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct").strip()
    os.umask(0o022)  # permissions of generated files
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        copy_tracked_files(source)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
        environment = os.environ | {"SOURCE_DATE_EPOCH": timestamp}
        subprocess.run([*command, str(source)], check=True, env=environment, stdout=sys.stderr)
    for path in sorted(output.glob("nmt-*")):
        if path.name.endswith(".tar.gz"):
            normalize_archive(path, int(timestamp))
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


def git(*arguments: str) -> str:
    """Run git in the repository; return its output."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def copy_tracked_files(folder: Path) -> None:
    """Copy the files that git tracks, with the permissions 644."""
    for name in git("ls-files", "-z").strip("\0").split("\0"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, path)
        path.chmod(0o644)


def normalize_archive(path: Path, timestamp: int) -> None:
    """Rewrite a .tar.gz archive in the order of names, with fixed timestamps and owners."""
    temporary = path.with_suffix(".new")
    with (
        tarfile.open(path) as source,
        temporary.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=timestamp) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime = timestamp
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.pax_headers = {}
            content = source.extractfile(member) if member.isfile() else None
            target.addfile(member, content)
    temporary.replace(path)


if __name__ == "__main__":
    main()
