"""The validation and test sets: read whole, written as text and as ids, and nothing of them is
ever dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from nmt.data.tokenizer import Tokenizers
from nmt.errors import DataError
from nmt.preprocess.chunks import read_chunks
from nmt.preprocess.cleaned import Cleaned
from nmt.preprocess.cleaning import clean
from nmt.preprocess.encoding import Encoder
from nmt.preprocess.job import Job
from nmt.preprocess.pieces import Source
from nmt.preprocess.shards import Result, write_shard
from nmt.preprocess.statistics import HeldOut


@dataclass(frozen=True)
class Split:
    """The clean pairs of a held-out split, chunk by chunk."""

    name: str
    chunks: list[tuple[Source, Cleaned]]

    @property
    def text(self) -> tuple[list[str], list[str]]:
        """All sources and all targets."""
        src = [line for _, cleaned in self.chunks for line in cleaned.src]
        return src, [line for _, cleaned in self.chunks for line in cleaned.tgt]


def read_splits(job: Job) -> list[Split]:
    """Read the held-out splits; raise a `DataError` for one without pairs."""
    splits = []
    for name, sources in job.held_out.items():
        chunks = [
            (chunk.source, clean(chunk, job.config, held_out=True))
            for chunk in read_chunks(sources)
        ]
        if not chunks:
            raise DataError(
                f"the {name} corpus is empty; give data.{name} a file with sentence pairs"
            )
        splits.append(Split(name, chunks))
    return splits


def find_overlap(splits: list[Split]) -> HeldOut:
    """Return what finds the pairs of these splits in training text."""
    return HeldOut({split.name: split.text for split in splits})


def write_split(job: Job, split: Split, tokenizers: Tokenizers) -> Result:
    """Write the text, which is the reference of translations, and the ids."""
    for name, lines in zip(("src", "tgt"), split.text, strict=True):
        text = "".join(line + "\n" for line in lines)
        path = job.work.data / f"{split.name}.{name}"
        path.write_text(text, encoding="utf-8", newline="\n")
    encoder = Encoder(job.config, job.work.plan, held_out=None, has_hashes=False)
    chunks = (encoder.encode_held_out(cleaned, source) for source, cleaned in split.chunks)
    path = job.work.data / f"{split.name}-00000.arrow"
    return write_shard(path, chunks, tokenizers, has_text=job.config.keep_text)
