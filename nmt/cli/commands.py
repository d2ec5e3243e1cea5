"""The commands of nmt: their documentation, their settings and the functions that run them.

A new command needs an entry in `_COMMANDS`, a dataclass of its settings in nmt/config/ and a line
for its script in setup.cfg. This module imports neither torch nor Hydra, so that `--help` is fast.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from nmt import config

NAME = "NAME"  # placeholder in keys for a name that the user chooses, as in mix.NAME
_KEY_WIDTH = 34  # width in --help of a key and its default, in characters
_TEXT_WIDTH = 100  # width of a paragraph in --help, in characters
_PREPROCESS_ONLY_KEYS = {"scheduler"}  # settings of nmt-preprocess that nmt-train does not accept
# --help shows files and folders first, then settings of the command, then device and workers
_SHOWN_FIRST = {"model_dir", "input", "src", "tgt", "output", "run_dir", "data_dir", "experiment"}
_SHOWN_LAST = {"backend", "device", "devices", "scheduler", "dtype", "num_threads", "verify"}


@dataclass(frozen=True)
class Command:
    """A command and its documentation."""

    name: str
    summary: str
    reads: str  # description of the input, for --help
    writes: str  # description of the output, for --help
    examples: tuple[str, ...]
    schema: type[Any]  # the dataclass of its settings
    entry_point: str  # "module:function"; only imported when the command runs, for a fast --help
    config_groups: tuple[str, ...] = ("experiment",)  # groups of YAML files that it accepts
    can_resume: bool = False  # whether the same command continues interrupted work

    @functools.cached_property
    def settings(self) -> tuple[Setting, ...]:
        """All settings of the command."""
        return tuple(list_settings(self.schema))

    @functools.cached_property
    def accepted_settings(self) -> tuple[Setting, ...]:
        """The settings that the command line may contain.

        nmt-train also accepts settings of nmt-preprocess, since it prepares missing data.
        """
        if self.name != "train":
            return self.settings
        excluded_keys = {setting.key for setting in self.settings} | _PREPROCESS_ONLY_KEYS
        data_settings = []
        for setting in list_settings(config.PreprocessConfig):
            if setting.key not in excluded_keys:
                data_settings.append(setting)
        return (*self.settings, *data_settings)


_COMMANDS = (
    Command(
        name="preprocess",
        summary="Turn parallel text into a data folder: a subword tokenizer and token ids.",
        reads="aligned text files, TSV or JSONL (paths, patterns, lists or stdin; plain, .gz, "
        ".bz2, .xz, .zst, or in .zip and .tar.gz archives), a Hugging Face dataset, or an included "
        "corpus (data=numbers, data=copy)",
        writes="data_dir: tokenizer, train-*.arrow, report.html and more; a table to stdout",
        examples=(
            "nmt-preprocess",
            "nmt-preprocess data.train.src=a.en data.train.tgt=a.de data.valid.src=v.en "
            "data.valid.tgt=v.de data_dir=data/mine tokenizer.vocab_size=8000",
            "nmt-preprocess data.corpora.news.src=news-*.en.gz "
            "data.corpora.news.tgt=news-*.de.gz data.corpora.web.tsv=web.tsv.xz "
            "data.corpora.web.weight=0.5 data.valid.tsv=v.tsv",
        ),
        schema=config.PreprocessConfig,
        entry_point="nmt.cli.tasks:preprocess",
        config_groups=("data", "experiment"),
        can_resume=True,
    ),
    Command(
        name="train",
        summary="Train a Transformer, or resume from the last checkpoint.",
        reads="data_dir; if it does not exist, it is prepared first from experiment=NAME or "
        "settings of nmt-preprocess, such as data.train.src=FILE",
        writes="run_dir: config.yaml, metrics.jsonl, checkpoints/ (models); metrics to trackers",
        examples=(
            "nmt-train +model=base",
            "nmt-train +model=tiny data_dir=data/mine run_dir=runs/mine max_updates=1000",
        ),
        schema=config.TrainConfig,
        entry_point="nmt.cli.train:run",
        config_groups=("model", "data", "augment", "experiment"),
        can_resume=True,
    ),
    Command(
        name="average",
        summary="Average the weights of several checkpoints into one model.",
        reads="run_dir (its newest checkpoints, or its best), or a list of checkpoints",
        writes="output: a model folder",
        examples=("nmt-average run_dir=runs/mine last=5 output=runs/mine/average",),
        schema=config.AverageConfig,
        entry_point="nmt.cli.tasks:average",
    ),
    Command(
        name="translate",
        summary="Translate text: one output line per input line.",
        reads="text on stdin or in a file, and a run, checkpoint or model folder (several: an "
        "ensemble)",
        writes="translations to stdout, or to a file; the same command continues a killed job; "
        "format=json gives n-best lists with scores",
        examples=(
            "nmt-translate model_dir=runs/mine/average beam_size=4 < in.en > out.de",
            "nmt-translate model_dir=[runs/a,runs/b] input=in.en output=out.de",
            "nmt-translate model_dir=runs/mine n_best=4 format=json input=in.en output=out",
        ),
        schema=config.TranslateConfig,
        entry_point="nmt.cli.translate:translate",
        can_resume=True,
    ),
    Command(
        name="distill",
        summary="Translate training sources with a teacher, for a student to learn from.",
        reads="source text in files, and a run, checkpoint or model folder (several: an ensemble)",
        writes="output: src.txt and tgt.txt, aligned, and summary.json; pairs that are empty, "
        "repetitive or very unequal in length are dropped; the same command continues a killed job",
        examples=(
            "nmt-distill model_dir=runs/teacher input=train.en output=data/distilled",
            "nmt-distill model_dir=[runs/a,runs/b] input=mono-*.en.gz beam_size=4 devices=0",
        ),
        schema=config.DistillConfig,
        entry_point="nmt.cli.synthesis:distill",
        can_resume=True,
    ),
    Command(
        name="backtranslate",
        summary="Translate text of the target language back, for more training pairs.",
        reads="target text in files, and a run, checkpoint or model folder of the other direction",
        writes="output: src.txt (translations) and tgt.txt (the text), as nmt-distill writes them",
        examples=(
            "nmt-backtranslate model_dir=runs/de-en input=mono.de output=data/backtranslated",
            "nmt-backtranslate model_dir=runs/de-en input=mono-*.de.gz sampling=true seed=1",
        ),
        schema=config.BacktranslateConfig,
        entry_point="nmt.cli.synthesis:backtranslate",
        can_resume=True,
    ),
    Command(
        name="evaluate",
        summary="Score translations with BLEU, chrF, TER; test the difference to a baseline.",
        reads="hypotheses and references, detokenized; or a model, with a source and references or "
        "a data folder",
        writes="scores with sacreBLEU signatures to stdout, as text or JSON",
        examples=(
            "nmt-evaluate hypotheses=out.de references=ref.de",
            "nmt-evaluate hypotheses=out.de references=ref.de baseline=old.de format=json",
            "nmt-evaluate model_dir=runs/mine data_dir=data/mine",
        ),
        schema=config.EvaluateConfig,
        entry_point="nmt.cli.evaluate:evaluate",
    ),
    Command(
        name="score",
        summary="Compute the log-probability of given translations, one number per line.",
        reads="source and target text, line by line, and a model folder (several: an ensemble)",
        writes="log-probabilities in nats to stdout or a file, one per line; format=json gives "
        "tokens, sums and scores",
        examples=(
            "nmt-score model_dir=runs/mine src=in.en tgt=out.de",
            "nmt-score model_dir=[runs/a,runs/b] src=in.en tgt=out.de format=json",
        ),
        schema=config.ScoreConfig,
        entry_point="nmt.cli.score:score",
    ),
    Command(
        name="export",
        summary="Convert a model for CTranslate2, transformers, Argos, ONNX, Marian or browsers.",
        reads="a run, checkpoint or model folder",
        writes="output: a self-contained folder with tokenizer and README, usable without nmt",
        examples=(
            "nmt-export model_dir=runs/mine/average format=ctranslate2 quantization=int8 "
            "output=exported",
            "nmt-export model_dir=runs/mine format=huggingface output=exported-hf",
        ),
        schema=config.ExportConfig,
        entry_point="nmt.cli.tasks:export",
    ),
    Command(
        name="import",
        summary="Turn a model of transformers, Marian, OpenNMT-py or fairseq into a model folder.",
        reads="a folder of Hugging Face (MarianMT, M2M100, NLLB), an .npz file of Marian, or a .pt "
        "file of OpenNMT-py or fairseq, with the SentencePiece model in the same folder",
        writes="output: a model folder, to translate with, to fine-tune (init_from) and to export",
        examples=(
            "nmt-import input=opus-mt-en-de output=runs/opus",
            "nmt-import input=nllb-200-distilled-600M src_lang=eng_Latn tgt_lang=deu_Latn "
            "output=runs/nllb",
            "nmt-import format=fairseq input=model.pt src_tokenizer=bpe.model output=runs/wmt",
        ),
        schema=config.ImportConfig,
        entry_point="nmt.cli.tasks:import_model",
    ),
    Command(
        name="serve",
        summary="Serve translations over HTTP: LibreTranslate's API and a web page.",
        reads="model folders, one or more language pairs",
        writes="answers to requests, by default on http://127.0.0.1:5000; logs to stderr",
        examples=(
            "nmt-serve model_dir=runs/mine",
            "nmt-serve model_dir=[runs/en-de,runs/de-en] port=8000 api_keys=keys.txt",
        ),
        schema=config.ServeConfig,
        entry_point="nmt.cli.tasks:serve",
    ),
    Command(
        name="visualize",
        summary="Draw models, runs and data: attention to explore, curves, search trees and more.",
        reads="depends on the picture: text on stdin and a model, a run, a config, or nothing",
        writes="output: one .html, .png, .svg or .pdf file; without arguments a list of pictures",
        examples=(
            "nmt-visualize",
            "echo 'A dog runs.' | nmt-visualize what=attention model_dir=runs/mine",
            "nmt-visualize what=run run_dir=[runs/a,runs/b] output=runs.svg theme=dark",
            "nmt-visualize what=architecture model=big",
        ),
        schema=config.VisualizeConfig,
        entry_point="nmt.visualize.draw:draw",
        config_groups=("model",),
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}


@dataclass(frozen=True)
class Setting:
    """A setting of a command, as `--help` documents it."""

    key: str  # such as model.d_model or data.corpora.NAME.src
    type_hint: Any
    default: str
    """The default in brackets, such as "[512]"; "" for a mapping, whose names the user chooses."""
    help: str
    resume_rule: config.ResumeRule
    """Whether a resumed command will "refuse", "log" or "accept" another value."""


def list_settings(
    schema: type[Any], prefix: str = "", inherited_rule: config.ResumeRule = "refuse"
) -> Iterator[Setting]:
    """Yield the settings of a dataclass and of its groups, in the order of `--help`.

    `NAME` in a key is a placeholder for a name that the user chooses, as in mappings. `prefix`
    precedes all keys. Settings that declare no resume rule get `inherited_rule`.
    """
    type_hints = typing.get_type_hints(schema)
    for field in sorted(dataclasses.fields(schema), key=_help_position):
        key = prefix + field.name
        type_hint = type_hints[field.name]
        help = field.metadata["help"]
        resume_rule = field.metadata["on_resume"] or inherited_rule
        is_mapping = typing.get_origin(type_hint) is dict
        if is_mapping:
            key = f"{key}.{NAME}"
            type_hint = typing.get_args(type_hint)[1]  # the type of the values
        is_group = dataclasses.is_dataclass(type_hint)
        # a mapping of names to groups, such as data.corpora, is a setting and has further settings
        if is_mapping:
            yield Setting(key, type_hint, "", help, resume_rule)
        elif not is_group:
            yield Setting(key, type_hint, _default_text(field), help, resume_rule)
        if is_group:
            yield from list_settings(typing.cast(type[Any], type_hint), f"{key}.", resume_rule)


def _help_position(field: dataclasses.Field[Any]) -> int:
    """Return the sort key of a setting in `--help`: 0 first, 1 in between, 2 last."""
    if field.name in _SHOWN_FIRST:
        return 0
    if field.name in _SHOWN_LAST:
        return 2
    return 1


def _default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default of a setting in brackets, in the notation of the command line."""
    if field.default is dataclasses.MISSING:
        default = typing.cast(Any, field.default_factory)()
    else:
        default = field.default
    return _value_text(default)


