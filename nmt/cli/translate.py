"""Run `nmt-translate`, and translate windows of lines for other commands."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import torch

from nmt.cli.streams import check_input, find_output, input_size, open_input, open_output
from nmt.config import (
    Engine,
    FileTranslationConfig,
    LanguagePairConfig,
    OutputFormat,
    SearchConfig,
    TooLong,
    TranslateConfig,
    resolve_path,
)
from nmt.data.languages import encode_tag, find_source_prefix
from nmt.data.text import count_lines, is_stream, read_input
from nmt.documents.suffixes import FORMATS, LINE_FORMATS
from nmt.errors import ConfigError, DataError, NmtError
from nmt.runtime.cluster import open_workers
from nmt.runtime.distributed import choose_num_processes, set_num_threads
from nmt.runtime.pool import get_worker_index
from nmt.runtime.progress import Progress
from nmt.translate.context import check_context
from nmt.translate.job import JobState, PartialFile, describe_job
from nmt.translate.options import LineOptions
from nmt.translate.results import LineCounts, LineResult, render
from nmt.translate.translator import Translator
from nmt.translate.windows import Window, WindowReader

if TYPE_CHECKING:
    from nmt.cli.translate_document import InputDocument

log = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=FileTranslationConfig)


def translate(config: TranslateConfig) -> None:
    """Translate `input` to `output`.

    Writes the output of each window to a stream right after its translation. A file is written
    under another name and renamed when it is complete. After a kill, the same command resumes it.
    """
    output_file = _check_paths(config)
    document = _open_document(config, output_file)
    if document is not None:
        config = document.adapt(config)
    config = with_chosen_backend(config)
    translator = WindowTranslator(config)
    is_interactive = config.input == "-" and sys.stdin is not None and sys.stdin.buffer.isatty()
    if is_interactive:
        log.info("type a line and Enter for its translation, Ctrl-D to end; or give input=FILE")
    with contextlib.ExitStack() as stack:
        output: PartialFile | _OutputStream
        if output_file is None:
            reader = _open_stream_reader(config, translator, stack)
            output = _OutputStream(open_output(config.output, stack))
        else:
            output = stack.enter_context(
                PartialFile(output_file, describe_job(config, translator.search))
            )
            has_prefix_stream = config.prefixes is not None and is_stream(config.prefixes)
            reader = output.resume(
                lambda: _open_reader(config, _read_lines(config, document)),
                is_stream=is_stream(config.input) or has_prefix_stream,
            )
        progress = stack.enter_context(
            _open_progress(config, document, reader.num_lines, is_interactive=is_interactive)
        )
        for window, results in translator.translate_windows(reader, stack):
            output_bytes, counts = translator.render(window, results)
            output.append(output_bytes, counts, window)
            progress.update(len(window.lines), read_bytes=window.num_bytes)
        if not is_interactive or output_file is not None:
            progress.finish()
        write_output = None
        if document is not None:
            write_output = partial(
                document.write,
                prefix=translator.source_prefix,
                num_tag_tokens=translator.num_tag_tokens,
            )
        total_counts = output.finish(reader, write_output)
    _report_counts(total_counts, config)


def _open_document(config: TranslateConfig, output_file: Path | None) -> InputDocument | None:
    """Open the input if it is a document, such as a DOCX file, and not lines of text."""
    suffix = Path(config.input).suffix.lower()
    if suffix not in FORMATS or suffix in LINE_FORMATS:
        return None
    # imported only here, since it imports the readers of all formats, which takes time
    from nmt.cli.translate_document import open_document

    return open_document(config, output_file)


def _open_stream_reader(
    config: TranslateConfig, translator: WindowTranslator, stack: contextlib.ExitStack
) -> WindowReader:
    """Open the input of a job whose output is a stream."""
    lines, has_more = open_input(config.input, stack)
    if translator.is_in_process:
        # A window ends if no further line is waiting, so that its lines are translated at once.
        return _open_reader(config, lines, has_more)
    return _open_reader(config, lines)  # workers get full windows, which are faster


def _read_lines(config: TranslateConfig, document: InputDocument | None) -> Iterator[str]:
    """Return the sentences of the document, if any, or else the lines of the input."""
    return read_input(config.input) if document is None else iter(document.sentences)


class _OutputStream:
    """Writes translations to a stream. `append` and `finish` are called as in `PartialFile`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._counts = LineCounts()

    def append(self, data: bytes, counts: LineCounts, window: Window) -> None:
        """Write the output of `window` at once."""
        self._stream.write(data)
        self._stream.flush()
        self._counts.add(counts)

    def finish(
        self, reader: WindowReader, write_output: Callable[[JobState], None] | None = None
    ) -> LineCounts:
        """Return the counts of all windows. There is nothing left to write."""
        return self._counts


