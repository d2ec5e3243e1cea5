"""Run docs/tutorial.ipynb and store the outputs of its cells in it.

python scripts/notebook.py
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs/tutorial.ipynb"
UPDATES = "MAX_UPDATES = "  # the beginning of the cell that sets the length of training


def run_notebook(folder: Path, max_updates: int | None = None) -> NotebookNode:
    """Return the notebook with the outputs of a run in `folder`.

    `max_updates` replaces the number of updates in the cell `UPDATES`.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    [setting] = [cell for cell in notebook.cells if cell.source.startswith(UPDATES)]
    if max_updates is not None:
        setting.source = f"{UPDATES}{max_updates}"
    os.environ["PATH"] = f"{Path(sys.executable).absolute().parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(ROOT)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources=resources,
    )
    return client.execute()


def shrink_pictures(notebook: NotebookNode) -> None:
    """Reduce the pictures among the outputs to 64 colors, which makes the file much smaller."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
                buffer = io.BytesIO()
                picture.convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
                data["image/png"] = base64.b64encode(buffer.getvalue()).decode()


def main() -> int:
    """Write the notebook with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = run_notebook(Path(folder))
    shrink_pictures(notebook)
    notebook.metadata.pop("language_info", None)  # depends on the Python that ran it
    nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
