"""The page docs/benchmarks/gpu.md of a run of scripts/gpu.py: its text, and tables of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Figures = dict[str, Any]

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks" / "gpu.md"
HEADING = "## Results\n"
PEAK_FLOPS = {"H200": 989.4e12, "H100 80GB HBM3": 989.4e12, "A100": 312e12}  # bfloat16, dense
TRAINING_PARTS = ("base_compiled", "base_plain", "big_compiled", "big_plain")
SPEED = "target_tokens_per_second"


def describe(result: Figures) -> str:
    """Return the status of a part, its seconds and the reason of a failure, in one line."""
    return f"{result['status']} ({result['seconds']} s) {result.get('reason', '')}".strip()


def make_page(content: Figures) -> str:
    """Return the page with these results."""
    figures = {}
    for name, result in content["parts"].items():
        if result.get("figures"):
            figures[name] = result["figures"]
    lines = [PAGE.read_text(encoding="utf-8").split(HEADING)[0] + HEADING]
    if content["rehearsal"]:
        lines.append("A rehearsal on a CPU, at a tiny size: these figures mean nothing.\n")
    machine = figures.get("machine", {})
    if machine:
        lines.append(", ".join(f"{key} {value}" for key, value in machine.items()) + ".\n")
    statuses = {name: [describe(result)] for name, result in content["parts"].items()}
    lines += table(["part", "status"], statuses)
    rows = {}
    for name in TRAINING_PARTS:
        if name in figures:
            rows[name] = training_row(figures[name], machine.get("gpu", ""))
    heading = ["training", "target tokens/s", "MFU", "of measured peak", "peak memory"]
    lines += table(heading, rows)
    if "translation" in figures:
        translation = figures["translation"]
        rows = {}
        for name, rate in translation["tokens_per_second"].items():
            rows[name] = [f"{rate:,.0f}", f"{translation['memory_bytes'][name] / 1e9:.2f} GB"]
        lines += table(["translation, beam 4", "tokens/s", "peak memory"], rows)
        lines += [f"- {name}: {reason}" for name, reason in translation["failed"].items()]
    for name in ("precision", "several_devices", "bleu", "tests"):
        rows = {}
        for key, value in figures.get(name, {}).items():
            if not isinstance(value, dict):
                rows[key] = [f"{value:,.5g}"]
        lines += table([name, "figure"], rows)
    if not content["rehearsal"]:
        lines += table(["target", "expected", "measured", "reached"], target_rows(figures))
    return "\n".join(lines) + "\n"


def training_row(figures: Figures, gpu: str) -> list[str]:
    """Return the cells of a training run; MFU is relative to the dense bfloat16 peak of `gpu`."""
    mfu = "peak unknown"
    for name, peak in PEAK_FLOPS.items():
        if name in gpu:
            mfu = f"{figures['model_flops_per_second'] / peak:.1%}"
    share = f"{figures['model_flops_utilisation']:.1%}"
    return [f"{figures[SPEED]:,.0f}", mfu, share, f"{figures['memory_bytes'] / 1e9:.2f} GB"]


def target_rows(figures: Figures) -> dict[str, list[str]]:
    """Return each target, its measured value, and whether it is reached."""
    speeds = {name: figures[name][SPEED] for name in TRAINING_PARTS if name in figures}
    rates = figures.get("translation", {}).get("tokens_per_second", {})
    nmt_rate = max_rate(rates, "nmt")
    targets = [
        ("big, target tokens a second", 320_000, max_rate(speeds, "big")),
        ("base, target tokens a second", 800_000, max_rate(speeds, "base")),
        (
            "translation, best of nmt over CTranslate2 float16",
            1.0,
            ratio(nmt_rate, max_rate(rates, "ctranslate2")),
        ),
        (
            "translation, best of nmt over transformers",
            3.0,
            ratio(nmt_rate, max_rate(rates, "transformers")),
        ),
        ("BLEU of the Multi30k recipe", 37.0, figures.get("bleu", {}).get("bfloat16")),
    ]
    rows = {}
    for name, target, measured in targets:
        if measured is None:
            rows[name] = [f"{target:,g}", "not measured", ""]
        else:
            is_reached = "yes" if measured >= target else "no"
            rows[name] = [f"{target:,g}", f"{measured:,.4g}", is_reached]
    return rows


def max_rate(rates: dict[str, float], prefix: str) -> float | None:
    """Return the highest rate among names with a prefix, None without one."""
    return max((rate for name, rate in rates.items() if name.startswith(prefix)), default=None)


def ratio(rate: float | None, reference_rate: float | None) -> float | None:
    """Divide two rates, if both were measured."""
    return None if rate is None or reference_rate is None else rate / reference_rate


def table(heading: list[str], rows: dict[str, list[str]]) -> list[str]:
    """Return the lines of a Markdown table, none without rows."""
    if not rows:
        return []
    lines = []
    for cells in [heading, ["---"] * len(heading), *([name, *row] for name, row in rows.items())]:
        lines.append(f"| {' | '.join(cells)} |".replace("\n", " "))
    return [*lines, ""]
