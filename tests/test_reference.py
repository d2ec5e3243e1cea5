"""The same input and settings give the same data folders as in November 2026.

`reference/preprocess.json` has the SHA-256 sums of these folders. `python tests/test_reference.py`
prints the sums of this version in the same format.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from nmt.cli.commands import COMMANDS
from nmt.cli.main import main
from nmt.runtime.files import write_json

REFERENCE = Path(__file__).parent / "reference" / "preprocess.json"
_EN = ["red", "green", "big", "house", "tree", "sees", "the", "a", "river", "bridge", "don't"]
_DE = ["rot", "grün", "groß", "Haus", "Baum", "sieht", "der", "ein", "Fluß", "Brücke", "„Ja“"]
_ODD = ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\r", "\u00a0", "\ufeff", "😀", "\x1a"]
_ODD += [
    "e\u0301",
    "ﬁ",
    "Ｆｕｌｌ",
    "猫",
    "שלום",
    "\u200b",
    "<s>",
    "</s>",
    "▁",
    "&amp;",
    "\ue000",
    "\t",
]
_BAD = [b"\xe9t\xe9", b"\xff\xfe", b"\xe2\x80", b"\xed\xa0\x80"]
_PAIR = ["data.train.src=a.en", "data.train.tgt=a.de", "data.valid.src=v.en", "data.valid.tgt=v.de"]
_LANGS = ["data.src_lang=en", "data.tgt_lang=de"]
_SMALL = ["tokenizer.vocab_size=400", "num_threads=1"]
_TWO = ["data.corpora.news.src=a.en", "data.corpora.news.tgt=a.de", "data.corpora.news.weight=2"]
_TWO += ["data.corpora.web.tsv=b.tsv", "data.corpora.web.tgt_tag=<web>", "data.valid.tsv=v.tsv"]
CASES = {
    "plain": [*_PAIR, *_LANGS, *_SMALL],
    "no languages, short": [*_PAIR, *_SMALL, "max_length=20"],
    "shards": [*_PAIR, *_LANGS, *_SMALL, "shard_pairs=97", "num_threads=1"],
    "filters": [
        *(*_PAIR, *_LANGS, *_SMALL, "filter.max_ratio=1.5"),
        *("filter.identical=true", "filter.max_unknown=0.3", "filter.max_foreign=0.2"),
    ],
    "language": [*_PAIR, *_LANGS, *_SMALL, "filter.language=true"],
    "duplicate pairs": [*_PAIR, *_LANGS, *_SMALL, "filter.duplicates=pair", "shard_pairs=97"],
    "duplicate sources": [*_PAIR, *_SMALL, "filter.duplicates=src"],
    "duplicate targets": [*_PAIR, *_SMALL, "filter.duplicates=tgt", "num_threads=1"],
    "unigram": [
        *(*_PAIR, *_SMALL, "tokenizer.vocab_size=150"),
        *("tokenizer.type=unigram", "tokenizer.byte_fallback=false"),
    ],
    "separate": [*_PAIR, *_LANGS, *_SMALL, "tokenizer.separate=true", "keep_text=true"],
    "identity, symbols": [
        *(*_PAIR, *_SMALL, "tokenizer.normalization=identity", "tokenizer.symbols=[<2de>,big]"),
        *("tokenizer.character_coverage=0.995", "tokenizer.max_sentences=150"),
    ],
    "two corpora": [*_TWO, *_LANGS, *_SMALL, "shard_pairs=120", "num_threads=1"],
    "temperature, test": [*_TWO, *_SMALL, "data.temperature=5", "data.test.tsv=b.tsv"],
    "columns of packed files": [
        *("data.train.tsv=[c.tsv.gz,c.tsv.xz]", "data.train.columns=[2,1]", "data.valid.tsv=v.tsv"),
        *(*_SMALL, "data.invalid=drop"),
    ],
    "records": [*_LANGS, *_SMALL, "data.train.jsonl=a.jsonl", "data.valid.jsonl=a.jsonl"],
    "replaced bytes": ["data.train.src=bad.en", *_PAIR[1:], "data.invalid=replace", *_SMALL],
    "dropped bytes": ["data.train.src=bad.en", *_PAIR[1:], "data.invalid=drop", *_SMALL],
    "copy": ["data=copy", "num_threads=1"],
    "numbers": ["data=numbers", "num_threads=2", "tokenizer.vocab_size=1000"],
}


def write_texts(folder: Path) -> None:
    """Write the texts that the cases name, the same every time."""
    draw = random.Random(1)
    pairs = [_pair(draw, n) for n in range(700)]
    pairs += draw.sample(pairs, 60)  # duplicates
    held_out = [_pair(draw, n) for n in range(30)] + pairs[:5]
    _write(folder / "a.en", [src.encode() for src, _ in pairs])
    _write(folder / "a.de", [tgt.encode() for _, tgt in pairs])
    _write(folder / "v.en", [src.encode() for src, _ in held_out])
    _write(folder / "v.de", [tgt.encode() for _, tgt in held_out])
    broken = []
    rows = []
    records = []
    for number, (src, tgt) in enumerate(pairs):
        broken.append(src.encode())
        if number % 40 == 7:
            broken[-1] += draw.choice(_BAD)
        row = "{}\t{}".format(src.replace("\t", " "), tgt.replace("\t", " "))
        rows.append(row.encode())
        records.append(json.dumps({"en": src, "de": tgt, "n": 1}).encode())
    _write(folder / "bad.en", broken)
    _write(folder / "b.tsv", rows[:300])
    _write(folder / "v.tsv", rows[300:330])
    columns = b"".join(line + b"\n" for line in rows[330:])
    (folder / "c.tsv.gz").write_bytes(gzip.compress(columns[: len(columns) // 2] + b"\n"))
    (folder / "c.tsv.xz").write_bytes(lzma.compress(columns))
    _write(folder / "a.jsonl", records)


def _pair(draw: random.Random, number: int) -> tuple[str, str]:
    words = [draw.randrange(len(_EN)) for _ in range(draw.randint(1, 12))]
    src = " ".join(map(_EN.__getitem__, words))
    tgt = " ".join(map(_DE.__getitem__, words))
    kind = draw.random()
    if kind < 0.2:
        src = f"{draw.choice(_ODD)}{src} {draw.choice(_ODD)} {number}"
    elif kind < 0.3:
        tgt = f"{number}{draw.choice(_ODD)} {tgt}{draw.choice(_ODD)}"
    elif kind < 0.34:
        tgt = src
    elif kind < 0.4:
        side = draw.choice(["", " ", "a\0b", "long " * 100, "猫 " * 5])
        src, tgt = (side, tgt) if draw.random() < 0.5 else (src, side)
    return src, tgt


def _write(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def hash_outputs(folder: Path, arguments: list[str]) -> dict[str, str]:
    """Preprocess the texts in `folder`; return the SHA-256 of each file, and of the counts."""
    out = folder / "data"
    working_dir = Path.cwd()
    os.chdir(folder)  # the arguments have relative paths
    try:
        assert main(COMMANDS["preprocess"], [*arguments, f"data_dir={out}"]) == 0, arguments
    finally:
        os.chdir(working_dir)
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    write_json(out / "meta.json", meta)
    hashes = {}
    for path in sorted(out.iterdir()):
        if not path.name.startswith(("report.", "manifest.")):
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    keys = ("read", "kept", "dropped", "replaced", "examples")
    counts = {split: {key: report[split][key] for key in keys} for split in ("train", "valid")}
    text = json.dumps([counts, report["overlap"], report["duplicates"]], sort_keys=True)
    hashes["counts"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashes


def hash_case(name: str) -> dict[str, str]:
    """Return the hashes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        return hash_outputs(Path(folder), CASES[name])


def cases() -> list[Any]:
    """Return the names of all cases; the quick ones reach the most code."""
    quick = ["temperature, test", "duplicate pairs"]
    slow = [pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in quick]
    return [*quick, *slow]


@pytest.mark.skipif(
    sentencepiece.__version__ != "0.2.3", reason="other versions of SentencePiece train otherwise"
)
@pytest.mark.parametrize("name", cases())
def test_data_folders_keep_their_bytes(name: str) -> None:
    expected = json.loads(REFERENCE.read_text(encoding="utf-8"))
    assert expected.keys() == CASES.keys()
    assert hash_case(name) == expected[name]


if __name__ == "__main__":
    hashes = {name: hash_case(name) for name in CASES}
    print(json.dumps(hashes, indent=1, ensure_ascii=False))
