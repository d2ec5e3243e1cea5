"""The text of a benchmark in the formats of all engines: a data folder of nmt, and files for peers.

All engines use the same SentencePiece model. Toolkits that read text get its tokens separated by
spaces, and Hugging Face transformers gets batches of its ids.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

from settings import Settings

from nmt.config import DataConfig, HeldOutConfig, PreprocessConfig, TokenizerConfig
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.errors import DataError
from nmt.preprocess.prepare import prepare

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_PATTERNS = {"train": ("train*",), "valid": ("val*", "dev*"), "test": ("test*", "val*", "dev*")}
_NUM_VALID = 100  # pairs from the training text, for toolkits that require a validation set
_MAX_BATCHES = 200  # for Hugging Face transformers, which does not form batches


class PreparedCorpus:
    """A corpus with one vocabulary, prepared for all engines in the cache folder at first use."""

    def __init__(self, settings: Settings) -> None:
        self.name = "Home Assistant interface texts"
        text_path = ""
        if settings.corpus:
            self.name = settings.corpus.name
            text_path = str(settings.corpus.resolve())
        self.name += f", {settings.src}-{settings.tgt}"
        key = f"{text_path} {settings.src} {settings.tgt} {settings.vocab_size}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        self.folder = settings.cache / "corpora" / f"{settings.src}-{settings.tgt}-{digest}"
        self.data_dir = self.folder / "data"
        self.pieces_dir = self.folder / "pieces"
        if not (self.data_dir / "meta.json").exists():
            self._preprocess(settings)
        self.tokenizer = Tokenizer.load(self.data_dir / "tokenizer.model")
        self.data = ParallelData(self.data_dir, "train")
        if not (self.pieces_dir / "vocabulary.txt").exists():
            self._write_pieces()

    def test_lines(self, num_lines: int) -> list[str]:
        """Return the first source lines of the test set that are not empty."""
        split = "test" if (self.data_dir / "test.src").exists() else "valid"
        text = (self.data_dir / f"{split}.src").read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.strip()]
        return lines[:num_lines]

    def write_batches(self, max_tokens: int) -> Path:
        """Write batches of nmt, each as a line of JSON with the ids; return the path."""
        path = self.folder / f"batches-{max_tokens}.jsonl"
        if path.exists():
            return path
        sampler = TokenBatchSampler(
            self.data.lengths, max_tokens, tokens_per_update=max_tokens, seed=1
        )
        batches = itertools.chain.from_iterable(update.batches for update in sampler.plan_epoch(0))
        with path.open("w", encoding="utf-8") as file:
            for batch in islice(batches, _MAX_BATCHES):
                ids: dict[str, list[list[int]]] = {"src": [], "tgt": []}
                for row in batch:
                    src, tgt = self.data[int(row)]
                    ids["src"].append(src.tolist())
                    ids["tgt"].append(tgt.tolist())
                file.write(json.dumps(ids) + "\n")
        return path

    def _preprocess(self, settings: Settings) -> None:
        """Preprocess uncompressed copies of the text files with nmt."""
        folder = settings.corpus or _fetch_demo_text(settings)
        data = DataConfig(src_lang=settings.src, tgt_lang=settings.tgt)
        for split in _PATTERNS:
            src = _unpack(folder, split, settings.src, self.folder)
            tgt = _unpack(folder, split, settings.tgt, self.folder)
            setattr(data, split, HeldOutConfig(src=[str(src)], tgt=[str(tgt)]))
        tokenizer = TokenizerConfig(vocab_size=settings.vocab_size)
        prepare(PreprocessConfig(data=data, tokenizer=tokenizer, data_dir=str(self.data_dir)))

    def _write_pieces(self) -> None:
        """Write the tokens of the pairs, and the vocabulary with and without fairseq's counts."""
        self.pieces_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer
        pieces = tokenizer.pieces(range(tokenizer.vocab_size))
        for split, num_pairs in (("train", len(self.data)), ("valid", _NUM_VALID)):
            for side, extension in enumerate(("src", "tgt")):
                path = self.pieces_dir / f"{split}.src-tgt.{extension}"
                with path.open("w", encoding="utf-8") as file:
                    for pair in islice(self.data, num_pairs):
                        file.write(" ".join(pieces[i] for i in pair[side]) + "\n")
        vocabulary = ""
        for i, piece in enumerate(pieces):
            if i not in tokenizer.control_ids:
                vocabulary += f"{piece}\n"
        for name in ("dict.src.txt", "dict.tgt.txt"):
            dictionary = vocabulary.replace("\n", " 1\n")
            (self.pieces_dir / name).write_text(dictionary, encoding="utf-8")
        (self.pieces_dir / "vocabulary.txt").write_text(vocabulary, encoding="utf-8")


def _fetch_demo_text(settings: Settings) -> Path:
    """Write the text of the demo; return its folder."""
    script = Path(__file__).parents[1] / "fetch_homeassistant.py"
    cache = settings.cache / "downloads"
    text = cache / f"homeassistant-{settings.src}-{settings.tgt}"
    command = [sys.executable, script, "--src", settings.src, "--tgt", settings.tgt]
    subprocess.run([*command, "--output", text, "--cache", cache], check=True)
    return text


def _unpack(folder: Path, split: str, lang: str, output: Path) -> Path:
    """Copy one side of a split, uncompressed, to `output`; return the copy."""
    files: list[Path] = []
    for pattern in _PATTERNS[split]:
        for suffix in ("", *_OPENERS):
            files += sorted(folder.glob(f"{pattern}.{lang}{suffix}"))
    if not files:
        raise DataError(
            f"{folder} has no {split} file for {lang}; it needs files such as train.{lang} or "
            f"train.{lang}.gz, val.{lang} and test.{lang}"
        )
    path = output / f"{split}.{lang}"
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = _OPENERS.get(files[0].suffix, open)
    with opener(files[0], "rb") as compressed, path.open("wb") as plain:
        shutil.copyfileobj(compressed, plain)
    return path