def _value_text(value: Any) -> str:
    """Return a value in brackets, in the notation of the command line: JSON without quotes."""
    value_json = json.dumps(value, separators=(",", ":"))
    return f"[{value_json}]".replace('"', "")


def keys_with_resume_rule(command: Command, resume_rule: config.ResumeRule) -> list[str]:
    """Return the keys of the settings with `resume_rule`.

    The settings of `search`, which all have the same rule, are returned as `search.*`.
    """
    keys = []
    for setting in command.settings:
        key = "search.*" if setting.key.startswith("search.") else setting.key
        if setting.resume_rule == resume_rule and key not in keys:
            keys.append(key)
    return keys


def command_help(command: Command, values: Mapping[str, Any] | None = None) -> str:
    """Return the text of `--help`: inputs and outputs, examples, all settings.

    Shows `values`, keyed by setting, instead of the defaults.
    """
    sections = [
        f"nmt-{command.name}: {command.summary}",
        f"reads:  {command.reads}\nwrites: {command.writes}",
        "examples:\n  " + "\n  ".join(command.examples),
    ]
    group_lines = ["ready-made settings:"]
    for group in command.config_groups:
        names = ", ".join(list_yaml_names(group))
        group_lines.append(_help_line(f"{group}=NAME", names))
    sections.append("\n".join(group_lines))
    in_brackets = "in brackets: the value with your settings" if values else "default in brackets"
    setting_lines = [f"settings, as key=value ({in_brackets}):"]
    for setting in command.settings:
        value_text = setting.default
        if values and setting.key in values:
            value_text = _value_text(values[setting.key])
        key_and_default = f"{setting.key} {value_text}".strip()
        setting_lines.append(_help_line(key_and_default, setting.help))
    sections.append("\n".join(setting_lines))
    if command.can_resume:
        sections.append(_resume_help(command))
    sections.append(
        "-q, --quiet or quiet=true: log only warnings and errors\n"
        "-v, --verbose or verbose=true: log details too"
    )
    sections.append(
        "exit status: 0 done, 1 a bug, 2 wrong arguments, settings or input, 75 training stopped\n"
        "by a signal after saving a checkpoint, 130 interrupted"
    )
    return "\n\n".join(sections)


