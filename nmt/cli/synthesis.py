"""Runs `nmt-distill` and `nmt-backtranslate`: text and its translations become a corpus."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import fields

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
    """Make a corpus of sources and their translations by a teacher; log what comes next."""
    direction = synthesize(config, is_reversed=False)
    sides = {f"data.train.{side}": f"{config.output}/{side}.txt" for side in ("src", "tgt")}
    _log_next(config, direction, sides)


def backtranslate(config: BacktranslateConfig) -> None:
    """Make a corpus of targets and their translations by a reverse model; log what comes next."""
    direction = synthesize(config, is_reversed=True)
    sides = {f"data.corpora.parallel.{side}": f"TRAIN.{side}" for side in ("src", "tgt")}
    sides |= {f"data.corpora.bt.{side}": f"{config.output}/{side}.txt" for side in ("src", "tgt")}
    tag = {"data.corpora.bt.src_tag": config.tag} if config.tag else {}
    _log_next(config, direction, sides | tag)


def _log_next(config: SynthesisConfig, direction: LanguagePair, settings: dict[str, str]) -> None:
    """Log the command that makes a data folder of the corpus."""
    languages = {"data.src_lang": direction.src_lang, "data.tgt_lang": direction.tgt_lang}
    held_out = {f"data.valid.{side}": f"VALID.{side}" for side in ("src", "tgt")}
    settings |= {key: name for key, name in languages.items() if name} | held_out
    settings["data_dir"] = f"{config.output}/prepared"
    log.info("wrote %s; next: %s", config.output, command_line("preprocess", **settings))


def synthesize(config: SynthesisConfig, *, is_reversed: bool) -> LanguagePair:
    """Translate `input` and write the pairs to keep to the folder `output`, or go on where that was
    killed; print the counts and return the direction of the pairs.
    """
    files = [file for name in config.input or [] for file in match_files(name).values()]
    for file in files:
        if file != "-":
            check_file(resolve(file))
    folder = resolve(config.output)
    *sides, summary = (folder / name for name in FILES)
    inputs = {resolve(file).resolve() for file in files}
    is_ours = summary.exists() or part_path(folder / "pairs").exists()
    for path in sides:
        if path.resolve() in inputs or (path.exists() and not is_ours):
            raise DataError(f"{path} is the input, or no output of ours; give output=FOLDER")
    shared = {field.name: getattr(config, field.name) for field in fields(TranslationConfig)}
    work = TranslationJob(TranslateConfig(**shared | {"input": "-", "output": "-"}))
    job = {**describe_job(config, work.search), "is_reversed": is_reversed}
    has_stream = any(map(is_stream, files))
    counts = None if has_stream else read_counts(folder, job, lambda: _read(files))
    is_named = config.output != type(config).output
    if counts is None and not is_named and summary.exists():
        raise DataError(
            f"{config.output} holds a corpus of another model, text or settings; give "
            f"output=FOLDER, or remove {config.output} first"
        )
    if counts is not None:
        remove_part(folder / "pairs")  # of a kill just after the summary was written
        log.info("%s is whole already, of this model, text and settings", config.output)
    else:
        counts = _translate(config, files, work, job, is_reversed=is_reversed)
    print(counts.table(config))
    if not counts.pairs:
        raise DataError(f"no pair is left in {config.output}; the lines above say why")
    found = {(d.src_lang, d.tgt_lang) for d in default_directions(work.directions)}
    src_lang, tgt_lang = found.pop() if len(found) == 1 else ("", "")
    names = (config.src_lang or src_lang, config.tgt_lang or tgt_lang)
    return LanguagePair(*(names[::-1] if is_reversed else names))


def _translate(
    config: SynthesisConfig, files: list[str], work: TranslationJob, job: dict[str, object], *,
    is_reversed: bool,
) -> SynthesisCounts:  # fmt: skip
    """Translate what is not translated yet, and write the files of the corpus."""
    folder, src = resolve(config.output), work.tokenizer.src
    folder.mkdir(parents=True, exist_ok=True)
    has_stream = any(map(is_stream, files))
    sizes = [resolve(f).stat().st_size for f in files if not (is_stream(f) or is_packed(f))]
    total_bytes = sum(sizes) if len(sizes) == len(files) else None
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(PartFile(folder / "pairs", job, SynthesisCounts))
        source = part.resume(lambda: _read(files), is_stream=has_stream)
        bar = Progress("translate", "lines", total_bytes=total_bytes, done=source.num_lines)
        progress = stack.enter_context(bar)
        for window, results in work.run(source.windows(config.window_lines), stack):
            part.append(*keep_pairs(window, results, config, src, is_reversed=is_reversed), window)
            progress.update(window.next_line - progress.done, read_bytes=window.read_bytes)
        progress.finish()
        about = {"input": config.input, "job": job}
        counts = part.finish(source, lambda state: publish(folder, part.path, state, about))
    assert isinstance(counts, SynthesisCounts)
    return counts


def _read(files: list[str]) -> HashedInput:
    def lines() -> Iterator[str]:
        for file in files:
            yield from read_input(file)

    return HashedInput(lines())
