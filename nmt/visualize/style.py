"""The style of figures: colors that color-blind people can tell apart, on a light or dark
background, and fonts for every character of the text.
"""

from __future__ import annotations

import contextlib
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
_DEFAULT_FONT = "DejaVu Sans"  # part of matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew
# Six colors of Okabe and Ito (2008), and a gray; all are lighter for the dark background.
_COLORS = {
    Theme.light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07800", "#3A8FC4", "#5b6572"],
    Theme.dark: ["#56B4E9", "#FF8C42", "#2CC79F", "#E59CC4", "#F0C941", "#9AD0F5", "#9aa5b1"],
}
_BASE_COLORS = {  # background, text, lines
    Theme.light: ("#ffffff", "#1b1f24", "#c9d0d8"),
    Theme.dark: ("#1d2228", "#e6e9ed", "#3a434d"),
}
_NUM_CURVE_COLORS = 6  # all but gray
# formats of solid and dashed curves; when the colors repeat, the next pair is used
_CURVE_FORMATS = (("-", "o--"), ("-.", "s--"), (":", "^--"))
_DPI = 100


class Style:
    """Colors and fonts of one figure, which apply inside `with style.applied():`."""

    def __init__(self, theme: Theme) -> None:
        self.colors = _COLORS[theme]
        self.background, self.text_color, self.line_color = _BASE_COLORS[theme]
        self.muted_color = self.colors[-1]
        self.fonts = [_DEFAULT_FONT]
        self.unsigned_colormap = LinearSegmentedColormap.from_list(  # maps values from 0 to 1
            "unsigned", [self.background, self.colors[0]]
        )
        self.signed_colormap = LinearSegmentedColormap.from_list(  # maps values from -1 to 1
            "signed", [self.colors[1], self.background, self.colors[0]]
        )

    def curve_color(self, index: int) -> str:
        """Return the color of the curve or run number `index`. Colors repeat after the last one."""
        return self.colors[index % _NUM_CURVE_COLORS]

    def curve_format(self, index: int, *, is_dashed: bool) -> str:
        """Return marker and line of the curve or run number `index`, in the notation of matplotlib.

        When the colors repeat, marker and line change.
        """
        num_repetitions = index // _NUM_CURVE_COLORS
        solid, dashed = _CURVE_FORMATS[num_repetitions % len(_CURVE_FORMATS)]
        return dashed if is_dashed else solid

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside which matplotlib draws in this style."""
        return matplotlib.rc_context(
            {
                "figure.facecolor": self.background,
                "axes.facecolor": self.background,
                "savefig.facecolor": self.background,
                "text.color": self.text_color,
                "axes.labelcolor": self.text_color,
                "axes.titlecolor": self.text_color,
                "xtick.color": self.text_color,
                "ytick.color": self.text_color,
                "axes.edgecolor": self.line_color,
                "grid.color": self.line_color,
                "legend.edgecolor": self.line_color,
                "axes.prop_cycle": cycler(color=self.colors),
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid.axis": "y",
                "axes.axisbelow": True,
                "font.family": self.fonts,
                "font.size": 10,
                "axes.titlesize": 11,
                "legend.frameon": False,
                "text.parse_math": False,  # a dollar sign is text
                "svg.hashsalt": "nmt",  # equal figures become identical files
            }
        )

    def figure(self, width: float, height: float) -> Figure:
        """Return an empty figure of `width` by `height` inches."""
        return Figure(figsize=(width, height), layout="constrained")

    def add_fonts_for(self, texts: Iterable[str]) -> dict[int, str]:
        """Add installed fonts to the style until they cover every character of `texts`.

        Returns a table for `str.translate`, which replaces the characters that no font has with
        codes such as U+4E2D. Logs a warning about these characters.
        """
        uncovered = {ord(character) for character in "".join(texts) if character.isprintable()}
        font_files = {}
        for font in sorted(font_manager.fontManager.ttflist, key=lambda font: font.name):
            if font.weight == 400 and font.style == "normal":  # neither bold nor italic
                font_files[font.name] = font.fname
        names = [name for name in self.fonts if name in font_files]
        names += [name for name in font_files if name not in self.fonts]
        for name in names:
            if not uncovered:
                break
            charmap = font_manager.get_font(font_files[name]).get_charmap()
            covered = uncovered & set(charmap)
            uncovered -= covered
            if covered and name not in self.fonts:
                self.fonts.append(name)
        if uncovered:
            first_code = min(uncovered)
            log.warning(
                "no installed font has %s (%s) and %d other characters, which are shown as codes; "
                "install one, such as Debian's fonts-noto-core and fonts-noto-cjk",
                f"U+{first_code:04X}",
                unicodedata.name(chr(first_code), "no name").lower(),
                len(uncovered) - 1,
            )
        return {code: f"U+{code:04X}" for code in uncovered}

    def heat_map(
        self,
        axes: Axes,
        values: Any,
        *,
        is_signed: bool = False,
        row_labels: list[str] | None = None,
        column_labels: list[str] | None = None,
        gray_mask: Any = None,
    ) -> Any:
        """Draw a matrix as colors: values from 0 to 1, or from -1 to 1 if `is_signed`.

        Without labels, the numbers of the rows or columns are shown. An empty list removes the
        ticks. Cells become gray where `gray_mask` is True.
        """
        values = np.asarray(values, dtype=float)
        colormap = self.unsigned_colormap
        lowest = 0
        if is_signed:
            colormap = self.signed_colormap
            lowest = -1
        # square cells, except in a matrix without labels, which may have hundreds of rows
        aspect: Any = "auto" if row_labels is None else "equal"
        image = axes.imshow(
            values, cmap=colormap, vmin=lowest, vmax=1, aspect=aspect, interpolation="nearest"
        )
        if gray_mask is not None:
            gray = LinearSegmentedColormap.from_list("gray", [self.line_color, self.line_color])
            is_colored = ~np.asarray(gray_mask)
            gray_cells = np.ma.masked_where(is_colored, np.ones(values.shape))
            axes.imshow(gray_cells, cmap=gray, aspect=axes.get_aspect())
        if row_labels is not None:
            axes.set_yticks(range(len(row_labels)), row_labels)
        if column_labels is not None:
            axes.set_xticks(range(len(column_labels)), column_labels)
            if any(len(label) > 2 for label in column_labels):
                axes.tick_params(axis="x", labelrotation=90)
        axes.tick_params(length=0)
        return image

    def write_numbers(
        self, axes: Axes, numbers: Any, values: Any | None = None, *, number_format: str = "{:.2f}"
    ) -> None:
        """Write `numbers` into the cells of a heat map.

        `values` are the values that the heat map shows as colors, by default the same numbers.
        """
        numbers = np.asarray(numbers, dtype=float)
        values = numbers if values is None else np.asarray(values, dtype=float)
        for row, column in np.ndindex(*numbers.shape):
            text = axes.text(column, row, number_format.format(numbers[row, column]), fontsize=8.5)
            text.set(ha="center", va="center")
            if abs(values[row, column]) > 0.5:  # the text would be hard to read on a strong color
                text.set_color(self.background)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as .png, .svg or .pdf, chosen by the suffix of `path`."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"output={path}: a picture is a .png, .svg or .pdf file")
    path.parent.mkdir(parents=True, exist_ok=True)
    # leave out dates and versions, so that equal figures become identical files
    metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with replace_file(path) as temporary:
        figure.savefig(temporary, dpi=_DPI, format=path.suffix[1:], metadata=metadata[path.suffix])