def _resume_help(command: Command) -> str:
    """Return the paragraph of `--help` about settings that a resumed command may change."""
    accepted_keys = ", ".join(keys_with_resume_rule(command, "accept"))
    logged_keys = ", ".join(keys_with_resume_rule(command, "log"))
    text = f"may change when the command resumes: {accepted_keys}"
    if logged_keys:
        text += f"; and, with a line in the log, {logged_keys}"
    return textwrap.fill(text, width=_TEXT_WIDTH, break_on_hyphens=False)


def _help_line(key: str, text: str) -> str:
    """Return the line of a key in `--help`; a long key gets a line of its own before the text."""
    if len(key) >= _KEY_WIDTH:
        indent = " " * _KEY_WIDTH
        return f"  {key}\n  {indent}{text}"
    padded_key = key.ljust(_KEY_WIDTH)
    return f"  {padded_key}{text}"


def commands_help() -> str:
    """Return the text of `nmt --help`: all commands, one per line."""
    lines = "\n".join(f"  {name:<15}{command.summary}" for name, command in COMMANDS.items())
    return f"""nmt: train and use Transformer translation models

usage: nmt COMMAND [key=value ...]     (the same as nmt-COMMAND)

{lines}

nmt COMMAND --help shows the input and output of a command, with examples.
A first run on an included corpus:
  nmt-preprocess && nmt-train +model=tiny && nmt-average && nmt-translate"""


