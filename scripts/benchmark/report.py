"""Figures of a benchmark: medians, ranges and ratios to the best peer, as Markdown and JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from nmt import __version__

Record = dict[str, Any]
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "amx_bf16")


@dataclass
class Section:
    """One comparison: the same work for all engines, alternating within one run."""

    title: str
    setting: str  # the work, in one line
    unit: str  # of the rates
    rates: dict[str, list[float]]  # by engine, one for each turn
    columns: dict[str, dict[str, str]]  # further columns: heading, engine, cell
    baselines: dict[str, list[str]]  # columns of ratios: heading, and engines whose best is 1
    failures: dict[str, str] = field(default_factory=dict)  # why an engine has no figures
    raw: Record = field(default_factory=dict)  # written to the JSON file only
    lower_is_better: bool = False

    def best_median(self, names: list[str]) -> float | None:
        """Return the best median of the named engines, None if they have no figures."""
        medians = [statistics.median(self.rates[name]) for name in names if self.rates.get(name)]
        if self.lower_is_better:
            return min(medians, default=None)
        return max(medians, default=None)

    def rows(self) -> list[list[str]]:
        """Return the table with its heading; the best engine comes first."""
        medians = {name: statistics.median(rates) for name, rates in self.rates.items() if rates}
        baselines = {}
        for heading, names in self.baselines.items():
            best = self.best_median(names)
            if best is not None:
                baselines[f"x {heading}"] = best
        rows = [["engine", self.unit, "range", *baselines, *self.columns]]
        for name in sorted(medians, key=medians.__getitem__, reverse=not self.lower_is_better):
            low, high = min(self.rates[name]), max(self.rates[name])
            row = [name, format_number(medians[name])]
            row.append(f"{format_number(low)} to {format_number(high)}")
            row += [f"{medians[name] / best:.2f}" for best in baselines.values()]
            row += [cells.get(name, "") for cells in self.columns.values()]
            rows.append(row)
        return rows

    def content(self) -> Record:
        """Return everything that was measured, for JSON."""
        rates = {name: values for name, values in self.rates.items() if values}
        return {
            "title": self.title,
            "setting": self.setting,
            "unit": self.unit,
            "median": {name: statistics.median(values) for name, values in rates.items()},
            "baselines": {name: self.best_median(names) for name, names in self.baselines.items()},
            "columns": self.columns,
            "failed": self.failures,
            **self.raw,
        }


def format_number(value: float) -> str:
    """Format a figure with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def medians_by_engine(
    turns: dict[str, list[Record]], figure: Callable[[Record], float]
) -> dict[str, float]:
    """Return the median of a figure over the turns of each engine that has any."""
    medians = {}
    for name, records in turns.items():
        if records:
            medians[name] = statistics.median(figure(record) for record in records)
    return medians


def table(rows: list[list[str]]) -> str:
    """Format rows, of which the first is the heading, as a Markdown table."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(facts: dict[str, str], sections: list[Section]) -> str:
    """Return the report as Markdown."""
    paragraphs = ["# Speed compared with other toolkits"]
    paragraphs.append(table([["", ""], *([name, fact] for name, fact in facts.items())]))
    for section in sections:
        paragraphs += [f"## {section.title}", section.setting, table(section.rows())]
        if section.failures:
            lines = [f"- {name}: {reason}" for name, reason in section.failures.items()]
            paragraphs.append("Without figures:\n\n" + "\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def write(folder: Path, name: str, facts: dict[str, str], sections: list[Section]) -> list[Path]:
    """Write `name`.md and `name`.json; return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"facts": facts, "sections": [section.content() for section in sections]}
    json_text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(markdown(facts, sections), encoding="utf-8")
    paths[1].write_text(json_text, encoding="utf-8")
    return paths


def describe_machine(arguments: list[str], seconds: float) -> dict[str, str]:
    """Return machine, versions and command, by name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "date": date.today().isoformat(),
        "processor": f"{_cpu_name()}, {os.cpu_count()} cores seen, {memory_bytes / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "nmt": f"{__version__} on torch {torch.__version__}",
        "command": "python " + shlex.join(arguments),
        "minutes": f"{seconds / 60:.1f}",
    }
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    """Return the CPU's name with the instruction sets that matter here."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", text)
    if name is None:
        return platform.processor() or platform.machine()
    flags = re.search(r"flags\s*:\s*(.+)", text)
    flag_names = flags[1].split() if flags else []
    features = [feature for feature in _CPU_FEATURES if feature in flag_names]
    return f"{name[1]} ({', '.join(features)})"
