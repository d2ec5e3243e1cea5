"""Build the site of the documentation, which needs no network, from the Markdown of the repository.

    python scripts/build_docs.py [--output build/site]

Copies the pages, adds pages with the source files that they link, puts the code of the code tour
next to its text, and runs Zensical in strict mode. Then checks that every link, anchor and picture
of the site exists, and that no page loads anything from another host.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import tour

ROOT = Path(__file__).resolve().parents[1]
ASSETS = "docs/site"  # style, and a script that replaces one of another host
WORKER_SCRIPT = ("https://unpkg.com/iframe-worker/shim", "docs/site/iframe-worker.js")
NOTEBOOK = "docs/tutorial.ipynb"
TOP_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}


def main() -> int:
    """Build and check the site; print the broken links."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/site")
    output = parser.parse_args().output.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pages(folder / "pages")
        shutil.copy(ROOT / "zensical.toml", folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        status = subprocess.run(command, cwd=folder, env=os.environ | {"NO_COLOR": "1"}).returncode
        if status:
            return status
        use_own_script(folder / "site")
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder / "site", output)
    errors = check_links(output)
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 1
    print(f"{output}/index.html")
    return 0


# --- pages


def write_pages(folder: Path) -> None:
    """Write the Markdown of the site, with the paths that the files have in the repository."""
    pages = [ROOT / name for name in TOP_PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    linked_files: set[Path] = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if page in tour.PAGES:
            text = wide_page(tour.with_code(text))
        text = adapt_links(text, page, linked_files)
        path = folder / page.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "README.md").rename(folder / "index.md")
    path = folder / f"{NOTEBOOK}.md"
    text = notebook_to_markdown(json.loads((ROOT / NOTEBOOK).read_text("utf-8")), path)
    path.write_text(adapt_links(text, ROOT / NOTEBOOK, linked_files), encoding="utf-8")
    for file in sorted(linked_files):
        write_source_page(file, folder)
    shutil.copytree(ROOT / "docs/pictures", folder / "docs/pictures", dirs_exist_ok=True)
    shutil.copytree(ROOT / ASSETS, folder / ASSETS, dirs_exist_ok=True)


def notebook_to_markdown(notebook: dict[str, Any], path: Path) -> str:
    """Return the cells of a notebook and their outputs as a page; write its pictures next to it."""
    blocks = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                picture = path.with_name(f"{path.stem}-{number}.png")
                picture.write_bytes(base64.b64decode(data["image/png"]))
                blocks.append(f"![Output of the cell]({picture.name})")
            elif "text/html" in data:
                blocks.append("".join(data["text/html"]))
            elif text:
                blocks.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(blocks) + "\n"


def wide_page(text: str) -> str:
    """Return a page without the navigation at its sides."""
    return f"---\nhide: [navigation, toc]\n---\n\n{text}"


def adapt_links(text: str, page: Path, linked_files: set[Path]) -> str:
    """Link the README as index.md, and source files as the pages that show them.

    Adds the source files to `linked_files`.
    """

    def adapt(match: re.Match[str]) -> str:
        target, fragment = urldefrag(match[2])
        path = (page.parent / target).resolve()
        is_other_file = target != "" and "://" not in target and path.is_file()
        if path == ROOT / "README.md":
            target = target.replace("README.md", "index.md")
        elif is_other_file and shows_as_code(path):
            if path.suffix != ".ipynb":
                linked_files.add(path)
            target = f"{target}.md"
            line = re.match(r"L(\d+)", fragment)
            fragment = f"__codelineno-0-{line[1]}" if line else ""
        if fragment:
            target += f"#{fragment}"
        return f"{match[1]}{target}{match[3]}"

    return _LINK.sub(adapt, text)


def shows_as_code(path: Path) -> bool:
    """Return whether a linked file becomes a page that shows it."""
    return path.suffix not in (".md", ".png", ".svg")


def write_source_page(file: Path, folder: Path) -> None:
    """Write a page that shows a file with line numbers. The search of the site leaves it out."""
    name = file.relative_to(ROOT).as_posix()
    language = _LANGUAGES.get(file.suffix, "text")
    code = file.read_text(encoding="utf-8")
    path = folder / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
        f'~~~~~{language} linenums="1"\n{code}~~~~~\n',
        encoding="utf-8",
    )


def use_own_script(site: Path) -> None:
    """Let the pages load a script of another host from the site instead.

    The search needs this script if the site is opened from files, without a server.
    """
    address, own_path = WORKER_SCRIPT
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        relative = os.path.relpath(site / own_path, path.parent)
        path.write_text(html.replace(address, relative), encoding="utf-8")


# --- checks


class PageLinks(HTMLParser):
    """Collects the ids of a page, its links, and the addresses that it loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record one element."""
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values["href"])


def check_links(site: Path) -> list[str]:
    """Return an error for each link, anchor or loaded file that does not exist in the site."""
    pages = {path: PageLinks(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    errors = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        if name == "404.html":  # has absolute addresses
            continue
        for address in page.loaded:
            if "//" in address:
                errors.append(f"{name}: loads {address}")
        for address in page.links + page.loaded:
            if re.match(r"[a-z]+:|//", address):
                continue
            target, fragment = urldefrag(address)
            file = (path.parent / unquote(target)).resolve() if target else path
            if file.is_dir():
                file = file / "index.html"
            if not file.is_file():
                errors.append(f"{name}: {address} does not exist")
            elif fragment and file in pages and unquote(fragment) not in pages[file].ids:
                errors.append(f"{name}: {address} has no such anchor")
    return errors


if __name__ == "__main__":
    sys.exit(main())
