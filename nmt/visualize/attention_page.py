"""The attention page: one HTML file with the maps of every layer and head, which draws them itself.

Its script and part of its style are those of the server's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from nmt.config import VisualizeConfig
from nmt.runtime.pages import page_templates
from nmt.translate.attention import PairAttention
from nmt.visualize.words import attention_of


def attention_page(config: VisualizeConfig) -> str:
    """Return the page for the pairs that the settings name."""
    models = ", ".join(Path(folder).name or folder for folder in config.model_dir)
    return render_page(attention_of(config), models)


def render_page(found: Sequence[PairAttention], models: str) -> str:
    """Return the page for some pairs. Text is set as text, whatever is in it."""
    first = found[0]
    layers = {"encoder": len(first.encoder), "decoder": len(first.decoder)}
    return (
        page_templates(Path(__file__).parent)
        .get_template("attention.html.j2")
        .render(
            models=models,
            layers=", ".join(f"{number} {side} layers" for side, number in layers.items()),
            heads=first.encoder.size(1),
            titles=[f"{text_of(pair.src)} → {text_of(pair.predicted)}" for pair in found],
            pairs=[pair.as_json() for pair in found],
            component_js=component("attention.js"),
            component_css=component("attention.css"),
        )
    )


def component(name: str) -> str:
    """Return a file of the server's page, to put into another."""
    path = resources.files("nmt.serve") / "static" / name
    return path.read_text(encoding="utf-8")


def text_of(pieces: Sequence[str]) -> str:
    """Return the pieces of a sentence, which EOS may end, as text."""
    return "".join(pieces[: len(pieces) - (pieces[-1] == "</s>")]).replace("▁", " ").strip()
