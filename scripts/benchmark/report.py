"""From turns to figures: medians, spreads, ratios to the best peer, a table and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass
class Section:
    """One comparison: the same work, done in turns within one run."""

    title: str
    setting: str  # what the work was, in a line
    unit: str  # of the main figure
    rates: dict[str, list[float]]  # by engine, one a turn
    columns: dict[str, dict[str, str]]  # by heading, then by engine
    bars: dict[str, list[str]]  # engines whose best is 1 in a column of ratios, by its heading
    reasons: dict[str, str] = field(default_factory=dict)  # why an engine has no figures
    raw: Record = field(default_factory=dict)
    lower_is_better: bool = False

    def best(self, names: list[str]) -> float | None:
        """Return the best median of the engines named; None when none of them has figures."""
        known = [statistics.median(self.rates[n]) for n in names if self.rates.get(n)]
        return min(known, default=None) if self.lower_is_better else max(known, default=None)

    def rows(self) -> list[list[str]]:
        """Return the table, with its head, the best engine first."""
        bars = {f"x {name}": self.best(names) for name, names in self.bars.items()}
        known_bars = {heading: bar for heading, bar in bars.items() if bar is not None}
        head = ["engine", self.unit, "range", *known_bars, *self.columns]
        measured = {name: rates for name, rates in self.rates.items() if rates}
        order = sorted(measured, key=lambda name: statistics.median(measured[name]))
        if not self.lower_is_better:
            order.reverse()
        return [head, *(self._row(n, measured[n], list(known_bars.values())) for n in order)]

    def _row(self, name: str, rates: list[float], bars: list[float]) -> list[str]:
        median = statistics.median(rates)
        spread = f"{number(min(rates))} to {number(max(rates))}"
        others = [values.get(name, "") for values in self.columns.values()]
        return [name, number(median), spread, *(f"{median / bar:.2f}" for bar in bars), *others]

    def content(self) -> Record:
        """Return all that was measured, for JSON."""
        rates = {name: values for name, values in self.rates.items() if values}
        return {
            "title": self.title,
            "setting": self.setting,
            "unit": self.unit,
            "median": {name: statistics.median(values) for name, values in rates.items()},
            "bars": {name: self.best(names) for name, names in self.bars.items()},
            "columns": self.columns,
            "failed": self.reasons,
            **self.raw,
        }


def number(value: float) -> str:
    """Write a figure with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def median_of(
    turns: dict[str, list[Record]], figure: Callable[[Record], float]
) -> dict[str, float]:
    """Return by engine the median of a figure of its turns, for those that had any."""
    return {n: statistics.median(map(figure, some)) for n, some in turns.items() if some}


def table(rows: list[list[str]]) -> str:
    """Lay out rows as a Markdown table."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(title: str, facts: dict[str, str], sections: list[Section]) -> str:
    """Return the report as Markdown."""
    parts = [f"# {title}", table([["", ""], *([k, v] for k, v in facts.items())])]
    for section in sections:
        parts += [f"## {section.title}", section.setting, table(section.rows())]
        if section.reasons:
            lines = [f"- {name}: {reason}" for name, reason in section.reasons.items()]
            parts.append("Without figures:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, name: str, facts: dict[str, str], sections: list[Section]) -> list[Path]:
    """Write `name`.md and `name`.json; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown("Speed beside other toolkits", facts, sections)
    content = {"facts": facts, "sections": [section.content() for section in sections]}
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(text, encoding="utf-8")
    paths[1].write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths
