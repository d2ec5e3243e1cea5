"""The report of a benchmark: medians, ranges and ratios to other engines, as Markdown and JSON."""

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
    """The results of one comparison, in which all engines did the same work in turn."""

    title: str
    setting: str  # the work, in one line
    unit: str  # of the rates
    rates: dict[str, list[float]]  # by engine, one for each turn
    columns: dict[str, dict[str, str]]  # further columns: by heading, a cell for each engine
    baselines: dict[str, list[str]]  # columns of ratios: by heading, engines whose best is 1
    failures: dict[str, str] = field(default_factory=dict)  # by engine, why it has no figures
    raw: Record = field(default_factory=dict)  # written to the JSON file only
    lower_is_better: bool = False

    @property
    def medians(self) -> dict[str, float]:
        """The median rate of each engine that has any."""
        return {name: statistics.median(rates) for name, rates in self.rates.items() if rates}

    @property
    def baseline_rates(self) -> dict[str, float | None]:
        """The best median of each baseline by its heading, None if no engine has figures."""
        choose_best = min if self.lower_is_better else max
        medians = self.medians
        rates: dict[str, float | None] = {}
        for heading, names in self.baselines.items():
            baseline_medians = [medians[name] for name in names if name in medians]
            rates[heading] = choose_best(baseline_medians, default=None)
        return rates

    def rows(self) -> list[list[str]]:
        """Return the rows of the table: the heading, then the engines, the best first."""
        medians = self.medians
        baselines = {}
        for heading, rate in self.baseline_rates.items():
            if rate is not None:
                baselines[f"x {heading}"] = rate
        rows = [["engine", self.unit, "range", *baselines, *self.columns]]
        for name in sorted(medians, key=medians.__getitem__, reverse=not self.lower_is_better):
            lowest = format_number(min(self.rates[name]))
            highest = format_number(max(self.rates[name]))
            row = [name, format_number(medians[name]), f"{lowest} to {highest}"]
            for baseline_rate in baselines.values():
                row.append(f"{medians[name] / baseline_rate:.2f}")
            for cells in self.columns.values():
                row.append(cells.get(name, ""))
            rows.append(row)
        return rows

    def content(self) -> Record:
        """Return all figures, for JSON."""
        return {
            "title": self.title,
            "setting": self.setting,
            "unit": self.unit,
            "median": self.medians,
            "baselines": self.baseline_rates,
            "columns": self.columns,
            "failed": self.failures,
            **self.raw,
        }


def format_number(value: float) -> str:
    """Format a number with at least three significant digits."""
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
    """Format rows as a Markdown table; the first row is the heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(facts: dict[str, str], sections: list[Section]) -> str:
    """Return the report as Markdown."""
    fact_rows = [["", ""]] + [[name, fact] for name, fact in facts.items()]
    paragraphs = ["# Speed compared with other toolkits", table(fact_rows)]
    for section in sections:
        paragraphs += [f"## {section.title}", section.setting, table(section.rows())]
        if section.failures:
            failures = [f"- {name}: {reason}" for name, reason in section.failures.items()]
            paragraphs.append("Without figures:\n\n" + "\n".join(failures))
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
    """Return the machine, versions, command and duration, by name."""
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
    """Return the name of the CPU, with its instruction sets for matrix multiplication."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    name = re.search(r"model name\s*:\s*(.+)", text)
    if name is None:
        return platform.processor() or platform.machine()
    flags = re.search(r"flags\s*:\s*(.+)", text)
    features = [feature for feature in _CPU_FEATURES if flags and feature in flags[1].split()]
    return f"{name[1]} ({', '.join(features)})"
