"""The command line of scripts that generate pages: write the pages, or check them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(description: str, pages: Mapping[Path, str]) -> int:
    """Write the text of each page; with --check, write nothing and return 1 if a page is outdated.

    The first line of `description` is the help of the script.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="do not write; fail if a page is old")
    check = parser.parse_args().check
    outdated = []
    for path, text in pages.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(path.name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8", newline="\n")
    if check and outdated:
        print(f"{', '.join(outdated)}: outdated; run make format", file=sys.stderr)
        return 1
    return 0
