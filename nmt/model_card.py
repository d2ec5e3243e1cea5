"""Write the card of a model: README.md with the metadata that the Hugging Face Hub reads.

The facts come from the run that trained the model and from the data folder of the run. Facts that
are not available are written as "unknown".
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
from nmt.data.languages import DEFAULT_LANGUAGES
from nmt.errors import ModelError, NmtError
from nmt.runtime.manifest import read_run_config
from nmt.runtime.metadata import read_json
from nmt.runtime.metrics_log import read_metrics_log

CARD = "README.md"
SCORES = "scores.json"
"""Optional file of a model folder: output of `nmt-evaluate format=json`, added by the user."""
UNKNOWN = "unknown"
_ISO_639_CODE = re.compile("[a-z]{2,3}(?![a-z])")  # also matches the zh of zh-Hans


@dataclass
class Origin:
    """Facts about the run that trained a model and about its data; empty fields are unknown."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl, up to the last update of the model."""
    settings: dict[str, Any] = field(default_factory=dict)  # the run's config.yaml
    report: dict[str, Any] = field(default_factory=dict)
    """The data folder's report.json: its license, and the numbers of pairs of each corpus."""
    corpus_weights: dict[str, float] = field(default_factory=dict)
    """Weights in training, keyed by the name of the corpus."""

    @classmethod
    def find(cls, folder: Path, info: ModelInfo) -> Origin:
        """Read the files of the run that contains the model folder, and of its data folder.

        A run has its models in `RUN/average` and `RUN/checkpoints/NAME`. Stops at the first file
        that is missing or damaged; the remaining facts stay unknown.
        """
        origin = cls()
        run_dir = folder.parent
        try:
            is_in_checkpoints = not (run_dir / "config.yaml").exists()
            if is_in_checkpoints:
                run_dir = run_dir.parent
            origin.settings = read_run_config(run_dir)
            records = read_metrics_log(run_dir / "metrics.jsonl")
            origin.records = [record for record in records if record["update"] <= info.updates]
            data_dir = resolve_path(str(origin.settings["data_dir"]))
            meta = read_meta(data_dir)
            # the folder may have been prepared again with another tokenizer
            if meta.tokenizer_sha256 == info.tokenizer_sha256:
                origin.report = read_json(data_dir / "report.json")
                for corpus_shards in meta.splits["train"]:
                    origin.corpus_weights[corpus_shards.corpus] = corpus_shards.weight
        except (OSError, KeyError, NmtError):
            pass  # `origin` has the facts that were read before
        return origin


def render_card(
    folder: Path, info: ModelInfo, body: str, *, library: str = "nmt", tags: tuple[str, ...] = ()
) -> str:
    """Return the card of the model in `folder`.

    Args:
        folder: the model folder; it may be a symbolic link.
        info: the settings of the model.
        body: Markdown that begins with the title. The card has the metadata before the body, and
            sections about data and training after the body.
        library: the library that loads the model.
        tags: more tags for the Hugging Face Hub.
    """
    folder = folder.resolve()
    origin = Origin.find(folder, info)
    metadata: dict[str, Any] = {
        "language": [_iso_639_code(info.src_lang), _iso_639_code(info.tgt_lang)],
        "license": origin.report.get("license", UNKNOWN),
        "library_name": library,
        "pipeline_tag": "translation",
        "tags": ["translation", "transformer", "nmt", *tags],
    }
    results = _list_results(folder, info, origin)
    if results:
        name = f"{info.src_lang}-{info.tgt_lang}"
        metric_types = {result["metrics"][0]["type"] for result in results}
        metadata["metrics"] = sorted(metric_types)
        metadata["model-index"] = [{"name": name, "results": results}]
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    sections = [body.strip("\n"), _describe_data(origin), _describe_training(info, origin)]
    return f"---\n{front_matter}---\n" + "\n\n".join(sections) + "\n"


def _iso_639_code(language: str) -> str:
    """Return a language code without script and territory.

    Returns "und" (undetermined) for a text that is no code, such as the default names src and tgt.
    """
    match = _ISO_639_CODE.match(language.lower())
    is_name_of_side = language in DEFAULT_LANGUAGES
    if match is None or is_name_of_side:
        return "und"
    return match[0]


