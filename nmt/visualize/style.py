"""The style of pictures: colors that color-blind people can tell apart, on a light or dark
background, and fonts that have every character.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from nmt.config import Theme
from nmt.errors import ConfigError
from nmt.runtime.files import replace_file

log = logging.getLogger(__name__)
_FIRST_FONT = "DejaVu Sans"  # comes with matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew
_COLORS = {  # of Okabe and Ito (2008), lighter on the dark background
    Theme.light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07800", "#3A8FC4", "#5b6572"],
    Theme.dark: ["#56B4E9", "#FF8C42", "#2CC79F", "#E59CC4", "#F0C941", "#9AD0F5", "#9aa5b1"],
}
_BACKGROUNDS = {  # background, text, lines
    Theme.light: ("#ffffff", "#1b1f24", "#c9d0d8"),
    Theme.dark: ("#1d2228", "#e6e9ed", "#3a434d"),
}
_DPI = 100


class Style:
    """Colors and fonts of one picture, which apply inside `with style.settings():`."""

    def __init__(self, theme: Theme) -> None:
        self.colors = _COLORS[theme]
        self.paper, self.ink, self.line = _BACKGROUNDS[theme]
        self.quiet = self.colors[-1]
        self.fonts = [_FIRST_FONT]
        self.weights = LinearSegmentedColormap.from_list(  # for values from 0 to 1
            "weights", [self.paper, self.colors[0]]
        )
        self.signed = LinearSegmentedColormap.from_list(  # for values from -1 to 1
            "signed", [self.colors[1], self.paper, self.colors[0]]
        )

    def settings(self) -> Any:
        """Return a context in which matplotlib draws in this style."""
        return matplotlib.rc_context(
            {
                "figure.facecolor": self.paper,
                "axes.facecolor": self.paper,
                "savefig.facecolor": self.paper,
                "text.color": self.ink,
                "axes.labelcolor": self.ink,
                "axes.titlecolor": self.ink,
                "xtick.color": self.ink,
                "ytick.color": self.ink,
                "axes.edgecolor": self.line,
                "grid.color": self.line,
                "legend.edgecolor": self.line,
                "axes.prop_cycle": cycler(color=self.colors),
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid.axis": "y",
                "axes.axisbelow": True,
                "font.family": self.fonts,
                "font.size": 10,
                "axes.titlesize": 11,
                "legend.frameon": False,
                "text.parse_math": False,  # a dollar sign does not start a formula
                "svg.hashsalt": "nmt",  # makes the files of equal pictures identical
            }
        )

    def figure(self, width: float, height: float) -> Figure:
        """Return an empty figure; width and height are in inches."""
        return Figure(figsize=(width, height), layout="constrained")

    def find_fonts(self, texts: Iterable[str]) -> dict[int, str]:
        """Add installed fonts until every character of `texts` has one.

        Return a table for `str.translate` that replaces characters without a font by codes such as
        U+4E2D; a warning names the first of them.
        """
        missing = {ord(c) for text in texts for c in text if c.isprintable()}
        files = {
            font.name: font.fname
            for font in sorted(font_manager.fontManager.ttflist, key=lambda font: font.name)
            if font.weight == 400 and font.style == "normal"
        }
        for name in [*self.fonts, *files]:
            if missing and name in files:
                covered = missing & set(font_manager.get_font(files[name]).get_charmap())
                missing -= covered
                if covered and name not in self.fonts:
                    self.fonts.append(name)
        if missing:
            first = chr(min(missing))
            log.warning(
                "no installed font has %s (%s) and %d other characters, which are shown as codes; "
                "install one, such as Debian's fonts-noto-core and fonts-noto-cjk",
                f"U+{ord(first):04X}",
                unicodedata.name(first, "no name").lower(),
                len(missing) - 1,
            )
        return {code: f"U+{code:04X}" for code in missing}

    def heat_map(
        self,
        axes: Axes,
        values: Any,
        *,
        rows: list[str] | None = None,
        columns: list[str] | None = None,
        hidden: Any = None,
    ) -> Any:
        """Draw values from 0 to 1, or from -1 to 1, as colors; cells that are `hidden` are gray."""
        values = np.asarray(values, dtype=float)
        is_signed = bool((values < 0).any())
        image = axes.imshow(
            values,
            cmap=self.signed if is_signed else self.weights,
            vmin=-1 if is_signed else 0,
            vmax=1,
            aspect="auto" if rows is None else "equal",
            interpolation="nearest",
        )
        if hidden is not None:
            gray = LinearSegmentedColormap.from_list("hidden", [self.line, self.line])
            cells = np.ma.masked_where(~np.asarray(hidden), np.ones(values.shape))
            axes.imshow(cells, cmap=gray, aspect=axes.get_aspect())
        if rows is not None:
            axes.set_yticks(range(len(rows)), rows)
        if columns is not None:
            axes.set_xticks(range(len(columns)), columns)
            rotation = 90 if max(map(len, columns)) > 2 else 0
            axes.tick_params(axis="x", labelrotation=rotation)
        axes.tick_params(length=0)
        return image


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the suffix of `path`: .png, .svg or .pdf."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"output={path}: a picture is a .png, .svg or .pdf file")
    path.parent.mkdir(parents=True, exist_ok=True)
    # without dates, equal pictures are identical files
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format=path.suffix[1:], metadata=metadata[path.suffix])