def list_yaml_names(group: str) -> list[str]:
    """Return the names of the YAML files of a config group, without suffix."""
    names = [file.name for file in (resources.files("nmt.configs") / group).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


# --- shell commands in messages, which say what to run next


def shell_command(name: str, arguments: Iterable[str] = (), **settings: str) -> str:
    """Return a shell command that runs `nmt-NAME` with arguments and `key=value` settings.

    If `nmt-NAME` is not on the PATH, the command begins with the path of its script or with
    `python -m nmt NAME`.
    """
    program = [f"nmt-{name}"]
    if shutil.which(program[0]) is None:  # the virtual environment is not active
        script = Path(sys.argv[0]).with_name(program[0])
        program = [str(script)] if script.is_file() else [sys.executable, "-m", "nmt", name]
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return shlex.join([*program, *arguments, *overrides])


def script_command(command: str) -> str:
    """Return the command `python SCRIPT ...` in a form that runs from the current folder.

    SCRIPT is relative to the root of the checkout. If there is no such file in the current folder,
    the path becomes absolute. `python` becomes the Python that runs nmt. If nmt is installed
    without its scripts, returns the command with a note that it runs in a clone of the repository.
    Commands of other programs are returned unchanged.
    """
    program, script, *arguments = shlex.split(command)
    if program != "python":
        return command
    if not Path(script).is_file():
        absolute_script = Path(__file__).parents[2] / script
        if not absolute_script.is_file():
            return (
                f"{command} (in a clone of nmt's repository: the installed package has no scripts)"
            )
        script = str(absolute_script)
    if shutil.which(program) != sys.executable:  # the short name would start another Python
        program = sys.executable
    return shlex.join([program, script, *arguments])
