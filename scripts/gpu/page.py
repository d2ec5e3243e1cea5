"""The page docs/benchmarks/gpu.md of a run of scripts/gpu.py: its text, and tables of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "benchmarks" / "gpu.md"
HEADING = "## Results\n"
PEAK_FLOPS = {"H200": 989.4e12, "H100 80GB HBM3": 989.4e12, "A100": 312e12}  # bfloat16, dense
NOTHING: dict[str, Any] = {}
TRAININGS = ("base_compiled", "base_plain", "big_compiled", "big_plain")
# by the names of targets: where the figure stands, what it is compared with, and the least of it
SPEED = "target_tokens_per_second"
TARGETS: dict[str, tuple[float, Callable[[dict[str, Any]], float]]] = {
    "big, target tokens a second": (320_000, lambda f: fastest(f, "big")),
    "base, target tokens a second": (800_000, lambda f: fastest(f, "base")),
    "translation, best of ours over CTranslate2 float16": (1.0, lambda f: ratio(f, "ctranslate2")),
    "translation, best of ours over transformers": (3.0, lambda f: ratio(f, "transformers")),
    "BLEU of the Multi30k recipe": (37.0, lambda f: float(f["bleu"]["bfloat16"])),
}


def fastest(figures: dict[str, Any], model: str) -> float:
    """Return target tokens a second, compiled or not."""
    found = [figures[name][SPEED] for name in TRAININGS if name in figures and model in name]
    return max(found)  # a ValueError where there is none


def ratio(figures: dict[str, Any], other: str) -> float:
    """Return how many times as fast as another engine translation is."""
    rates: dict[str, float] = figures["translation"]["tokens_per_second"]
    ours = max(rate for name, rate in rates.items() if name.startswith("nmt"))
    return ours / max(rate for name, rate in rates.items() if name.startswith(other))


def describe(result: dict[str, Any]) -> str:
    """Return what became of a part, in one line."""
    return f"{result['status']} ({result['seconds']} s) {result.get('reason', '')}".strip()


def page(content: dict[str, Any]) -> str:
    """Return the page with these results."""
    figures = {
        name: part["figures"] for name, part in content["parts"].items() if part.get("figures")
    }
    lines = [PAGE.read_text(encoding="utf-8").split(HEADING)[0] + HEADING]
    if content["rehearsal"]:
        lines.append("A rehearsal on a processor, at a tiny size: these figures mean nothing.\n")
    if "machine" in figures:
        named = (f"{key} {value}" for key, value in figures["machine"].items())
        lines.append(", ".join(named) + ".\n")
    parts = {name: [describe(part)] for name, part in content["parts"].items()}
    lines += table(["part", "what became of it"], parts)
    head = ["training", "target tokens/s", "MFU", "of measured peak", "peak memory"]
    gpu = figures.get("machine", NOTHING).get("gpu", "")
    lines += table(head, {n: training_row(figures[n], gpu) for n in TRAININGS if n in figures})
    if (found := figures.get("translation")) is not None:
        rows = {
            name: [f"{rate:,.0f}", f"{found['memory_bytes'][name] / 1e9:.2f} GB"]
            for name, rate in found["tokens_per_second"].items()
        }
        lines += table(["translation, beam 4", "tokens/s", "peak memory"], rows)
        lines += [f"- {name}: {reason}" for name, reason in found["failed"].items()]
    for name in ("precision", "several_devices", "bleu", "tests"):
        shown = {k: v for k, v in figures.get(name, NOTHING).items() if not isinstance(v, dict)}
        lines += table([name, "figure"], {key: [f"{value:,.5g}"] for key, value in shown.items()})
    if not content["rehearsal"]:
        lines += table(["target", "wanted", "found", "met"], targets(figures))
    return "\n".join(lines) + "\n"


def training_row(figures: dict[str, float], gpu: str) -> list[str]:
    """Return the cells of a training run; MFU is that of the format's dense peak on `gpu`."""
    peak = next((rate for name, rate in PEAK_FLOPS.items() if name in gpu), None)
    mfu = f"{figures['model_flops_per_second'] / peak:.1%}" if peak else "peak unknown"
    share, memory = figures["model_flops_utilisation"], figures["memory_bytes"]
    return [f"{figures[SPEED]:,.0f}", mfu, f"{share:.1%}", f"{memory / 1e9:.2f} GB"]


def targets(figures: dict[str, Any]) -> dict[str, list[str]]:
    """Return what was wanted, what was found, and whether that is as much."""
    rows = {}
    for name, (wanted, find) in TARGETS.items():
        try:
            found = find(figures)
        except (KeyError, ValueError):
            rows[name] = [f"{wanted:,g}", "not measured", ""]
        else:
            rows[name] = [f"{wanted:,g}", f"{found:,.4g}", "yes" if found >= wanted else "no"]
    return rows


def table(head: list[str], rows: dict[str, list[str]]) -> list[str]:
    """Return the lines of a Markdown table, none without rows."""
    if not rows:
        return []
    cells = [head, ["---"] * len(head), *([name, *row] for name, row in rows.items())]
    return [f"| {' | '.join(row).replace(chr(10), ' ')} |" for row in cells] + [""]
