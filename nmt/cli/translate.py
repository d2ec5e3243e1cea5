"""Runs `nmt-translate` and `nmt-score`, which read and write files, stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch

from nmt.config import OutputFormat, ScoreConfig, SearchConfig, TooLong, TranslateConfig, resolve
from nmt.data.languages import DIRECTION, SEPARATOR, encode_sources
from nmt.data.text import (
    WaitingLines,
    count_lines,
    is_packed,
    is_stream,
    open_bytes,
    packed,
    pair_lines,
    read_input,
    read_stream,
)
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.cluster import open_workers
from nmt.runtime.distributed import num_processes, set_num_threads
from nmt.runtime.files import replace_file
from nmt.runtime.pool import worker_number
from nmt.runtime.progress import Progress
from nmt.translate.lines import HashedInput, LineCounts, LineOptions, LineResult, Window, render
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)


def translate(config: TranslateConfig) -> None:
    """Translate `input` to `output`: to a stream each window as soon as it is translated; a file is
    written beside its place, renamed into it when whole, and resumed after a kill.
    """
    path = _check_places(config)
    job = TranslationJob(config)
    is_typed = config.input == "-" and sys.stdin is not None and sys.stdin.buffer.isatty()
    if is_typed:
        log.info("type a line and Enter for its translation, Ctrl-D to end; or give input=FILE")
    counts = LineCounts()
    with contextlib.ExitStack() as stack:
        if path is None:
            stream = _open_stream(config.output, stack)
            lines, has_more = _open_input(config.input, stack)
            source = _hashed(config, lines)
            more = has_more if job.is_alone else None
            windows = source.windows(config.window_lines, has_more=more)
        else:
            from nmt.translate.resume import PartFile, describe_job  # of no use to a stream

            part = stack.enter_context(PartFile(path, describe_job(config, job.search)))
            source = part.resume(
                lambda: _hashed(config, read_input(config.input)),
                is_stream=is_stream(config.input) or is_stream(config.prefixes or ""),
            )
            windows = source.windows(config.window_lines)
        translated = job.run(windows, stack)
        progress = stack.enter_context(_progress(config, source.num_lines, is_typed=is_typed))
        for window, results in translated:
            data, window_counts = render(window, results, config.format, config.n_best)
            if path is None:
                stream.write(data)
                stream.flush()
                counts.add(window_counts)
            else:
                part.append(data, window_counts, window)
            progress.update(window.next_line - progress.done, read_bytes=window.read_bytes)
        progress.update(source.num_lines - progress.done, read_bytes=source.num_bytes)
        if not is_typed or path is not None:
            progress.finish()
        if path is not None:
            counts = part.finish(source)
    _report(counts, config)


class TranslationJob:
    """The model of `config` at work: here, in a process for each device, or on a cluster."""

    def __init__(self, config: TranslateConfig) -> None:
        self.config = config
        set_num_threads(config.num_threads)
        self._num_workers = num_processes(config.devices, config.device)
        self.is_alone = config.scheduler is None and self._num_workers == 1
        # others have the model on their devices; here it gives the defaults of its settings
        translator = _load(config, config.device if self.is_alone else "cpu")
        self.search, self._options = _settings(config, translator)
        self.tokenizer, self.directions = translator.tokenizer, translator.directions
        self._translator = translator if self.is_alone else None

    def run(
        self, windows: Iterable[Window], stack: contextlib.ExitStack
    ) -> Iterable[tuple[Window, list[LineResult]]]:
        """Yield each window with the results of its lines; workers end with `stack`."""
        if self._translator is not None:
            return self._translator.translate_windows(windows, self.search, self._options)
        folders = [str(resolve(folder)) for folder in self.config.model_dir]
        config = replace(self.config, model_dir=folders)
        make = partial(_start_translating, config, self._num_workers)
        workers = open_workers(config.scheduler, self._num_workers, make)
        return stack.enter_context(workers).map(windows)


def _start_translating(
    config: TranslateConfig, num_workers: int
) -> Callable[[Window], list[LineResult]]:
    """Return what translates windows in a worker: one of a host's processes, each with a share of
    the cores and its own GPU, or one of a cluster, as Dask set it up.
    """
    device = config.device
    if config.scheduler is None:
        torch.set_num_threads(config.num_threads or max(1, torch.get_num_threads() // num_workers))
        if device in ("auto", "cuda") and torch.cuda.is_available():
            device = f"cuda:{worker_number() % torch.cuda.device_count()}"
    elif config.num_threads:
        torch.set_num_threads(config.num_threads)
    translator = _load(config, device)
    search, options = _settings(config, translator)

    def run(window: Window) -> list[LineResult]:
        ((_, results),) = translator.translate_windows([window], search, options)
        return results

    return run


def score(config: ScoreConfig) -> None:
    """Score the pairs of `src` and `tgt` in windows; write one line each, to a stream as they come,
    to a file that is renamed into its place when whole.
    """
    places = [str(config.src), str(config.tgt)]  # both are given
    path = _find_output(config.output, places)
    set_num_threads(config.num_threads)
    translator = _load(config, config.device)
    src_name, tgt_name = ("stdin" if place == "-" else place for place in places)
    pairs = pair_lines(*map(read_input, places), names=(src_name, tgt_name))
    with contextlib.ExitStack() as stack:
        if path is None:
            stream = _open_stream(config.output, stack)
        else:
            file = stack.enter_context(stack.enter_context(replace_file(path)).open("wb"))
            stream = stack.enter_context(packed(file, path.suffix))
        for index, content in enumerate(_score(pairs, translator, config)):
            if config.format is OutputFormat.text:
                line = str(content[config.measure.value])
            else:
                line = json.dumps({"index": index, **content}, ensure_ascii=False)
            stream.write(line.encode("utf-8") + b"\n")
            if path is None:
                stream.flush()


def _score(
    pairs: Iterator[tuple[str, str]], translator: Translator, config: ScoreConfig
) -> Iterator[dict[str, Any]]:
    """Yield what JSON shows of each pair."""
    keys = ("length_penalty", "normalization", "word_reward", "coverage_penalty", "alignment")
    settings = {key: getattr(config, key) for key in keys}
    asked = {key: getattr(config, key) for key in DIRECTION}
    tags = translator.choose_tags(**asked)
    translator.backend.check(translator.search_config(**settings), scoring=True)
    src, tgt = translator.tokenizer.src, translator.tokenizer.tgt
    options = {"max_tokens": config.max_tokens, **settings, **asked}
    first_line = 0
    while window := list(islice(pairs, config.window_lines)):
        sources, targets = zip(*window, strict=True)
        found = translator.score_hypotheses(sources, targets, first_line=first_line, **options)
        first_line += len(window)
        for hypothesis, source in zip(found, sources, strict=True):
            content: dict[str, Any] = {
                "log_prob": hypothesis.log_prob,
                "per_token": hypothesis.log_prob / max(len(hypothesis.tokens), 1),
                "score": hypothesis.score,
                "tokens": tgt.pieces(hypothesis.tokens[:-1]),
                "token_log_probs": hypothesis.token_log_probs,
            }
            if hypothesis.alignment is not None:
                (ids,) = encode_sources(src, [source], tags)
                content["source_tokens"] = src.pieces([*ids, src.eos_id])
                content["alignment"] = hypothesis.alignment
            yield content


def _load(config: TranslateConfig | ScoreConfig, device: str) -> Translator:
    names = ("dtype", "backend", "combine", "num_threads")
    options = {name: getattr(config, name) for name in names}
    return Translator.load(config.model_dir, device=device, **options)


def _settings(config: TranslateConfig, translator: Translator) -> tuple[SearchConfig, LineOptions]:
    names = [field.name for field in fields(SearchConfig)]
    search = translator.search_config(**{name: getattr(config, name) for name in names})
    if config.n_best > search.beam_size and not search.sampling:
        raise ConfigError(
            f"n_best={config.n_best} is more than beam_size={search.beam_size}; raise beam_size"
        )
    if config.seed is not None and not search.sampling:
        raise ConfigError(f"seed={config.seed}: only works with sampling=true")
    translator.backend.check(search)
    if config.context and any(
        SEPARATOR not in side.all_pieces()
        for side in (translator.tokenizer.src, translator.tokenizer.tgt)
    ):
        rule = f"the model has no {SEPARATOR}; it needs data of nmt-preprocess with data.context"
        raise ConfigError(f"context={config.context}: {rule}")
    names = ["n_best", "max_tokens", "too_long", "max_source_length", "context"]
    options = {name: getattr(config, name) for name in names}
    tags = translator.choose_tags(**{name: getattr(config, name) for name in DIRECTION})
    with_scores = config.format is OutputFormat.json or config.n_best > 1
    return search, LineOptions(with_scores=with_scores, tags=tags, **options)


# --- inputs and outputs


def _check_places(config: TranslateConfig) -> Path | None:
    """Return the file to write, None for a stream. Before the model is loaded, refuse what cannot
    be read or written, and prefixes that are not as many as the lines.
    """
    path = _find_output(config.output, [config.input, config.prefixes or "-"])
    if path is not None and not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"output={config.output}: {path.parent} cannot be written to; choose another folder"
        )
    for text in (config.input, config.prefixes):
        if text is not None and not is_stream(text):
            with open_bytes(resolve(text)):
                pass
    if config.prefixes == "-":
        raise ConfigError("prefixes=-: stdin is for the text; give the path of a file")
    if config.prefixes is not None and not any(map(is_stream, (config.input, config.prefixes))):
        num_lines, num_prefixes = count_lines(config.input), count_lines(config.prefixes)
        if num_lines != num_prefixes:
            raise DataError(
                f"{config.input} has {num_lines} lines, {config.prefixes} {num_prefixes}; "
                "prefixes need one line for each, which may be empty"
            )
    return path


def _find_output(output: str, inputs: Iterable[str]) -> Path | None:
    """Return the file to write, None for a stream: stdout, a pipe or a device; refuse an input."""
    if output == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed; give output=FILE")
        return None
    path = resolve(output)
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} does not exist; make the folder first")
    if path.is_dir():
        raise ConfigError(f"output={output}: is a folder; give the path of a file")
    if is_stream(path):
        return None
    place = path.resolve()  # a link stays; its file is replaced
    if any(name != "-" and place == resolve(name).resolve() for name in inputs):
        raise ConfigError(f"output={output}: is the input; give the path of another file")
    return place


def _open_stream(output: str, stack: contextlib.ExitStack) -> IO[bytes]:
    return sys.stdout.buffer if output == "-" else stack.enter_context(resolve(output).open("wb"))


def _stdin_status() -> os.stat_result | None:
    """Return the status of stdin, None when it is closed or no file of the system."""
    try:
        return os.fstat(sys.stdin.buffer.fileno())
    except (AttributeError, OSError):
        return None


def _open_input(path: str, stack: contextlib.ExitStack) -> tuple[Iterator[str], Callable[[], bool]]:
    """Open the input; also return a function that says whether more of it is there already."""
    details = _stdin_status() if path == "-" else None
    if details is not None and not stat.S_ISREG(details.st_mode):  # a terminal, pipe or socket
        waiting = WaitingLines(sys.stdin.buffer.fileno())
        return read_stream(waiting, "stdin"), waiting.has_more
    if path == "-" or not is_stream(path) or is_packed(path):
        return read_input(path), lambda: True
    waiting = WaitingLines(stack.enter_context(resolve(path).open("rb", buffering=0)).fileno())
    return read_stream(waiting, path), waiting.has_more


def _hashed(config: TranslateConfig, lines: Iterator[str]) -> HashedInput:
    prefixes = None if config.prefixes is None else read_input(config.prefixes)
    return HashedInput(lines, prefixes, config.context)


def _progress(config: TranslateConfig, done_lines: int, *, is_typed: bool) -> Progress:
    shows_output = config.output == "-" and sys.stdout is not None and sys.stdout.isatty()
    size = None
    if config.input == "-":
        details = _stdin_status()
        size = details.st_size if details and stat.S_ISREG(details.st_mode) else None
    elif not is_packed(config.input) and not is_stream(config.input):
        size = resolve(config.input).stat().st_size
    has_bar = not shows_output and not is_typed
    return Progress("translate", "lines", total_bytes=size, done=done_lines, has_bar=has_bar)


def _report(counts: LineCounts, config: TranslateConfig) -> None:
    if counts.met_limit:
        message = "%d translations met the length limit; see max_length_a and max_length_b"
        log.warning(message, counts.met_limit)
    if counts.too_long:
        what = "cut off" if config.too_long is TooLong.truncate else "translated in parts"
        message = "%d lines of more than max_source_length=%d tokens were %s"
        log.warning(message, counts.too_long, config.max_source_length, what)
    if counts.failed:
        raise NmtError(
            f"{counts.failed} lines could not be translated and are empty in the output; "
            "they are named above"
        )
