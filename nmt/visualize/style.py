"""How pictures look: colors that color-blind people can tell apart, light and dark, and a font for
each character.
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
_COLORS = {  # of Okabe and Ito (2008), lighter ones on dark
    Theme.light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07800", "#3A8FC4", "#5b6572"],
    Theme.dark: ["#56B4E9", "#FF8C42", "#2CC79F", "#E59CC4", "#F0C941", "#9AD0F5", "#9aa5b1"],
}
_PAPER = {
    Theme.light: ("#ffffff", "#1b1f24", "#c9d0d8"),
    Theme.dark: ("#1d2228", "#e6e9ed", "#3a434d"),
}
_DPI = 100


class Style:
    """Colors and fonts of one picture; it is in force inside `with style.settings():`."""

    def __init__(self, theme: Theme) -> None:
        self.colors = _COLORS[theme]
        self.paper, self.ink, self.line = _PAPER[theme]
        self.quiet = self.colors[-1]
        self.fonts = [_FIRST_FONT]
        weights = (self.paper, self.colors[0])
        self.weights = LinearSegmentedColormap.from_list("weights", weights)  # 0 to 1
        signs = (self.colors[1], self.paper, self.colors[0])
        self.signs = LinearSegmentedColormap.from_list("signs", signs)  # -1 to 1

    def settings(self) -> Any:
        """Return a context in which matplotlib draws in this style."""
        return matplotlib.rc_context(
            {
                "figure.facecolor": self.paper,
                "axes.facecolor": self.paper,
                "savefig.facecolor": self.paper,
                **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), self.ink),
                **dict.fromkeys(("xtick.color", "ytick.color"), self.ink),
                **dict.fromkeys(("axes.edgecolor", "grid.color", "legend.edgecolor"), self.line),
                "axes.prop_cycle": cycler(color=self.colors),
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid.axis": "y",
                "axes.axisbelow": True,
                "font.family": self.fonts,
                "font.size": 10,
                "axes.titlesize": 11,
                "legend.frameon": False,
                "text.parse_math": False,  # a $ is a $
                "svg.hashsalt": "nmt",  # the same picture is the same file
            }
        )

    def figure(self, width: float, height: float) -> Figure:
        """Return an empty figure, in inches."""
        return Figure(figsize=(width, height), layout="constrained")

    def find_fonts(self, texts: Iterable[str]) -> dict[int, str]:
        """Add installed fonts until every character of `texts` has one; return codes such as U+4E2D
        for those that have none, for `str.translate`.
        """
        wanted = {ord(c) for text in texts for c in text if c.isprintable()}
        installed = sorted(font_manager.fontManager.ttflist, key=lambda entry: entry.name)
        files = {
            entry.name: entry.fname
            for entry in installed
            if entry.weight == 400 and entry.style == "normal"
        }
        for name in [*self.fonts, *files]:
            if wanted and name in files:
                covered = wanted & set(font_manager.get_font(files[name]).get_charmap())
                wanted -= covered
                if covered and name not in self.fonts:
                    self.fonts.append(name)
        if wanted:
            first = chr(min(wanted))
            log.warning(
                "no installed font has %s (%s) and %d other characters, which are shown as codes; "
                "install one, such as Debian's fonts-noto-core and fonts-noto-cjk",
                f"U+{ord(first):04X}",
                unicodedata.name(first, "no name").lower(),
                len(wanted) - 1,
            )
        return {code: f"U+{code:04X}" for code in wanted}

    def heat(
        self, axes: Axes, values: Any, *, rows: list[str] | None = None,
        columns: list[str] | None = None, hidden: Any = None,
    ) -> Any:  # fmt: skip
        """Draw weights from 0 to 1, or values of both signs; gray out what is `hidden`."""
        values = np.asarray(values, dtype=float)
        signed = bool((values < 0).any())
        image = axes.imshow(
            values,
            cmap=self.signs if signed else self.weights,
            vmin=-1 if signed else 0,
            vmax=1,
            aspect="auto" if rows is None else "equal",
            interpolation="nearest",
        )
        if hidden is not None:
            color = LinearSegmentedColormap.from_list("hidden", [self.line, self.line])
            places = np.ma.masked_where(~np.asarray(hidden), np.ones(values.shape))
            axes.imshow(places, cmap=color, aspect=image.axes.get_aspect())
        for axis, names in ((axes.yaxis, rows), (axes.xaxis, columns)):
            if names is not None:
                axis.set_ticks(range(len(names)), names)
        if columns is not None:
            axes.tick_params(axis="x", labelrotation=90 if max(map(len, columns)) > 2 else 0)
        axes.tick_params(length=0)
        return image


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the suffix of `path` says: .png, .svg or .pdf."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"output={path}: a picture is a .png, .svg or .pdf file")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with replace_file(path) as temporary:
        form = path.suffix[1:]
        figure.savefig(temporary, dpi=_DPI, format=form, metadata=metadata[path.suffix])
