"""What `nmt-visualize` can draw, and how it draws it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import Picture, VisualizeConfig, resolve
from nmt.errors import ConfigError, NmtError
from nmt.runtime.files import replace_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """One kind of picture: what it shows, an example, and the functions that make it."""

    shows: str
    example: str
    figure: str = ""  # "module:function" that returns a figure of matplotlib
    page: str = ""  # that returns an HTML page; the default where there are both


PICTURES = {
    Picture.attention: Kind(
        "attention of every layer and head, as a page to explore, or as .png",
        'src="A dog runs." model_dir=runs/mine',
        "words:draw_attention",
        "attention_page:attention_page",
    ),
    Picture.mask: Kind("causal and padding mask", "length=20", "theory:draw_mask"),
    Picture.positions: Kind(
        "positional encodings of each layout, and some dimensions as curves",
        "model.d_model=20 model.num_heads=4 dimensions=[4,5,6,7]",
        "theory:draw_positions",
    ),
    Picture.schedule: Kind(
        "learning rates", "schedules=[512:4000,512:8000,512:4000:cosine]", "theory:draw_schedule"
    ),
    Picture.smoothing: Kind(
        "label smoothing: target, and loss against confidence",
        "label_smoothing=0.4",
        "theory:draw_smoothing",
    ),
    Picture.architecture: Kind(
        "boxes with shapes and numbers of parameters", "model=big", "theory:draw_architecture"
    ),
    Picture.embeddings: Kind(
        "embeddings on two axes, and nearest neighbors",
        "words=[dog,red] model_dir=runs/mine",
        "words:draw_embeddings",
    ),
    Picture.search: Kind(
        "the tree of a beam search, and the likeliest words of each step",
        'src="A dog runs." model_dir=runs/mine',
        "words:draw_search",
    ),
    Picture.run: Kind(
        "loss, perplexity, BLEU, learning rate, gradient norm and speed of runs",
        "run_dir=[runs/a,runs/b]",
        "runs:draw_run",
    ),
    Picture.data: Kind(
        "what nmt-preprocess reports of a data folder",
        "data_dir=data/mine output=data.html",
        "runs:draw_data",
        "run_report:data_page",
    ),
    Picture.report: Kind(
        "a run on one page: settings, curves, scores, best and worst sentences, what was slow",
        "run_dir=runs/mine",
        page="run_report:report_page",
    ),
    Picture.upload: Kind(
        "no picture: sends a run's figures to trackers that lack them",
        "run_dir=runs/mine tracker=[wandb,mlflow]",
    ),
}


def index() -> str:
    """Return the list of what can be drawn, with an example each."""
    lines = [
        f"  what={picture.value}\n      {kind.shows}\n"
        f"      nmt-visualize what={picture.value} {kind.example}"
        for picture, kind in PICTURES.items()
    ]
    return "\n".join(
        [
            "nmt-visualize draws, with what=NAME:\n",
            *lines,
            "\noutput=FILE.png, .svg, .pdf or .html; theme=dark; nmt-visualize --help has the rest",
        ]
    )


def draw(config: VisualizeConfig) -> None:
    """Draw what the settings say, or list what there is, and log the file."""
    if config.what is None:
        print(index())
    elif config.what is Picture.upload:
        _function("runs:upload")(config)
    else:
        log.info("wrote %s", _draw(config, config.what))


def _draw(config: VisualizeConfig, what: Picture) -> Path:
    kind = PICTURES[what]
    suffix = ".html" if kind.page and what is not Picture.data else ".png"
    output = resolve(config.output or f"{what.value}{suffix}")
    is_page = output.suffix == ".html"
    if not (kind.page if is_page else kind.figure):
        form = ".html" if kind.page else ".png, .svg or .pdf"
        raise ConfigError(f"output={config.output}: what={what.value} is written as {form}")
    if is_page:
        text = _function(kind.page)(config)
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(output) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        return output
    _check_matplotlib()
    from nmt.visualize.style import Style, save

    style = Style(config.theme)
    with style.settings():
        save(_function(kind.figure)(config, style), output)
    return output


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise NmtError("pictures need matplotlib; install it with: pip install nmt[visualize]")


def _function(name: str) -> Callable[..., Any]:
    """Import a function of this package when it is needed: some need torch, some matplotlib."""
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"nmt.visualize.{module}"), function
    )
    return found
