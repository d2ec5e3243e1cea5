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
    """A description of a picture, example settings, and the functions that draw it.

    Functions are written as "module:function", and imported only when needed.
    """

    description: str
    example: str
    figure_function: str = ""  # function(config, style) that returns a figure of matplotlib
    page_function: str = ""  # function(config) that returns an HTML page
    svg_function: str = ""  # function(config) that returns an animated SVG
    task_function: str = ""  # function(config) of a task without a picture
    default_suffix: str = ".png"  # suffix of the file, unless `output` is set


PICTURES = {
    Picture.attention: PictureInfo(
        "attention of every layer and head: an interactive page, or a figure",
        'src="A dog runs." model_dir=runs/mine',
        figure_function="attention_figure:draw_attention",
        page_function="attention_page:attention_page",
        default_suffix=".html",
    ),
    Picture.mask: PictureInfo(
        "causal and padding mask",
        "length=20",
        figure_function="theory:draw_mask",
    ),
    Picture.positions: PictureInfo(
        "positional encodings of each layout, and some dimensions as curves",
        "model.d_model=20 model.num_heads=4 dimensions=[4,5,6,7]",
        figure_function="theory:draw_positions",
    ),
    Picture.schedule: PictureInfo(
        "learning rates",
        "schedules=[512:4000,512:8000,512:4000:cosine]",  # d_model:warmup_steps[:schedule]
        figure_function="theory:draw_schedule",
    ),
    Picture.smoothing: PictureInfo(
        "label smoothing: target probabilities, and the loss for each probability of a model",
        "label_smoothing=0.4",
        figure_function="theory:draw_smoothing",
    ),
    Picture.architecture: PictureInfo(
        "boxes with shapes and numbers of parameters",
        "model=big",
        figure_function="architecture:draw_architecture",
    ),
    Picture.steps: PictureInfo(
        "self-attention of one word, step by step from its embedding to the output vector",
        'src="A dog runs." words=[dog] layers=[1] heads=[2] model_dir=runs/mine',
        figure_function="attention_steps:draw_steps",
        page_function="steps_page:steps_page",
    ),
    Picture.multi_head: PictureInfo(
        "scaled dot-product and multi-head attention as boxes, figure 2 of the paper",
        "model=big",
        figure_function="multi_head:draw_multi_head",
    ),
    Picture.decoding: PictureInfo(
        "a search step by step: attention and the tree of the beam, as a page or a moving .svg",
        'src="A dog runs." model_dir=runs/mine',
        page_function="decoding:decoding_page",
        svg_function="decoding:decoding_svg",
        default_suffix=".html",
    ),
    Picture.probabilities: PictureInfo(
        "probabilities of the next token: the targets of training, and before and after training",
        'src="A dog runs." model_dir=runs/mine',
        figure_function="targets:draw_probabilities",
    ),
    Picture.vocabulary: PictureInfo(
        "pieces with their indices and one-hot vectors",
        "words=[dog,runs] model_dir=runs/mine",
        figure_function="targets:draw_vocabulary",
    ),
    Picture.embeddings: PictureInfo(
        "embeddings on two axes, and nearest neighbors",
        "words=[dog,red] model_dir=runs/mine",
        figure_function="embeddings:draw_embeddings",
    ),
    Picture.search: PictureInfo(
        "the tree of a beam search, and the likeliest words of each step",
        'src="A dog runs." model_dir=runs/mine',
        figure_function="search_tree:draw_search",
    ),
    Picture.run: PictureInfo(
        "loss, perplexity, BLEU, learning rate, gradient norm and speed of runs",
        "run_dir=[runs/a,runs/b]",
        figure_function="runs:draw_run",
    ),
    Picture.data: PictureInfo(
        "the report of nmt-preprocess about a data folder",
        "data_dir=data/mine output=data.html",
        figure_function="runs:draw_data",
        page_function="run_report:data_page",
    ),
    Picture.report: PictureInfo(
        "a run on one page: settings, curves, scores, best and worst sentences, speed",
        "run_dir=runs/mine",
        page_function="run_report:report_page",
        default_suffix=".html",
    ),
    Picture.pieces: PictureInfo(
        "no picture: prints the pieces of sentences, with their ids",
        'src="A dog runs." model_dir=data/mine',
        task_function="pieces:print_pieces",
    ),
    Picture.upload: PictureInfo(
        "no picture: sends a run's metrics to trackers that lack them",
        "run_dir=runs/mine tracker=[wandb,mlflow]",
        task_function="runs:upload",
    ),
}


def list_pictures() -> str:
    """Return a text that lists all pictures, each with a description and an example."""
    lines = ["nmt-visualize what=NAME draws one of these pictures:\n"]
    for picture, info in PICTURES.items():
        lines.append(f"  what={picture.value}\n      {info.description}")
        lines.append(f"      nmt-visualize what={picture.value} {info.example}")
    lines.append(
        "\noutput=FILE chooses the file and, by its suffix, the format: .png, .svg, .pdf or .html\n"
        "theme=dark draws on a dark background; nmt-visualize --help lists all settings"
    )
    return "\n".join(lines)


def draw(config: VisualizeConfig) -> None:
    """Draw the picture that the setting `what` names, print pieces, or upload a run.

    Logs the path of the picture. If `what` is not set, prints a list of all pictures.
    """
    if config.what is None:
        print(list_pictures())
    elif PICTURES[config.what].task_function:
        run_task = _import_function(PICTURES[config.what].task_function)
        run_task(config)
    else:
        path = _write_picture(config, config.what)
        log.info("wrote %s", path)


def _write_picture(config: VisualizeConfig, picture: Picture) -> Path:
    """Write a picture and return its path. The suffix chooses a page or a figure."""
    info = PICTURES[picture]
    output = resolve_path(config.output or f"{picture.value}{info.default_suffix}")
    text_function = ""
    if output.suffix == ".html":
        text_function = info.page_function
    elif output.suffix == ".svg":
        text_function = info.svg_function
    if text_function:
        make_text = _import_function(text_function)
        _write_text(output, make_text(config))
    elif output.suffix != ".html" and info.figure_function:
        _write_figure(config, info, output)
    else:
        raise ConfigError(
            f"output={config.output}: what={picture.value} is written as {_suffixes(info)}"
        )
    return output


def _suffixes(info: PictureInfo) -> str:
    """Return the suffixes of the files that a picture can be written as, for a message."""
    suffixes = []
    if info.figure_function:
        suffixes += [".png", ".svg", ".pdf"]
    if info.svg_function:
        suffixes.append(".svg")
    if info.page_function:
        suffixes.append(".html")
    if len(suffixes) == 1:
        return suffixes[0]
    return f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"


def _write_text(output: Path, text: str) -> None:
    """Write a page or a drawing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def _write_figure(config: VisualizeConfig, info: PictureInfo, output: Path) -> None:
    """Draw a picture with matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NmtError("pictures need matplotlib; install it with: pip install nmt[visualize]")
    from nmt.visualize.style import Style, save

    style = Style(config.theme)
    with style.applied():
        draw_figure = _import_function(info.figure_function)
        save(draw_figure(config, style), output)


def _import_function(name: str) -> Callable[..., Any]:
    """Import the function "module:function" of this package.

    A module may need torch or matplotlib, so only the module that draws the picture is imported.
    """
    module_name, function_name = name.split(":")
    module = importlib.import_module(f"nmt.visualize.{module_name}")
    function: Callable[..., Any] = getattr(module, function_name)
    return function
