"""Run `nmt-distill` and `nmt-backtranslate`, which write a corpus of text and its translations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from nmt.cli.commands import shell_command
from nmt.cli.translate import WindowTranslator, with_chosen_backend
from nmt.config import (
    BacktranslateConfig,
    DistillConfig,
    FileTranslationConfig,
    SynthesisConfig,
    TranslateConfig,
    resolve_path,
)
from nmt.data.languages import LanguagePair, default_directions
from nmt.data.text import check_file, is_compressed, is_stream, read_input
from nmt.errors import DamagedError, DataError
from nmt.preprocess.filters import are_in_other_language
from nmt.preprocess.sources import match_files
from nmt.runtime.metadata import read_json
from nmt.runtime.progress import Progress
from nmt.translate.job import JobState, PartialFile, describe_job, partial_path, remove_partial
from nmt.translate.synthesis import (
    SUMMARY_FILE,
    TEXT_FILES,
    SynthesisCounts,
    read_counts,
    select_pairs,
    write_corpus,
)
from nmt.translate.windows import WINDOW_LINES, WindowReader

log = logging.getLogger(__name__)
_PAIRS = "pairs"
"""`partial_path(output / _PAIRS)` is the file with the pairs of an unfinished job."""


def distill(config: DistillConfig) -> None:
    """Translate source text with a teacher, write a corpus, and log the next command."""
    direction = synthesize(config, is_reversed=False)
    corpus_settings = {
        "data.train.src": f"{config.output}/src.txt",
        "data.train.tgt": f"{config.output}/tgt.txt",
    }
    _log_next(config, direction, corpus_settings)


def backtranslate(config: BacktranslateConfig) -> None:
    """Translate target text with a reverse model, write a corpus, and log the next command."""
    direction = synthesize(config, is_reversed=True)
    corpus_settings = {  # TRAIN is a placeholder for the user's parallel text
        "data.corpora.parallel.src": "TRAIN.src",
        "data.corpora.parallel.tgt": "TRAIN.tgt",
        "data.corpora.bt.src": f"{config.output}/src.txt",
        "data.corpora.bt.tgt": f"{config.output}/tgt.txt",
    }
    if config.tag:
        corpus_settings["data.corpora.bt.src_tag"] = config.tag
    _log_next(config, direction, corpus_settings)


def _log_next(
    config: SynthesisConfig, direction: LanguagePair, corpus_settings: dict[str, str]
) -> None:
    """Log the nmt-preprocess command that prepares the corpus for training.

    `corpus_settings` are the settings of the command for the training text.
    """
    settings = dict(corpus_settings)
    if direction.src_lang:
        settings["data.src_lang"] = direction.src_lang
    if direction.tgt_lang:
        settings["data.tgt_lang"] = direction.tgt_lang
    settings["data.valid.src"] = "VALID.src"
    settings["data.valid.tgt"] = "VALID.tgt"
    settings["data_dir"] = f"{config.output}/prepared"
    log.info("wrote %s; next: %s", config.output, shell_command("preprocess", **settings))


def synthesize(config: SynthesisConfig, *, is_reversed: bool) -> LanguagePair:
    """Translate the files of `input`, write a corpus to the folder `output`, and print its counts.

    With `is_reversed`, the input is the target side of the corpus. Resumes a killed job. If the
    corpus is complete, only prints its counts. Returns the languages of the corpus.
    """
    config = with_chosen_backend(config)
    files = _find_inputs(config)
    folder = resolve_path(config.output)
    _check_output(folder, files)
    translator = _load_translator(config)
    job = {**describe_job(config, translator.search), "is_reversed": is_reversed}
    counts = None
    can_read_twice = not any(is_stream(file) for file in files)
    if can_read_twice:
        counts = read_counts(folder, job, open_input=lambda: _open_files(files))
    if counts is None:
        _check_replacement(config)
        counts = _translate(config, files, translator, job, is_reversed=is_reversed)
    else:
        log.info("%s is complete already, for this model, text and settings", config.output)
        remove_partial(folder / _PAIRS)  # left by a kill after the summary was written
    print(counts.table(config))
    if not counts.pairs:
        raise DataError(f"no pair is left in {config.output}; the lines above say why")
    languages = _find_languages(config, translator.directions)
    if is_reversed:
        return LanguagePair(src_lang=languages.tgt_lang, tgt_lang=languages.src_lang)
    return languages


def _find_inputs(config: SynthesisConfig) -> list[str]:
    """Return the files that `input` names; raise an error for a file that cannot be read."""
    files: list[str] = []
    for pattern in config.input or []:
        files.extend(match_files(pattern).values())  # the keys are the texts that * and ? match
    for file in files:
        if file != "-":
            check_file(resolve_path(file))
    return files


def _load_translator(config: SynthesisConfig) -> WindowTranslator:
    """Load the models, with the settings that `config` shares with nmt-translate."""
    names = [setting.name for setting in fields(FileTranslationConfig)]
    settings = {name: getattr(config, name) for name in names}
    # `WindowTranslator` does not use `input` and `output`
    return WindowTranslator(TranslateConfig(**settings, input="-", output="-"))


def _check_output(folder: Path, files: list[str]) -> None:
    """Raise a `DataError` if the corpus would overwrite its input or other files of the user."""
    input_paths = {resolve_path(file).resolve() for file in files}
    has_complete_corpus = (folder / SUMMARY_FILE).exists()
    has_unfinished_corpus = partial_path(folder / _PAIRS).exists()
    is_folder_of_nmt = has_complete_corpus or has_unfinished_corpus
    for name in TEXT_FILES:
        path = folder / name
        if path.resolve() in input_paths:
            raise DataError(f"{path} is the input; give output=FOLDER")
        if path.exists() and not is_folder_of_nmt:
            raise DataError(f"{path} was not written by this command; give output=FOLDER")


def _check_replacement(config: SynthesisConfig) -> None:
    """Raise a `DataError` if `output` contains a corpus, unless `overwrite` is set.

    A corpus without pairs may be replaced.
    """
    path = resolve_path(config.output) / SUMMARY_FILE
    if config.overwrite or not path.exists():
        return
    try:
        num_pairs = read_json(path)["counts"]["pairs"]
        if num_pairs == 0:
            return
        content = f"{num_pairs:,} pairs"
    except (DamagedError, KeyError, TypeError, ValueError):
        content = "pairs"
    raise DataError(
        f"{config.output} holds {content} of another model, text or settings; give another output, "
        "or overwrite=true to replace them"
    )


def _translate(
    config: SynthesisConfig,
    files: list[str],
    translator: WindowTranslator,
    job: dict[str, Any],
    *,
    is_reversed: bool,
) -> SynthesisCounts:
    """Translate the lines of `files`, except those that a killed job translated before.

    Then writes the corpus. `job` is from `describe_job`.
    """
    folder = resolve_path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    total_bytes: int | None = None
    if not any(is_stream(file) or is_compressed(file) for file in files):
        total_bytes = sum(resolve_path(file).stat().st_size for file in files)
    with contextlib.ExitStack() as stack:
        partial_file = stack.enter_context(PartialFile(folder / _PAIRS, job, SynthesisCounts))
        reader = partial_file.resume(
            open_input=lambda: _open_files(files, config.window_lines),
            is_stream=any(is_stream(file) for file in files),
        )
        progress = stack.enter_context(
            Progress("translate", "lines", total_bytes=total_bytes, done=reader.num_lines)
        )
        is_first_window = True
        for window, results in translator.translate_windows(reader, stack):
            if is_first_window:
                _warn_of_other_language(window.lines, config, translator.directions)
                is_first_window = False
            pair_bytes, window_counts = select_pairs(
                window,
                results,
                config=config,
                tokenizer=translator.tokenizer.src,
                is_reversed=is_reversed,
            )
            partial_file.append(pair_bytes, window_counts, window)
            progress.update(len(window.lines), read_bytes=window.num_bytes)
        progress.finish()
        summary = {"input": config.input, "job": job}

        def write_output(job_state: JobState) -> None:
            write_corpus(folder, partial_file.path, job_state, summary)

        total_counts = partial_file.finish(reader, write_output=write_output)
    assert isinstance(total_counts, SynthesisCounts)  # the class given to `PartialFile`
    return total_counts


def _warn_of_other_language(
    lines: Sequence[str], config: SynthesisConfig, directions: Sequence[LanguagePair]
) -> None:
    """Warn if most lines are not in the language that the model translates from."""
    language = _find_languages(config, directions).src_lang
    if are_in_other_language(lines, language):
        log.warning(
            "warning: most lines of the input are not in the language %r that the model translates "
            "from; choose another model, or another text",
            language,
        )


def _open_files(files: list[str], window_lines: int = WINDOW_LINES) -> WindowReader:
    """Return a reader of the lines of all files, one file after the other."""
    lines = chain.from_iterable(read_input(file) for file in files)
    return WindowReader(lines, window_lines=window_lines)


def _find_languages(config: SynthesisConfig, directions: Sequence[LanguagePair]) -> LanguagePair:
    """Return the languages of the input and of its translation.

    The settings may name them. Otherwise, they are the languages of the model, if all its
    `directions` have the same two languages.
    """
    src_lang = config.src_lang
    tgt_lang = config.tgt_lang
    languages = {(pair.src_lang, pair.tgt_lang) for pair in default_directions(directions)}
    if len(languages) == 1:
        [(model_src_lang, model_tgt_lang)] = languages
        src_lang = src_lang or model_src_lang
        tgt_lang = tgt_lang or model_tgt_lang
    return LanguagePair(src_lang=src_lang, tgt_lang=tgt_lang)
