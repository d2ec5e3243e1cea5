"""Runs `nmt-translate`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from nmt.config import TranslateConfig
from nmt.data.corpus import read_input
from nmt.distributed import set_num_threads
from nmt.errors import ConfigError
from nmt.files import replace_file
from nmt.inference.results import Translation
from nmt.inference.translator import Translator
from nmt.options import OutputFormat, resolve

log = logging.getLogger(__name__)


def run(config: TranslateConfig, config_yaml: str) -> None:
    """Translate `input` to `output`; a file is written beside its place and renamed into it."""
    _check_output(config.output)
    set_num_threads(config.num_threads)
    translator = Translator.load(config.model_dir, device=config.device, dtype=config.dtype)
    search = translator.search_config(
        beam_size=config.beam_size,
        length_penalty=config.length_penalty,
        max_length_a=config.max_length_a,
        max_length_b=config.max_length_b,
    )
    if config.n_best > search.beam_size:
        raise ConfigError(
            f"n_best={config.n_best} is more than beam_size={search.beam_size}; raise beam_size"
        )
    is_typed = config.input == "-" and sys.stdin is not None and sys.stdin.buffer.isatty()
    found = translator.n_best_stream(
        read_input(config.input),
        search,
        max_tokens=config.max_tokens,
        window_lines=1 if is_typed else config.window_lines,
    )
    _write(_format(found, config), config.output)


def _format(found: Iterable[list[Translation]], config: TranslateConfig) -> Iterator[str]:
    num_cut = 0
    for index, translations in enumerate(found):
        num_cut += not translations[0].finished
        if config.format is OutputFormat.text:
            yield translations[0].text
        else:
            hypotheses = [
                {
                    "text": t.text,
                    "score": t.score,
                    "log_prob": t.log_prob,
                    "tokens": t.tokens,
                    "finished": t.finished,
                }
                for t in translations[: config.n_best]
            ]
            yield json.dumps({"index": index, "hypotheses": hypotheses}, ensure_ascii=False)
    if num_cut:
        log.warning(
            "%d translations met the length limit; see max_length_a and max_length_b", num_cut
        )


def _check_output(output: str) -> None:
    """Refuse what cannot be written to before the model is loaded."""
    if output == "-":
        return
    path = resolve(output)
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} does not exist; make the folder first")
    if path.is_dir():
        raise ConfigError(f"output={output}: is a folder; give the path of a file")


def _write(lines: Iterable[str], output: str) -> None:
    if output == "-":
        if sys.stdout is None:
            raise ConfigError("stdout is closed; give output=FILE")
        for line in lines:
            sys.stdout.buffer.write(line.encode("utf-8") + b"\n")
            sys.stdout.buffer.flush()
        return
    path = resolve(output).resolve()  # a link stays, and what it points to is replaced
    if path.exists() and not path.is_file():
        _write_file(path, lines)  # a pipe or a device cannot be replaced
    else:
        with replace_file(path) as temporary:
            _write_file(temporary, lines)


def _write_file(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(line + "\n" for line in lines)
