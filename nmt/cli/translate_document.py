"""Read and write the documents of `nmt-translate`: DOCX, HTML, XLIFF and other formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from nmt.config import OutputFormat, TranslateConfig, resolve_path
from nmt.data.text import open_bytes
from nmt.documents.document import Document, ReadOptions
from nmt.documents.formats import read_document
from nmt.documents.suffixes import PACKAGES
from nmt.documents.texts import list_sentences, remove_target_tag
from nmt.errors import ConfigError, DataError
from nmt.runtime.files import replace_file
from nmt.translate.job import JobState, partial_path
from nmt.translate.results import LineResult, result_from_json

_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class InputDocument:
    """A document whose sentences are the lines to translate."""

    document: Document
    sentences: list[str]  # the sentences of all texts of the document, in order
    output: Path  # the translated document

    def adapt(self, config: TranslateConfig) -> TranslateConfig:
        """Return the settings for translating the sentences.

        The results are stored as JSON until the document is written.
        """
        needs_alignment = any(text.needs_alignment for text in self.document.texts)
        return replace(
            config, format=OutputFormat.json, alignment=needs_alignment or config.alignment
        )

    @property
    def num_bytes(self) -> int:
        """Size of the sentences as lines."""
        return sum(len(sentence.encode()) + 1 for sentence in self.sentences)

    def write(self, job_state: JobState, *, prefix: str, num_tag_tokens: int) -> None:
        """Write the document with the results of its sentences from the partial file of the job.

        `prefix` is the text that preceded each sentence in the input of the model. `num_tag_tokens`
        is the number of tokens of the target tag before each translation.
        """
        with partial_path(self.output).open("rb") as lines:
            results = (
                remove_target_tag(result_from_json(json.loads(line)), num_tag_tokens)
                for line in lines
            )
            content = self.document.assemble(list(self._render(results, prefix)))
        with replace_file(self.output) as temporary:
            temporary.write_bytes(content)

    def _render(self, results: Iterator[LineResult], prefix: str) -> Iterator[str]:
        """Yield the translation of each text of the document."""
        for text in self.document.texts:
            text_results = list(islice(results, len(text.sentences)))
            yield text.render(text_results, prefix=prefix)


def open_document(config: TranslateConfig, output_file: Path | None) -> InputDocument | None:
    """Read the input if the output has the same format.

    `output_file` is the file to write, or None for a stream. Returns None for text to translate
    line by line. Raises a `ConfigError` for settings that do not apply to documents, and a
    `DataError` for an invalid document.
    """
    name = config.input
    suffix = Path(name).suffix.lower()
    if output_file is None or output_file.suffix.lower() != suffix:
        if suffix in PACKAGES:
            raise ConfigError(
                f"output={config.output}: give the path of a file that ends in {suffix}"
            )
        return None
    problem = "does not work with documents"
    config.require(config.format is OutputFormat.text, "format", problem)
    config.require(config.n_best == 1, "n_best", problem)
    config.require(config.prefixes is None, "prefixes", problem)
    config.require(config.context == 0, "context", problem)
    with open_bytes(resolve_path(name)) as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DataError(f"{name} has more than {_MAX_BYTES} bytes; cut it into several")
    options = ReadOptions(tgt_lang=config.tgt_lang or "")
    try:
        document = read_document(Path(name).name, content, options)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return InputDocument(document, list_sentences(document.texts), output_file)
