"""Runs `nmt-distill` and `nmt-backtranslate`, which make a corpus of text and its translations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

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
from nmt.data.text import check_file, is_packed, is_stream, read_input
from nmt.errors import DataError
from nmt.preprocess.sources import match_files
from nmt.runtime.progress import Progress
from nmt.translate.lines import HashedInput
from nmt.translate.resume import PartFile, describe_job, part_path, remove_part
from nmt.translate.synthesis import FILES, SynthesisCounts, keep_pairs, publish, read_counts

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

    Work that was killed is resumed. Returns the direction of the pairs.
    """
    files = [file for name in config.input or [] for file in match_files(name).values()]
    for file in files:
        if file != "-":
            check_file(resolve(file))
    folder = resolve(config.output)
    _check_output(folder, files)
    shared = {field.name: getattr(config, field.name) for field in fields(TranslationConfig)}
    work = TranslationJob(TranslateConfig(**shared, input="-", output="-"))
    job = {**describe_job(config, work.search), "is_reversed": is_reversed}
    has_stream = any(map(is_stream, files))
    counts = None if has_stream else read_counts(folder, job, lambda: _read(files))
    if counts is not None:
        remove_part(folder / "pairs")  # left by a kill just after the summary was written
        log.info("%s is complete already, for this model, text and settings", config.output)
    else:
        is_default = config.output == type(config).output
        if is_default and (folder / FILES[-1]).exists():
            raise DataError(
                f"{config.output} holds a corpus of another model, text or settings; give "
                f"output=FOLDER, or remove {config.output} first"
            )
        counts = _translate(config, files, work, job, is_reversed=is_reversed)
    print(counts.table(config))
    if not counts.pairs:
        raise DataError(f"no pair is left in {config.output}; the lines above say why")
    return _find_direction(config, work, is_reversed=is_reversed)


def _check_output(folder: Path, files: list[str]) -> None:
    """Raise a `DataError` for files in the output folder that we did not write."""
    inputs = {resolve(file).resolve() for file in files}
    is_ours = (folder / FILES[-1]).exists() or part_path(folder / "pairs").exists()
    for path in (folder / name for name in FILES[:-1]):
        if path.resolve() in inputs or (path.exists() and not is_ours):
            raise DataError(
                f"{path} is the input, or was not written by this command; give output=FOLDER"
            )


def _find_direction(
    config: SynthesisConfig, work: TranslationJob, *, is_reversed: bool
) -> LanguagePair:
    """Return the languages of the corpus: from the settings, else the only ones of the model."""
    directions = {(d.src_lang, d.tgt_lang) for d in default_directions(work.directions)}
    src_lang, tgt_lang = directions.pop() if len(directions) == 1 else ("", "")
    src_lang = config.src_lang or src_lang
    tgt_lang = config.tgt_lang or tgt_lang
    return LanguagePair(tgt_lang, src_lang) if is_reversed else LanguagePair(src_lang, tgt_lang)


def _translate(
    config: SynthesisConfig,
    files: list[str],
    work: TranslationJob,
    job: dict[str, object],
    *,
    is_reversed: bool,
) -> SynthesisCounts:
    """Translate the lines that are not translated yet, and write the files of the corpus."""
    folder = resolve(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    total_bytes: int | None = None
    if not any(is_stream(file) or is_packed(file) for file in files):
        total_bytes = sum(resolve(file).stat().st_size for file in files)
    with contextlib.ExitStack() as stack:
        pairs = stack.enter_context(PartFile(folder / "pairs", job, SynthesisCounts))
        source = pairs.resume(lambda: _read(files), is_stream=any(map(is_stream, files)))
        bar = Progress("translate", "lines", total_bytes=total_bytes, done=source.num_lines)
        progress = stack.enter_context(bar)
        for window, results in work.run(source.windows(config.window_lines), stack):
            data, counts = keep_pairs(
                window, results, config, work.tokenizer.src, is_reversed=is_reversed
            )
            pairs.append(data, counts, window)
            progress.update(window.next_line - progress.done, read_bytes=window.read_bytes)
        progress.finish()
        summary = {"input": config.input, "job": job}
        total = pairs.finish(source, lambda state: publish(folder, pairs.path, state, summary))
    assert isinstance(total, SynthesisCounts)
    return total


def _read(files: list[str]) -> HashedInput:
    """Read the lines of all files in turn."""

    def lines() -> Iterator[str]:
        for file in files:
            yield from read_input(file)

    return HashedInput(lines())
