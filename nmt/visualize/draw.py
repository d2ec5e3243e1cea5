"""The list of pictures of `nmt-visualize`, and the command that draws them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import Picture, VisualizeConfig, resolve_path
from nmt.errors import ConfigError, NmtError
from nmt.runtime.files import replace_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PictureInfo:
    """A description of a picture, an example, and the functions that make it."""

    description: str
    example: str
    figure: str = ""  # "module:function" that returns a figure of matplotlib
    page: str = ""  # "module:function" that returns an HTML page


PICTURES = {
    Picture.attention: PictureInfo(
        "attention of every layer and head, as a page to explore, or as .png",
        'src="A dog runs." model_dir=runs/mine',
        figure="attention_figure:draw_attention",
        page="attention_page:attention_page",
    ),
    Picture.mask: PictureInfo("causal and padding mask", "length=20", figure="theory:draw_mask"),
    Picture.positions: PictureInfo(
        "positional encodings of each layout, and some dimensions as curves",
        "model.d_model=20 model.num_heads=4 dimensions=[4,5,6,7]",
        figure="theory:draw_positions",
    ),
    Picture.schedule: PictureInfo(
        "learning rates",
        "schedules=[512:4000,512:8000,512:4000:cosine]",
        figure="theory:draw_schedule",
    ),
    Picture.smoothing: PictureInfo(
        "label smoothing: target, and loss against confidence",
        "label_smoothing=0.4",
        figure="theory:draw_smoothing",
    ),
    Picture.architecture: PictureInfo(
        "boxes with shapes and numbers of parameters",
        "model=big",
        figure="architecture:draw_architecture",
    ),
    Picture.embeddings: PictureInfo(
        "embeddings on two axes, and nearest neighbors",
        "words=[dog,red] model_dir=runs/mine",
        figure="embeddings:draw_embeddings",
    ),
    Picture.search: PictureInfo(
        "the tree of a beam search, and the likeliest words of each step",
        'src="A dog runs." model_dir=runs/mine',
        figure="search_tree:draw_search",
    ),
    Picture.run: PictureInfo(
        "loss, perplexity, BLEU, learning rate, gradient norm and speed of runs",
        "run_dir=[runs/a,runs/b]",
        figure="runs:draw_run",
    ),
    Picture.data: PictureInfo(
        "the report of nmt-preprocess about a data folder",
        "data_dir=data/mine output=data.html",
        figure="runs:draw_data",
        page="run_report:data_page",
    ),
    Picture.report: PictureInfo(
        "a run on one page: settings, curves, scores, best and worst sentences, speed",
        "run_dir=runs/mine",
        page="run_report:report_page",
    ),
    Picture.upload: PictureInfo(
        "no picture: sends a run's metrics to trackers that lack them",
        "run_dir=runs/mine tracker=[wandb,mlflow]",
    ),
}


def list_pictures() -> str:
    """Return the list of all pictures, with an example each."""
    lines = ["nmt-visualize draws, with what=NAME:\n"]
    for picture, info in PICTURES.items():
        lines.append(f"  what={picture.value}\n      {info.description}")
        lines.append(f"      nmt-visualize what={picture.value} {info.example}")
    lines.append(
        "\noutput=FILE.png, .svg, .pdf or .html; theme=dark; nmt-visualize --help has the rest"
    )
    return "\n".join(lines)


def draw(config: VisualizeConfig) -> None:
    """Draw the picture of the settings and log its file; without `what`, list all pictures."""
    if config.what is None:
        print(list_pictures())
    elif config.what is Picture.upload:
        _import_function("runs:upload")(config)
    else:
        log.info("wrote %s", _write_picture(config, config.what))


def _write_picture(config: VisualizeConfig, picture: Picture) -> Path:
    """Write a picture as a page if the suffix of `output` is .html, else as a figure."""
    info = PICTURES[picture]
    suffix = ".png"
    if info.page and picture is not Picture.data:
        suffix = ".html"
    output = resolve_path(config.output or f"{picture.value}{suffix}")
    is_page = output.suffix == ".html"
    if is_page and not info.page:
        raise ConfigError(
            f"output={config.output}: what={picture.value} is written as .png, .svg or .pdf"
        )
    if not is_page and not info.figure:
        raise ConfigError(f"output={config.output}: what={picture.value} is written as .html")
    if is_page:
        text = _import_function(info.page)(config)
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        return output
    if importlib.util.find_spec("matplotlib") is None:
        raise NmtError("pictures need matplotlib; install it with: pip install nmt[visualize]")
    from nmt.visualize.style import Style, save

    style = Style(config.theme)
    with style.applied():
        save(_import_function(info.figure)(config, style), output)
    return output


def _import_function(name: str) -> Callable[..., Any]:
    """Import a function of this package only when needed: some need torch, some matplotlib."""
    module, function = name.split(":")
    return getattr(importlib.import_module(f"nmt.visualize.{module}"), function)  # type: ignore[no-any-return]