class WindowTranslator:
    """Translates windows of lines in this process, in one process per device, or on a cluster."""

    def __init__(self, config: TranslateConfig) -> None:
        self.config = config
        set_num_threads(config.num_threads)
        self._num_workers = choose_num_processes(config.devices, config.device)
        self.is_in_process = config.scheduler is None and self._num_workers == 1
        # if workers translate, this process only needs the settings and tokenizers
        device = config.device if self.is_in_process else "cpu"
        translator = load_translator(config, device)
        self.search, self.options = _resolve_settings(config, translator)
        self.tokenizer = translator.tokenizer
        self.directions = translator.directions
        self.source_prefix = find_source_prefix(translator.tokenizer.src, self.options.tags)
        """The text that precedes each line in the input of the model, such as a language tag."""
        tag_ids = encode_tag(translator.tokenizer.tgt, self.options.tags.tgt)
        self.num_tag_tokens = len(tag_ids)  # tokens of the target tag before each translation
        self._translator = translator if self.is_in_process else None

    def translate_windows(
        self, reader: WindowReader, stack: contextlib.ExitStack
    ) -> Iterable[tuple[Window, list[LineResult]]]:
        """Iterate over the windows of `reader` and the results of their lines, in order.

        If workers translate, they stop when `stack` is closed.
        """
        if self._translator is not None:
            return self._translator.translate_windows(reader, self.search, self.options)
        folders = [str(resolve_path(folder)) for folder in self.config.model_dir]
        config = replace(self.config, model_dir=folders)
        # each worker calls the factory once, to load the model
        function_factory = partial(
            _load_window_function, config, self._num_workers, self.search, self.options
        )
        workers = open_workers(config.scheduler, self._num_workers, function_factory)
        return stack.enter_context(workers).map(reader)

    def render(self, window: Window, results: list[LineResult]) -> tuple[bytes, LineCounts]:
        """Return the output of a window in the format of the job, and the counts of its lines."""
        return render(
            window,
            results,
            output_format=self.config.format,
            n_best=self.options.n_best,
            protect=self.search.protect,
            tags=self.options.tags,
        )


