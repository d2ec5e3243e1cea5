"""The same text for all engines: a data folder of nmt, and from it what the others read.

Everything is made of one SentencePiece model: its pieces, separated by spaces, are the words of
toolkits that want text; its ids are the batches of a library that wants tensors.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nmt.config import (
    DataConfig,
    HeldOutConfig,
    PreprocessConfig,
    TokenizerConfig,
)
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.errors import DataError
from nmt.preprocess.prepare import prepare

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_PATTERNS = {"train": ("train*",), "valid": ("val*", "dev*"), "test": ("test*", "val*", "dev*")}
_NUM_VALID = 100  # pairs of the training text, for a toolkit that insists on some
_MOST_BATCHES = 200  # for a library without batches of its own


@dataclass(frozen=True)
class Source:
    """Where the text comes from: a folder with files such as train.en.gz, or None for the corpus of
    the demo, which pip fetches.
    """

    folder: Path | None
    src_lang: str
    tgt_lang: str
    vocab_size: int

    @property
    def name(self) -> str:
        """Say what it is, in a few words."""
        text = "Home Assistant's interface texts" if self.folder is None else self.folder.name
        return f"{text}, {self.src_lang}-{self.tgt_lang}"


class PreparedCorpus:
    """The folders of one corpus with one vocabulary in the cache, made at first use."""

    def __init__(self, source: Source, cache_dir: Path) -> None:
        self.source = source
        where = "" if source.folder is None else str(source.folder.resolve())
        key = f"{where} {source.src_lang} {source.tgt_lang} {source.vocab_size}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        self.folder = cache_dir / "corpora" / f"{source.src_lang}-{source.tgt_lang}-{digest}"
        self.data_dir = self.folder / "data"
        self.pieces_dir = self.folder / "pieces"
        if not (self.data_dir / "meta.json").exists():
            prepare(_settings(source, self.folder, self.data_dir, cache_dir))
        self.tokenizer = Tokenizer.load(self.data_dir / "tokenizer.model")
        self.data = ParallelData(self.data_dir, "train")
        if not (self.pieces_dir / "vocabulary.txt").exists():
            _write_pieces(self.data, self.tokenizer, self.pieces_dir)

    def test_lines(self, count: int) -> list[str]:
        """Return the first lines of the test set's source."""
        split = "test" if (self.data_dir / "test.src").exists() else "valid"
        text = (self.data_dir / f"{split}.src").read_text(encoding="utf-8")
        return [line for line in text.split("\n")[:-1] if line.strip()][:count]

    def batches(self, max_tokens: int) -> Path:
        """Write batches that nmt makes of the corpus as JSON lines of ids; return the file."""
        path = self.folder / f"batches-{max_tokens}.jsonl"
        if not path.exists():
            sampler = TokenBatchSampler(
                self.data.lengths, max_tokens, tokens_per_update=max_tokens, seed=1
            )
            rows = [rows for update in sampler.updates(0) for rows in update.batches]
            with path.open("w", encoding="utf-8") as file:
                for batch in rows[:_MOST_BATCHES]:
                    pairs = [self.data[int(row)] for row in batch]
                    ids = {"src": [p[0].tolist() for p in pairs]}
                    ids["tgt"] = [p[1].tolist() for p in pairs]
                    file.write(json.dumps(ids) + "\n")
        return path


def _settings(source: Source, folder: Path, data_dir: Path, cache_dir: Path) -> PreprocessConfig:
    data = DataConfig(src_lang=source.src_lang, tgt_lang=source.tgt_lang)
    text = source.folder or _fetch(source, cache_dir / "downloads")
    for split in _PATTERNS:
        sides = [_plain(text, split, lang, folder) for lang in _languages(source)]
        setattr(data, split, HeldOutConfig(src=[str(sides[0])], tgt=[str(sides[1])]))
    tokenizer = TokenizerConfig(vocab_size=source.vocab_size)
    return PreprocessConfig(data=data, tokenizer=tokenizer, data_dir=str(data_dir))


def _fetch(source: Source, cache_dir: Path) -> Path:
    """Write the text of the demo; return its folder."""
    script = Path(__file__).parents[1] / "fetch_homeassistant.py"
    text = cache_dir / f"homeassistant-{source.src_lang}-{source.tgt_lang}"
    command = [sys.executable, script, "--src", source.src_lang, "--tgt", source.tgt_lang]
    subprocess.run([*command, "--output", text, "--cache", cache_dir], check=True)
    return text


def _languages(source: Source) -> tuple[str, str]:
    return source.src_lang, source.tgt_lang


def _plain(folder: Path, split: str, lang: str, output: Path) -> Path:
    """Unpack one side of a split beside the data folder, so that every format is read alike."""
    found = next(_candidates(folder, split, lang), None)
    if found is None:
        raise DataError(
            f"{folder} has no {split} file for {lang}; it needs files such as train.{lang} or "
            f"train.{lang}.gz, val.{lang} and test.{lang}"
        )
    path = output / f"{split}.{lang}"
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = _OPENERS.get(found.suffix, open)
    with opener(found, "rb") as packed, path.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return path


def _candidates(folder: Path, split: str, lang: str) -> Iterator[Path]:
    for pattern in _PATTERNS[split]:
        for ending in ("", *_OPENERS):
            yield from sorted(folder.glob(f"{pattern}.{lang}{ending}"))


def _write_pieces(data: ParallelData, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the training pairs as pieces, and the vocabulary with a count as fairseq wants it."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    for split, count in (("train", len(data)), ("valid", _NUM_VALID)):
        for side, name in enumerate(("src", "tgt")):
            with (folder / f"{split}.src-tgt.{name}").open("w", encoding="utf-8") as file:
                for pair in islice(data, count):
                    file.write(" ".join(pieces[i] for i in pair[side]) + "\n")
    control = {tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id}
    words = [piece for i, piece in enumerate(pieces) if i not in control]
    for name in ("dict.src.txt", "dict.tgt.txt"):
        lines = [f"{word} 1\n" for word in words]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    text = "".join(f"{word}\n" for word in words)
    (folder / "vocabulary.txt").write_text(text, encoding="utf-8")