def _list_results(folder: Path, info: ModelInfo, origin: Origin) -> list[dict[str, Any]]:
    """Return the entries of `model-index`.

    The entries are the scores in the file `SCORES` and, for a checkpoint, its validation BLEU.
    """
    results = []
    path = folder / SCORES
    try:
        if path.exists():
            for score in read_json(path)["scores"]:
                results.append(
                    _make_result("test", score["name"], score["value"], score["signature"])
                )
    except (KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: write it with nmt-evaluate format=json, or remove it") from None
    for record in origin.records:
        # the name of a checkpoint has its number of updates; an average has another name
        checkpoint_name = checkpoint_dir(Path(), record["update"]).name
        is_record_of_model = folder.name == checkpoint_name
        if is_record_of_model and "valid_bleu" in record:
            # not at the top of this module, which translation imports: loading sacreBLEU takes long
            from nmt.evaluate import build_bleu_metric, choose_bleu_tokenizer

            metric = build_bleu_metric(choose_bleu_tokenizer(info.tgt_lang))
            # the signature has the number of references, which a metric only knows after scoring
            metric.corpus_score(["a"], [["a"]])
            signature = str(metric.get_signature())
            results.append(_make_result("validation", "BLEU", record["valid_bleu"], signature))
    return results


def _make_result(split: str, metric_name: str, value: float, signature: str) -> dict[str, Any]:
    """Return an entry of `model-index` with one metric, measured on the validation or test set."""
    metric = {
        "type": metric_name.lower(),
        "name": metric_name,
        "value": value,
        "args": {"signature": signature},
    }
    return {
        "task": {"type": "translation"},
        "dataset": {"type": split, "name": f"{split} set"},
        "metrics": [metric],
    }


def _describe_data(origin: Origin) -> str:
    """Return the section about the training data: how many pairs of each corpus were dropped."""
    if not origin.report:
        return f"## Training data\n\nPairs, filters and license: {UNKNOWN}."
    lines = [
        "## Training data",
        "",
        "| corpus | weight | read | kept | dropped |",
        "|---|---|---|---|---|",
    ]
    train_report = origin.report["train"]
    corpora = train_report["corpora"]
    if not corpora:  # the data is one corpus without a name
        corpora = {"": train_report}
    for name, summary in corpora.items():
        dropped = [f"{reason} {count:,}" for reason, count in sorted(summary["dropped"].items())]
        dropped_counts = ", ".join(dropped) if dropped else "0"
        weight = origin.corpus_weights.get(name, UNKNOWN)
        lines.append(
            f"| {name or 'all'} | {weight} | {summary['read']:,} | {summary['kept']:,} | "
            f"{dropped_counts} |"
        )
    lines += ["", f"License: {origin.report.get('license', UNKNOWN)}."]
    return "\n".join(lines)


def _describe_training(info: ModelInfo, origin: Origin) -> str:
    """Return the section about training: the numbers of updates, tokens and hours."""
    num_tokens, seconds = _sum_training(origin.records)
    num_updates = info.updates or UNKNOWN  # 0 for an imported model, whose number is unknown
    lines = ["## Training", "", f"- Updates: {num_updates}"]
    if num_tokens:
        lines.append(f"- Tokens, source and target: {num_tokens:,.0f}")
        lines.append(f"- Hours, without validation: {seconds / 3600:,.3f}")
    else:
        lines.append(f"- Tokens and hours: {UNKNOWN}")
    if origin.settings.get("init_from"):
        lines.append(
            "- Training began with the weights of another model. Its training is not counted."
        )
    return "\n".join(lines)


def _sum_training(records: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the number of tokens and the seconds of training, without validation.

    Each record has the floating-point operations since the start of the run (`model_flops`). It
    also has the average rates of operations and tokens per second since the previous record. The
    seconds since the previous record are the new operations divided by their rate.
    """
    num_tokens = 0.0
    seconds = 0.0
    total_flops = 0.0
    for record in records:
        if "model_flops" in record and record["model_flops_per_second"] > 0:
            new_flops = record["model_flops"] - total_flops
            total_flops = record["model_flops"]
            new_seconds = new_flops / record["model_flops_per_second"]
            num_tokens += record["tokens_per_second"] * new_seconds
            seconds += new_seconds
    return num_tokens, seconds
