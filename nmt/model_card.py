"""Write the card of a model: README.md with the metadata that the Hugging Face Hub reads.

The facts come from the run that made the model and from the data folder of the run. A fact that
they do not state is called unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nmt.checkpoint import ModelInfo, checkpoint_dir
from nmt.config import resolve_path
from nmt.data.binary import read_meta
from nmt.errors import ModelError, NmtError
from nmt.evaluate import bleu_metric, tokenizer_for
from nmt.runtime.manifest import read_config
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import read_metrics_log

CARD = "README.md"
SCORES = "scores.json"
"""The output of `nmt-evaluate format=json`, if the user puts it into the model folder."""
UNKNOWN = "unknown"
_LANGUAGE = re.compile("[a-z]{2,3}(?![a-z])")  # a code of ISO 639, without script and territory


@dataclass
class Origin:
    """Facts about the run that made a model and about its data; empty fields are unknown."""

    records: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl
    settings: dict[str, Any] = field(default_factory=dict)  # config.yaml of the run
    report: dict[str, Any] = field(default_factory=dict)  # report.json of the data folder
    weights: dict[str, float] = field(default_factory=dict)  # by training corpus

    @classmethod
    def find(cls, folder: Path, info: ModelInfo) -> Origin:
        """Read the run that the model folder `folder` is part of, and its data folder."""
        origin = cls()
        for run_dir in (folder.parent, folder.parent.parent):
            try:
                origin.settings = read_config(run_dir)
                records = read_metrics_log(run_dir / "metrics.jsonl")
                origin.records = [r for r in records if r["update"] <= info.updates]
                data_dir = resolve_path(str(origin.settings["data_dir"]))
                meta = read_meta(data_dir)
                if meta.tokenizer_sha256 == info.tokenizer_sha256:
                    origin.report = read_json(data_dir / "report.json")
                    origin.weights = {c.corpus: c.weight for c in meta.splits["train"]}
            except (OSError, KeyError, NmtError):  # the rest of the facts is unknown
                continue
        return origin


def render_card(
    folder: Path, info: ModelInfo, body: str, *, library: str = "nmt", tags: tuple[str, ...] = ()
) -> str:
    """Return the card of the model in `folder`.

    `body` is Markdown that begins with the title. The card has the metadata before it, and sections
    about data and training after it.
    """
    folder = folder.resolve()  # `latest` is a link
    origin = Origin.find(folder, info)
    languages = [_LANGUAGE.match(language.lower()) for language in (info.src_lang, info.tgt_lang)]
    metadata: dict[str, Any] = {  # "und" is the code of an undetermined language
        "language": [match[0] if match else "und" for match in languages],
        "license": origin.report.get("license", UNKNOWN),
        "library_name": library,
        "pipeline_tag": "translation",
        "tags": ["translation", "transformer", "nmt", *tags],
    }
    results = _list_results(folder, info, origin)
    if results:
        name = f"{info.src_lang}-{info.tgt_lang}"
        metadata["metrics"] = sorted({result["metrics"][0]["type"] for result in results})
        metadata["model-index"] = [{"name": name, "results": results}]
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    sections = [body.strip("\n"), _describe_data(origin), _describe_training(info, origin)]
    return f"---\n{front_matter}---\n" + "\n\n".join(sections) + "\n"


def _list_results(folder: Path, info: ModelInfo, origin: Origin) -> list[dict[str, Any]]:
    """Return the entries of `model-index`: BLEU of the checkpoint in validation, and `SCORES`."""
    results = []
    path = folder / SCORES
    try:
        for score in read_json(path)["scores"] if path.exists() else []:
            results.append(_make_result("test", score["name"], score["value"], score["signature"]))
    except (KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: write it with nmt-evaluate format=json, or remove it") from None
    update = max((record["update"] for record in origin.records), default=None)
    is_checkpoint = update is not None and folder.name == checkpoint_dir(folder, update).name
    for record in origin.records if is_checkpoint else []:
        if record["update"] == update and "valid_bleu" in record:
            metric = bleu_metric(tokenizer_for(info.tgt_lang))
            metric.corpus_score(["a"], [["a"]])  # the signature needs the number of references
            signature = str(metric.get_signature())
            results.append(_make_result("validation", "BLEU", record["valid_bleu"], signature))
    return results


def _make_result(split: str, name: str, value: float, signature: str) -> dict[str, Any]:
    """Return an entry of `model-index` with one metric."""
    metric = {"type": name.lower(), "name": name, "value": value, "args": {"signature": signature}}
    return {
        "task": {"type": "translation"},
        "dataset": {"type": split, "name": f"{split} set"},
        "metrics": [metric],
    }


def _describe_data(origin: Origin) -> str:
    """Return the section about the training data: counts by corpus and by reason."""
    lines = ["## Training data", ""]
    if not origin.report:
        return "\n".join([*lines, f"Pairs, filters and license: {UNKNOWN}."])
    train = origin.report["train"]
    lines.append("| corpus | weight | read | kept | dropped |")
    lines.append("|---|---|---|---|---|")
    for name, summary in (train["corpora"] or {"": train}).items():
        dropped = [f"{reason} {count:,}" for reason, count in sorted(summary["dropped"].items())]
        weight = origin.weights.get(name, UNKNOWN)
        lines.append(
            f"| {name or 'all'} | {weight} | {summary['read']:,} | {summary['kept']:,} | "
            f"{', '.join(dropped) or 0} |"
        )
    lines.append("")
    lines.append(f"License: {origin.report.get('license', UNKNOWN)}.")
    return "\n".join(lines)


def _describe_training(info: ModelInfo, origin: Origin) -> str:
    """Return the section about the cost of training, without validation."""
    num_tokens = 0.0
    seconds = 0.0
    flops = 0.0
    for record in origin.records:
        if "model_flops" in record and record["model_flops_per_second"] > 0:
            record_seconds = (record["model_flops"] - flops) / record["model_flops_per_second"]
            flops = record["model_flops"]
            seconds += record_seconds
            num_tokens += record["tokens_per_second"] * record_seconds
    lines = ["## Training", "", f"- Updates: {info.updates or UNKNOWN}"]
    if num_tokens:
        lines.append(f"- Tokens, source and target: {num_tokens:,.0f}")
        lines.append(f"- Hours, without validation: {seconds / 3600:,.3f}")
    else:
        lines.append(f"- Tokens and hours: {UNKNOWN}")
    if origin.settings.get("init_from"):
        lines.append("- Began with the weights of another model, whose training is not counted.")
    return "\n".join(lines)
