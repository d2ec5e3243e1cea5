"""Generated and changed files for the readers of files: each is read, or refused by one `NmtError`.

`NMT_FUZZ_EXAMPLES=100000 pytest tests/test_fuzz.py` tries more files, and others in each run. Files
that a reader once failed on are in tests/fuzz; their names begin with the name of the reader.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fuzzing import example_settings
from hypothesis import given
from hypothesis import strategies as st
from test_foreign_files import write_run
from test_foreign_weights import make_zip
from toy import write_data

from nmt.checkpoint import load_info, load_tensors
from nmt.config import ModelConfig, TrainConfig
from nmt.data.shards import MappedShard
from nmt.data.tokenizer import Tokenizer
from nmt.documents.document import ReadOptions
from nmt.documents.formats import read_document
from nmt.errors import NmtError
from nmt.importing.marian import _load_arrays as load_arrays
from nmt.importing.marian import _parse_settings as parse_settings
from nmt.importing.piece_ids import read_yaml_vocabulary
from nmt.importing.settings import read_text
from nmt.importing.weights import TensorFile, load_pickle
from nmt.runtime.manifest import MANIFEST, read_entries, verify_checksums
from nmt.runtime.metadata import read_json, read_yaml, to_dataclass
from nmt.runtime.metrics_log import read_metrics_log
from nmt.training.checkpoints import load_checkpoint
from nmt.translate.results import LineResult, Translation

CORPUS = Path(__file__).parent / "fuzz"
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
XLIFF = [
    "<xliff>",
    "<trans-unit>",
    "<source>",
    "a b",
    "<g id='1'>",
    "<bpt id='1'/>",
    "<ept id='1'/>",
    "<mrk mtype='seg'>",
    "</mrk>",
    "</g>",
    "</source>",
    "<target/>",
    "</trans-unit>",
    "</xliff>",
    "&amp;",
    "<!--",
    "<![CDATA[",
    "\0",
]
MESSAGES = [
    "msgid ",
    "msgid_plural ",
    "msgstr ",
    "msgstr[0] ",
    "msgctxt ",
    '"',
    '"a %s b"\n',
    '""\n',
    "#, c-format\n",
    "\\n",
    "<b>",
    "</b>",
    "#~ ",
    "\n",
    "\0",
]
METADATA = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"update"',
    '"files"',
    '"model"',
    '"d_model"',
    "1",
    "-1",
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
    "xliff": ("units.xlf", XLIFF, translate_document),
    "po": ("messages.po", MESSAGES, translate_document),
    "tsv": ("table.tsv", TABLE, translate_document),
    "csv": ("table.csv", TABLE, translate_document),
    "manifest": (MANIFEST, METADATA, lambda path: read_entries(path.parent)),
    "verify": (MANIFEST, METADATA, lambda path: verify_checksums(path.parent)),
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
    "marian": ("decoder.yml", METADATA, lambda path: parse_settings(path, read_text(path))),
    "vocabulary": ("vocab.yml", [*METADATA, "\u2581", "</s>: 0"], read_yaml_vocabulary),
}


def read_trainer(path: Path) -> None:
    """Read the checkpoint of another folder with this `trainer.pt`."""
    folder = path.with_name("checkpoint")
    if not folder.exists():
        shutil.copytree(SEEDS["trainer"].parent, folder)
        (folder / MANIFEST).unlink()
    shutil.copyfile(path, folder / "trainer.pt")
    load_checkpoint(folder)


def read_shard(path: Path) -> None:
    shard = MappedShard(path)
    shard.largest_ids()
    for row, _ in enumerate(shard.lengths()):
        shard[row]
        shard.texts(row)


def read_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    tokenizer.decode(tokenizer.encode("the house"))
    tokenizer.all_pieces()


BINARY_READERS: dict[str, Reader] = {
    "safetensors": load_tensors,
    "torch": lambda path: TensorFile(path, load_pickle(path)),
    "oldtorch": lambda path: TensorFile(path, load_pickle(path)),
    "npz": load_arrays,
    "trainer": read_trainer,
    "shard": read_shard,
    "tokenizer": read_tokenizer,
}
SEEDS: dict[str, Path] = {}  # a valid file for each binary reader


@pytest.fixture(scope="module", autouse=True)
def _seeds(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write a valid file for each binary reader."""
    folder = tmp_path_factory.mktemp("seeds")
    for name in BINARY_READERS:
        SEEDS[name] = folder / name
    tensors = {"a": torch.zeros(4, 4), "b": torch.ones(3)}
    safetensors.torch.save_file(tensors, SEEDS["safetensors"])
    torch.save(tensors, SEEDS["torch"])
    torch.save(tensors, SEEDS["oldtorch"], _use_new_zipfile_serialization=False)
    SEEDS["npz"].write_bytes(make_zip({}))
    SEEDS["tokenizer"].write_bytes(tokenizer.model)
    write_data(folder, tokenizer, [(3, 4), (5, 2)] * 4)
    SEEDS["shard"] = next(folder.glob("train*.arrow"))
    write_run(folder / "run", tokenizer)
    SEEDS["trainer"] = folder / "run/checkpoints/step-00000002/trainer.pt"


def check(name: str, content: bytes, folder: Path) -> None:
    """Let a reader read a file with this content."""
    file_name = name
    reader = BINARY_READERS.get(name)
    if reader is None:
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

    @example_settings(25)
    @given(content=contents)
    def run(content: bytes) -> None:
        check(name, content, tmp_path)

    run()


@pytest.mark.parametrize("name", BINARY_READERS)
def test_changed_binary_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    seed = SEEDS[name].read_bytes()
    check(name, seed, tmp_path)
    positions = st.integers(0, len(seed) - 1)
    # numbers near the limits of a byte change sizes the most
    values = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    changes = st.lists(st.tuples(positions, values), min_size=1, max_size=8)

    @example_settings(25)
    @given(changes=changes, end=st.just(len(seed)) | positions)
    def run(changes: list[tuple[int, int]], end: int) -> None:
        content = bytearray(seed)
        for position, value in changes:
            content[position] = value
        check(name, bytes(content[:end]), tmp_path)

    run()


def test_files_that_readers_failed_on_are_read_or_refused(tmp_path: Path) -> None:
    for path in sorted(CORPUS.iterdir()):
        check(path.name.split("-")[0], path.read_bytes(), tmp_path)
