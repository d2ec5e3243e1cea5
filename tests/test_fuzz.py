"""Generated files for the readers of text formats: each is read, or refused by one `NmtError`.

`NMT_FUZZ_EXAMPLES=100000 pytest tests/test_fuzz.py` tries more files, and others in each run. Files
that a reader once failed on are in tests/fuzz; their names begin with the name of the reader.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmt.checkpoint import load_info
from nmt.config import ModelConfig, TrainConfig
from nmt.errors import NmtError
from nmt.importing.piece_ids import read_yaml_vocabulary
from nmt.runtime.manifest import MANIFEST, read_entries, verify
from nmt.runtime.metadata import read_json, read_yaml, to_dataclass
from nmt.runtime.metrics_log import read_metrics_log
from nmt.serve.documents import ReadOptions, read_document
from nmt.translate.results import LineResult, Translation

CORPUS = Path(__file__).parent / "fuzz"
NUM_EXAMPLES = int(os.environ.get("NMT_FUZZ_EXAMPLES", "0"))
HTML = [
    "<p>",
    "</p>",
    "<b class='x'>",
    "</b>",
    "<br/>",
    "<!--",
    "-->",
    "<script>",
    "</script>",
    "<",
]
HTML += [
    "&amp;",
    "&#0;",
    "&#x110000;",
    "a",
    "B. ",
    "\u0301",
    "\ufeff",
    "\n",
    '"',
    "<![CDATA[",
    "]]>",
]
SUBTITLES = [
    "1",
    "\n",
    "\r\n",
    "\n\n",
    "00:00:01,000 --> 00:00:02,000",
    "-->",
    "- a",
    "<i>",
    "</i>",
    "\u2028",
]
TABLE = ["\t", ",", ";", '"', '""', "\n", "\r", "a", "=1+1", "\0", "\u2028", " "]
METADATA = ["{", "}", "[", "]", ":", ",", '"update"', '"files"', '"model"', '"d_model"', "1", "-1"]
METADATA += [
    "1e999",
    "NaN",
    "null",
    '"',
    "\\ud800",
    "\n",
    "- ",
    "? ",
    "&a",
    "*a",
    "!!python/none",
    "9" * 30,
]

Reader = Callable[[Path], object]


def translate_document(path: Path) -> None:
    """Read a file, and build it again from translations that equal the source."""
    document = read_document(path.name, path.read_bytes(), ReadOptions())
    texts = []
    for source in document.texts:
        results = []
        for sentence in source.sentences:
            tokens = sentence.split()
            translation = Translation(sentence, 0, 0, tokens, True, [], list(range(len(tokens))))
            results.append(LineResult([translation], source_tokens=[*tokens, "</s>"]))
        texts.append(source.render(results))
    document.assemble(texts)


READERS: dict[str, tuple[str, list[str], Reader]] = {  # file name, pieces of its text, function
    "html": ("page.html", HTML, translate_document),
    "srt": ("subtitles.srt", SUBTITLES + HTML[:5], translate_document),
    "tsv": ("table.tsv", TABLE, translate_document),
    "csv": ("table.csv", TABLE, translate_document),
    "manifest": (MANIFEST, METADATA, lambda path: read_entries(path.parent)),
    "verify": (MANIFEST, METADATA, lambda path: verify(path.parent)),
    "config": ("config.json", METADATA, lambda path: load_info(path.parent)),
    "model": (
        "model.json",
        METADATA,
        lambda path: to_dataclass(ModelConfig, read_json(path), path),
    ),
    "train": (
        "config.yaml",
        METADATA,
        lambda path: to_dataclass(TrainConfig, read_yaml(path), path),
    ),
    "metrics": ("metrics.jsonl", METADATA, read_metrics_log),
    "vocabulary": ("vocab.yml", [*METADATA, "\u2581", "</s>: 0"], read_yaml_vocabulary),
}


def check(name: str, content: bytes, folder: Path) -> None:
    file_name, _, reader = READERS[name]
    path = folder / file_name
    path.write_bytes(content)
    assert "\n" not in refusal(reader, path)


def refusal(reader: Reader, path: Path) -> str:
    """Return the message with which a reader refuses a file, "" if it reads the file."""
    try:
        reader(path)
    except NmtError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_generated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    pieces = READERS[name][1]
    text = st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=40).map("".join)
    contents = text.map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=40)

    @settings(
        max_examples=NUM_EXAMPLES or 60,
        derandomize=NUM_EXAMPLES == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(content=contents)
    def run(content: bytes) -> None:
        check(name, content, tmp_path)

    run()


def test_files_that_readers_failed_on_are_read_or_refused(tmp_path: Path) -> None:
    for path in sorted(CORPUS.iterdir()):
        check(path.name.split("-")[0], path.read_bytes(), tmp_path)
