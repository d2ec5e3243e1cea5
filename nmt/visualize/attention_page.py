"""The attention page: one HTML file that shows the attention of every layer and head.

It shares a script and a part of its style with the server's page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from nmt.config import VisualizeConfig
from nmt.runtime.pages import load_page_templates
from nmt.translate.attention import PairAttention
from nmt.visualize.attention_figure import compute_attention


def attention_page(config: VisualizeConfig) -> str:
    """Return the page for the pairs of the settings."""
    models = ", ".join(Path(folder).name or folder for folder in config.model_dir)
    return render_page(compute_attention(config), models)


def render_page(pairs: Sequence[PairAttention], models: str) -> str:
    """Return the page for pairs and the names of their models. The template escapes all text."""
    titles = []
    attention = []
    for pair in pairs:
        titles.append(f"{join_pieces(pair.src)} → {join_pieces(pair.predicted)}")
        attention.append(pair.as_json())
    template = load_page_templates(Path(__file__).parent).get_template("attention.html.j2")
    return template.render(
        models=models,
        num_encoder_layers=len(pairs[0].encoder),
        num_decoder_layers=len(pairs[0].cross),
        num_heads=pairs[0].encoder.size(1),
        titles=titles,
        pairs=attention,
        component_js=read_attention_script(),
        component_css=read_component("attention.css"),
    )


def read_attention_script() -> str:
    """Return the script of the attention view, with the files that it imports before it."""
    names = ("attention_maps.js", "attention_drawing.js", "attention.js")
    script = "".join(map(read_component, names))
    return re.sub(r"(?m)^import [^;]+;\n", "", script)


def read_component(name: str) -> str:
    """Return the text of a file of the server's page."""
    return (resources.files("nmt.serve") / "static" / name).read_text(encoding="utf-8")


def join_pieces(pieces: Sequence[str]) -> str:
    """Return the pieces of a sentence as text, without EOS."""
    if pieces[-1] == "</s>":
        pieces = pieces[:-1]
    return "".join(pieces).replace("▁", " ").strip()
