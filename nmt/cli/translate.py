"""Runs `nmt-translate`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nmt import __version__
from nmt.checkpoint import find_model
from nmt.cli.streams import find_output, is_typed, num_bytes, open_input, open_output
from nmt.config import Engine, OutputFormat, SearchConfig, TooLong, TranslateConfig, resolve
from nmt.data.text import count_lines, open_bytes, read_input
from nmt.distributed import set_num_threads
from nmt.errors import ConfigError, DataError, NmtError
from nmt.progress import Progress
from nmt.translate.lines import LineCounts, LineOptions, render
from nmt.translate.resume import HashedInput, PartFile, RankShare, fingerprint, finish
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)


class _Job(NamedTuple):
    """What to translate with, and how."""

    config: TranslateConfig
    translator: Translator
    search: SearchConfig
    options: LineOptions
    share: RankShare


def run(config: TranslateConfig, config_yaml: str) -> None:
    """Translate `input` to `output`; a file is written beside its place, renamed into it when
    whole, and resumed after a kill.
    """
    share = RankShare.from_environment(os.environ)
    output = _find_output(config, share)
    _check_inputs(config)
    set_num_threads(config.num_threads)
    if share.rank:
        logging.getLogger("nmt").setLevel(logging.WARNING)
    job = _load(config, share)
    counts = _to_stream(job) if output is None else _to_file(job, output)
    if not share.rank:
        _report(counts, config)


def _load(config: TranslateConfig, share: RankShare) -> _Job:
    device = config.device
    if share.world_size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", share.rank))
        device = f"cuda:{local_rank % torch.cuda.device_count()}"  # each process has its own
    translator = Translator.load(
        config.model_dir,
        device=device,
        dtype=config.dtype,
        backend=config.backend,
        combine=config.combine,
        num_threads=config.num_threads,
    )
    names = [field.name for field in fields(SearchConfig)]
    search = translator.search_config(**{name: getattr(config, name) for name in names})
    if config.n_best > search.beam_size and not search.sampling:
        raise ConfigError(
            f"n_best={config.n_best} is more than beam_size={search.beam_size}; raise beam_size"
        )
    translator.backend.check(search)
    options = LineOptions(
        n_best=config.n_best,
        with_scores=config.format is OutputFormat.json,
        max_tokens=config.max_tokens,
        too_long=config.too_long,
        max_source_length=config.max_source_length,
    )
    return _Job(config, translator, search, options, share)


def _to_stream(job: _Job) -> LineCounts:
    """Write to stdout, or to a pipe or device; each window as soon as it is translated."""
    config, total = job.config, LineCounts()
    lines, has_more = open_input(config.input)
    source = HashedInput(lines, _read_prefixes(config))
    windows = source.windows(job.share, config.window_lines, has_more=has_more)
    with open_output(config.output) as stream, _progress(config, 0) as progress:
        for window, results in job.translator.translate_windows(windows, job.search, job.options):
            data, counts = render(window, results, config.format)
            stream.write(data)
            stream.flush()
            total.add(counts)
            progress.update(window.next_line - progress.done, read_bytes=window.read_bytes)
        if not is_typed(config.input):
            progress.finish()
    return total


def _to_file(job: _Job, output: Path) -> LineCounts:
    """Write to a file by way of a part file, from which a later process resumes."""
    config, share = job.config, job.share
    with PartFile(share.part_path(output), _describe(job)) as part:
        source = _open_source(config, part)
        windows = source.windows(share, config.window_lines)
        with _progress(config, part.state.lines) as progress:
            for window, results in job.translator.translate_windows(
                windows, job.search, job.options
            ):
                part.append(*render(window, results, config.format), window)
                progress.update(window.next_line - progress.done, read_bytes=window.read_bytes)
            progress.update(source.num_lines - progress.done, read_bytes=source.num_bytes)
            part.complete(source.num_lines, source.sha256)
            progress.finish()
        return finish(output, share, part, config.window_lines)


def _describe(job: _Job) -> dict[str, Any]:
    """Return all that decides what is written, but the input.

    `max_tokens`, `device` and `num_threads` are left out: they may change when a job is resumed.
    """
    config = job.config
    is_native = config.backend is Engine.native
    folders = [resolve(folder) for folder in config.model_dir]
    names = ("n_best", "format", "too_long", "max_source_length", "window_lines", "backend")
    return {
        "nmt": __version__,
        "model": [fingerprint(find_model(f) if is_native else f) for f in folders],
        "prefixes": config.prefixes is not None,
        **{name: getattr(config, name) for name in (*names, "dtype", "combine")},
        **asdict(job.search),
    }


def _open_source(config: TranslateConfig, part: PartFile) -> HashedInput:
    """Open the input where an earlier process stopped, or at its start when that is of no use."""
    if part.difference:
        log.warning("%s is of another job (%s); starting over", part.path, part.difference)
    source = HashedInput(read_input(config.input), _read_prefixes(config))
    done = part.state
    source.skip(done.lines)
    is_same = not done.lines or (source.num_lines, source.sha256) == (done.lines, done.sha256)
    if is_same:
        if done.lines:
            log.info("going on after line %d", done.lines)
    elif config.input == "-":
        raise ConfigError(
            f"stdin does not begin with the {done.lines} lines that {part.path} holds the "
            "translation of; give the same text again, or remove that file to start over"
        )
    else:
        log.warning("%s is of another input; starting over", part.path)
        source = HashedInput(read_input(config.input), _read_prefixes(config))
    part.start(over=not is_same)
    return source


def _read_prefixes(config: TranslateConfig) -> Iterator[str] | None:
    return None if config.prefixes is None else read_input(config.prefixes)


def _check_inputs(config: TranslateConfig) -> None:
    """Refuse what cannot be read, and prefixes that are not as many as the lines, before the model
    is loaded.
    """
    for path in (config.input, config.prefixes):
        if path is not None and path != "-":
            open_bytes(resolve(path)).close()
    if config.prefixes == "-":
        raise ConfigError("prefixes=-: stdin is for the text; give the path of a file")
    if config.prefixes is None or config.input == "-":
        return
    num_lines, num_prefixes = count_lines(config.input), count_lines(config.prefixes)
    if num_lines != num_prefixes:
        raise DataError(
            f"{config.input} has {num_lines} lines, {config.prefixes} {num_prefixes}; "
            "prefixes need one line for each, which may be empty"
        )


def _find_output(config: TranslateConfig, share: RankShare) -> Path | None:
    """Return the file to write, None for a stream; refuse what cannot be written to."""
    path = find_output(config.output)
    if path is not None:
        if config.input != "-" and path == resolve(config.input).resolve():
            raise ConfigError(
                f"output={config.output}: is the input; give the path of another file"
            )
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"output={config.output}: {path.parent} cannot be written to; choose another folder"
            )
    if share.world_size > 1:
        for key, is_stream in (("input", config.input == "-"), ("output", path is None)):
            if is_stream:
                raise ConfigError(
                    f"{key}={getattr(config, key)}: {share.world_size} processes "
                    f"(WORLD_SIZE) cannot share a stream; give {key}=FILE"
                )
    return path


def _progress(config: TranslateConfig, done_lines: int) -> Progress:
    shows_output = config.output == "-" and sys.stdout is not None and sys.stdout.isatty()
    has_bar = not shows_output and not is_typed(config.input)
    size = num_bytes(config.input)
    return Progress("translate", "lines", total_bytes=size, done=done_lines, has_bar=has_bar)


def _report(counts: LineCounts, config: TranslateConfig) -> None:
    if counts.met_limit:
        log.warning(
            "%d translations met the length limit; see max_length_a and max_length_b",
            counts.met_limit,
        )
    if counts.too_long:
        what = "cut off" if config.too_long is TooLong.truncate else "translated in parts"
        log.warning(
            "%d lines of more than max_source_length=%d tokens were %s",
            counts.too_long,
            config.max_source_length,
            what,
        )
    if counts.failed:
        raise NmtError(
            f"{counts.failed} lines could not be translated and are empty in the output; "
            "they are named above"
        )
