"""Runs `nmt-distill` and `nmt-backtranslate`, which make a corpus of text and its translations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from nmt.cli.commands import command_line
from nmt.cli.translate import TranslationJob
from nmt.config import (
    BacktranslateConfig,
    DistillConfig,
    SynthesisConfig,
    TranslateConfig,
    TranslationConfig,
    resolve,
)
from nmt.data.languages import LanguagePair, default_directions
from nmt.data.text import check_file, is_compressed, is_stream, read_input
from nmt.errors import DataError
from nmt.preprocess.sources import match_files
from nmt.runtime.progress import Progress
from nmt.translate.job import PartialFile, describe_job, partial_path, remove_partial
from nmt.translate.synthesis import (
    SUMMARY,
    TEXT_FILES,
    SynthesisCounts,
    publish,
    read_counts,
    select_pairs,
)
from nmt.translate.windows import WINDOW_LINES, WindowReader

log = logging.getLogger(__name__)


def distill(config: DistillConfig) -> None:
    """Make a corpus of sources and their translations by a teacher; log the next command."""
    direction = synthesize(config, is_reversed=False)
    _log_next(
        config,
        direction,
        {
            "data.train.src": f"{config.output}/src.txt",
            "data.train.tgt": f"{config.output}/tgt.txt",
        },
    )


def backtranslate(config: BacktranslateConfig) -> None:
    """Make a corpus of targets and their translations by a reverse model; log the next command."""
    direction = synthesize(config, is_reversed=True)
    settings = {
        "data.corpora.parallel.src": "TRAIN.src",
        "data.corpora.parallel.tgt": "TRAIN.tgt",
        "data.corpora.bt.src": f"{config.output}/src.txt",
        "data.corpora.bt.tgt": f"{config.output}/tgt.txt",
    }
    if config.tag:
        settings["data.corpora.bt.src_tag"] = config.tag
    _log_next(config, direction, settings)


def _log_next(config: SynthesisConfig, direction: LanguagePair, settings: dict[str, str]) -> None:
    """Log the nmt-preprocess command that makes a data folder of the corpus."""
    if direction.src_lang:
        settings["data.src_lang"] = direction.src_lang
    if direction.tgt_lang:
        settings["data.tgt_lang"] = direction.tgt_lang
    settings["data.valid.src"] = "VALID.src"
    settings["data.valid.tgt"] = "VALID.tgt"
    settings["data_dir"] = f"{config.output}/prepared"
    log.info("wrote %s; next: %s", config.output, command_line("preprocess", **settings))


def synthesize(config: SynthesisConfig, *, is_reversed: bool) -> LanguagePair:
    """Translate `input`, write the pairs to keep to the folder `output`, and print their counts.

    A killed job is resumed. Returns the direction of the pairs.
    """
    files = [file for name in config.input or [] for file in match_files(name).values()]
    for file in files:
        if file != "-":
            check_file(resolve(file))
    folder = resolve(config.output)
    _check_output(folder, files)
    shared = {setting.name: getattr(config, setting.name) for setting in fields(TranslationConfig)}
    job = TranslationJob(TranslateConfig(**shared, input="-", output="-"))
    description = {**describe_job(config, job.search), "is_reversed": is_reversed}
    counts = None
    if not any(is_stream(file) for file in files):
        counts = read_counts(folder, description, lambda: _open_files(files))
    if counts is not None:
        remove_partial(folder / "pairs")  # left by a kill just after the summary was written
        log.info("%s is complete already, for this model, text and settings", config.output)
    else:
        is_default = config.output == type(config).output
        if is_default and (folder / SUMMARY).exists():
            raise DataError(
                f"{config.output} holds a corpus of another model, text or settings; give "
                f"output=FOLDER, or remove {config.output} first"
            )
        counts = _translate(config, files, job, description)
    print(counts.table(config))
    if not counts.pairs:
        raise DataError(f"no pair is left in {config.output}; the lines above say why")
    return _find_direction(config, job.directions, is_reversed=is_reversed)


def _check_output(folder: Path, files: list[str]) -> None:
    """Raise a `DataError` for text files in the output folder that this command did not write."""
    inputs = {resolve(file).resolve() for file in files}
    is_ours = (folder / SUMMARY).exists() or partial_path(folder / "pairs").exists()
    for name in TEXT_FILES:
        path = folder / name
        if path.resolve() in inputs or (path.exists() and not is_ours):
            raise DataError(
                f"{path} is the input, or was not written by this command; give output=FOLDER"
            )


def _translate(
    config: SynthesisConfig, files: list[str], job: TranslationJob, description: dict[str, Any]
) -> SynthesisCounts:
    """Translate the remaining lines, and write the files of the corpus."""
    folder = resolve(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    total_bytes: int | None = None
    if not any(is_stream(file) or is_compressed(file) for file in files):
        total_bytes = sum(resolve(file).stat().st_size for file in files)
    with contextlib.ExitStack() as stack:
        pairs = stack.enter_context(PartialFile(folder / "pairs", description, SynthesisCounts))
        reader = pairs.resume(
            lambda: _open_files(files, config.window_lines),
            is_stream=any(is_stream(file) for file in files),
        )
        progress = stack.enter_context(
            Progress("translate", "lines", total_bytes=total_bytes, done=reader.num_lines)
        )
        for window, results in job.translate_windows(reader, stack):
            data, counts = select_pairs(
                window,
                results,
                config=config,
                tokenizer=job.tokenizer.src,
                is_reversed=description["is_reversed"],
            )
            pairs.append(data, counts, window)
            progress.update(len(window.lines), read_bytes=window.num_bytes)
        progress.finish()
        summary = {"input": config.input, "job": description}
        total_counts = pairs.finish(
            reader, lambda state: publish(folder, pairs.path, state, summary)
        )
    assert isinstance(total_counts, SynthesisCounts)
    return total_counts


def _open_files(files: list[str], window_lines: int = WINDOW_LINES) -> WindowReader:
    """Return a reader of the lines of all files in turn."""
    lines = chain.from_iterable(read_input(file) for file in files)
    return WindowReader(lines, window_lines=window_lines)


def _find_direction(
    config: SynthesisConfig, directions: Sequence[LanguagePair], *, is_reversed: bool
) -> LanguagePair:
    """Return the languages of the corpus, from the settings or from a model of one direction."""
    languages = {(pair.src_lang, pair.tgt_lang) for pair in default_directions(directions)}
    src_lang, tgt_lang = languages.pop() if len(languages) == 1 else ("", "")
    src_lang = config.src_lang or src_lang
    tgt_lang = config.tgt_lang or tgt_lang
    return LanguagePair(tgt_lang, src_lang) if is_reversed else LanguagePair(src_lang, tgt_lang)