def _load_window_function(
    config: TranslateConfig, num_workers: int, search: SearchConfig, options: LineOptions
) -> Callable[[Window], list[LineResult]]:
    """Load the model in a worker, and return a function that translates a window.

    Workers on this machine share its cores, and each uses one GPU. Workers of a Dask scheduler use
    `num_threads` threads if it is set, and otherwise keep the number that they already use.
    """
    device = config.device
    if config.scheduler is None:
        threads_per_worker = max(1, torch.get_num_threads() // num_workers)
        torch.set_num_threads(config.num_threads or threads_per_worker)
        if device in ("auto", "cuda") and torch.cuda.is_available():
            device_index = get_worker_index() % torch.cuda.device_count()
            device = f"cuda:{device_index}"
    elif config.num_threads:
        torch.set_num_threads(config.num_threads)
    translator = load_translator(config, device)

    def translate_window(window: Window) -> list[LineResult]:
        translated_windows = list(translator.translate_windows([window], search, options))
        _, results = translated_windows[0]
        return results

    return translate_window


def with_chosen_backend(config: ConfigT) -> ConfigT:
    """Return the settings with a chosen backend and its quantization instead of `backend=auto`.

    Called before workers start, so that all workers use the same backend. If another backend is
    chosen when a job is resumed, the job starts over.
    """
    if config.backend is not Engine.auto:
        return config
    # imported only here, since these modules import the exporters, which takes time
    from nmt.export.conversion import MAX_POSITIONS
    from nmt.translate.engines.auto import choose_engine
    from nmt.translate.engines.auto_backend import check_reproducible
    from nmt.translate.engines.ctranslate2 import check_search

    def check_settings(defaults: SearchConfig) -> None:
        """Raise a `ConfigError` for a setting that CTranslate2 does not support."""
        search = replace(defaults, **config.search_changes())
        check_search(search)
        check_reproducible(search)
        if config.max_source_length > MAX_POSITIONS:
            raise ConfigError(
                f"max_source_length={config.max_source_length}: CTranslate2 translates at most "
                f"{MAX_POSITIONS} tokens"
            )

    choice = choose_engine(
        config.model_dir,
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        check_settings=check_settings,
    )
    return replace(config, backend=choice.backend, quantization=choice.quantization)


def load_translator(config: LanguagePairConfig, device: str) -> Translator:
    """Load the model or ensemble in `model_dir` on `device`."""
    return Translator.load(
        config.model_dir,
        device=device,
        dtype=config.dtype,
        backend=config.backend,
        quantization=config.quantization,
        combine=config.combine,
        num_threads=config.num_threads,
    )


def _resolve_settings(
    config: TranslateConfig, translator: Translator
) -> tuple[SearchConfig, LineOptions]:
    """Return the search settings, with the defaults of the model, and the options for lines.

    Loads the models that rerank, if any. Raises a `ConfigError` for settings that the model or the
    backend does not support.
    """
    search = translator.search_config(**config.search_changes())
    n_best = config.n_best
    if search.alternatives:  # the number of alternatives is the number of translations to return
        n_best = search.alternatives
    elif n_best > search.beam_size and not search.sampling:
        raise ConfigError(
            f"n_best={config.n_best} is more than beam_size={search.beam_size}; set "
            f"beam_size={config.n_best}"
        )
    if config.seed is not None and not search.sampling:
        raise ConfigError(f"seed={config.seed}: only works with sampling=true")
    translator.backend.check(search)
    check_context(config.context, translator.tokenizer)
    options = LineOptions(
        n_best=n_best,
        max_tokens=config.max_tokens,
        too_long=config.too_long,
        max_source_length=config.max_source_length,
        recase=config.recase,
        copy_symbols=config.copy_symbols,
        unk_replacement=config.unk_replacement,
        rerank=config.enabled_reranking,
        context=config.context,
        with_scores=config.format is OutputFormat.json or n_best > 1,
        tags=translator.choose_tags(**config.language_options),
    )
    translator.load_reranker(options, search)  # raises an error before text is read
    return search, options


def _check_paths(config: TranslateConfig) -> Path | None:
    """Check inputs and output before the model is loaded; return the file to write, if any.

    Returns None if the output is a stream. Raises an error for files that cannot be read or
    written, and if the numbers of prefixes and lines differ.
    """
    inputs = [config.input]
    if config.prefixes is not None:
        inputs.append(config.prefixes)
    output_file = find_output(config.output, inputs)
    if output_file is not None and not os.access(output_file.parent, os.W_OK):
        raise ConfigError(
            f"output={config.output}: {output_file.parent} is not writable; choose another folder"
        )
    if output_file is not None and output_file.is_file() and output_file.stat().st_size:
        log.info("%s exists; the complete translation replaces it", config.output)
    check_input(config.input)
    if config.prefixes is None:
        return output_file
    if config.prefixes == "-":
        raise ConfigError("prefixes=-: stdin is for the text; give the path of a file")
    check_input(config.prefixes)
    if not is_stream(config.input) and not is_stream(config.prefixes):
        num_lines = count_lines(config.input)
        num_prefixes = count_lines(config.prefixes)
        if num_lines != num_prefixes:
            raise DataError(
                f"{config.input} has {num_lines} lines, {config.prefixes} {num_prefixes}; "
                "give one prefix per line of text; a prefix may be empty"
            )
    return output_file


def _open_reader(
    config: TranslateConfig, lines: Iterator[str], has_more: Callable[[], bool] | None = None
) -> WindowReader:
    """Return a reader of windows of `lines` and the prefixes, see `WindowReader`."""
    prefixes = None
    if config.prefixes is not None:
        prefixes = read_input(config.prefixes)
    return WindowReader(
        lines,
        prefixes,
        window_lines=config.window_lines,
        context=config.context,
        has_more=has_more,
    )


def _open_progress(
    config: TranslateConfig,
    document: InputDocument | None,
    done_lines: int,
    *,
    is_interactive: bool,
) -> Progress:
    """Start the progress display, without a bar if the terminal also shows input or output."""
    shows_output = config.output == "-" and sys.stdout is not None and sys.stdout.isatty()
    total_bytes = input_size(config.input) if document is None else document.num_bytes
    return Progress(
        "translate",
        "lines",
        total_bytes=total_bytes,
        done=done_lines,
        has_bar=not shows_output and not is_interactive,
    )


def _report_counts(counts: LineCounts, config: TranslateConfig) -> None:
    """Log warnings for the counts of lines; raise an `NmtError` if any were not translated."""
    if counts.met_limit:
        message = "%d translations met the length limit; see max_length_a and max_length_b"
        log.warning(message, counts.met_limit)
    if counts.searched_again:
        message = "%d translations looped or met the length limit, and were searched again"
        log.warning(message, counts.searched_again)
    if counts.lost_protected:
        message = "%d translations lack a placeholder, tag or address of their line"
        log.warning(message, counts.lost_protected)
    if counts.too_long:
        action = "truncated" if config.too_long is TooLong.truncate else "translated in parts"
        message = "%d lines of more than max_source_length=%d tokens were %s"
        log.warning(message, counts.too_long, config.max_source_length, action)
    if counts.failed:
        raise NmtError(
            f"{counts.failed} lines could not be translated and are empty in the output; the "
            "warnings above name them"
        )
