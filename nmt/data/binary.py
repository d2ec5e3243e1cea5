"""Read and write data folders.

A data folder holds the token ids of each split in shards (`nmt.data.shards`), and the lengths of
all pairs in one file per split. `meta.json` lists the shards. The files are memory-mapped.
"""

# N is the number of pairs of a split

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nmt.config import require_valid
from nmt.data import Lengths
from nmt.data.languages import LanguagePair
from nmt.data.mixing import CorpusRange
from nmt.data.shards import IdArray, MappedShard, ShardFile, unusable_file_error
from nmt.data.text import read_stream
from nmt.errors import DataError
from nmt.runtime.files import describe_folder_problem
from nmt.runtime.manifest import verify_checksums
from nmt.runtime.metadata import pop_version, read_json, to_dataclass
from nmt.runtime.reading import MAX_BYTES, check_regular, open_regular

FORMAT_VERSION = 2


@dataclass(frozen=True)
class CorpusShards:
    """The shards of one corpus of a split, in the order of their pairs."""

    corpus: str  # "" for data.train, data.valid and data.test
    weight: float  # number of times that an epoch draws each pair; see `compute_pairs_per_epoch`
    shards: list[ShardFile]

    def __post_init__(self) -> None:
        is_valid = 0 < self.weight <= 1e6
        require_valid(is_valid, "weight", self.weight, "must be above 0 and at most 1e6")

    @property
    def num_pairs(self) -> int:
        """Number of pairs of all shards."""
        return sum(shard.pairs for shard in self.shards)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest side, EOS included."""
        return max((shard.longest for shard in self.shards), default=0)


@dataclass(frozen=True)
class DataInfo:
    """The content of `meta.json`."""

    format_version: int
    num_pairs: dict[str, int] = field(default_factory=dict)  # keyed by split
    data_sha256: str = ""
    src_lang: str = ""
    tgt_lang: str = ""
    vocab_size: int = 0  # size of the target vocabulary
    tokenizer_sha256: str = ""
    max_length: int = 0
    temperature: float = 1.0  # evens out the weights of corpora; see `compute_pairs_per_epoch`
    splits: dict[str, list[CorpusShards]] = field(default_factory=dict)
    src_vocab_size: int | None = None  # size of the source vocabulary; None if there is only one
    directions: dict[str, LanguagePair] = field(default_factory=dict)
    """The languages and tags of each corpus, keyed by its name. Empty if there are no tags."""

    def __post_init__(self) -> None:
        require_valid(self.temperature >= 1, "temperature", self.temperature, "must be at least 1")

    @property
    def vocab_sizes(self) -> tuple[int, int]:
        """Sizes of the vocabularies of source and target."""
        src_vocab_size = self.vocab_size if self.src_vocab_size is None else self.src_vocab_size
        return src_vocab_size, self.vocab_size


def read_meta(data_dir: Path) -> DataInfo:
    """Read `meta.json`.

    Raises `DataError` if `data_dir` is not a data folder, and `DamagedError` if the file is damaged
    or was written by a newer version of nmt.
    """
    path = data_dir / "meta.json"
    if not path.exists():
        problem = describe_folder_problem(data_dir, "is not a data folder")
        raise DataError(f"{data_dir} {problem}; create one from text with nmt-preprocess")
    verify_checksums(data_dir, "meta.json")
    meta = read_json(path)
    meta["format_version"] = pop_version(meta, path, FORMAT_VERSION)  # raises for a newer version
    meta.pop("made_of", None)  # an earlier version wrote this key
    return to_dataclass(DataInfo, meta, path)


def write_lengths(
    folder: Path, corpora_by_split: Mapping[str, Sequence[CorpusShards]]
) -> dict[str, Any]:
    """Write `SPLIT.lengths.npy` for each split.

    Returns the values of `format_version`, `splits`, `num_pairs` and `data_sha256` for `meta.json`.
    The shards of all corpora must be in `folder`.
    """
    digest = hashlib.sha256()
    splits = {}
    num_pairs = {}
    for split, corpora in sorted(corpora_by_split.items()):
        splits[split] = [asdict(corpus) for corpus in corpora]
        num_pairs[split] = sum(corpus.num_pairs for corpus in corpora)
        longest = max((corpus.longest for corpus in corpora), default=0)
        fits_in_uint16 = longest < 1 << 16
        dtype = "<u2" if fits_in_uint16 else "<i4"
        shard_paths = []
        for corpus_shards in corpora:
            for shard in corpus_shards.shards:
                shard_paths.append(folder / shard.file)
                digest.update(f"{split} {corpus_shards.corpus} {shard.sha256}\n".encode())
        _copy_lengths(folder / f"{split}.lengths.npy", shard_paths, num_pairs[split], dtype)
    return {
        "format_version": FORMAT_VERSION,
        "splits": splits,
        "num_pairs": num_pairs,
        "data_sha256": digest.hexdigest(),
    }


def _copy_lengths(path: Path, shard_paths: Sequence[Path], num_pairs: int, dtype: str) -> None:
    """Copy the lengths of all pairs of the shards to a NumPy file with an array (num_pairs, 2)."""
    header = {"descr": dtype, "fortran_order": False, "shape": (num_pairs, 2)}
    with path.open("wb") as file:
        # `np.save` would need the lengths of all shards in memory
        np.lib.format.write_array_header_1_0(file, header)
        for shard_path in shard_paths:
            lengths = MappedShard(shard_path).lengths()
            file.write(lengths.astype(dtype).tobytes())


class ParallelData:
    """The pairs of one split of a data folder. A shard is mapped when its first pair is read.

    With `bidirectional`, the N pairs are followed by the same pairs with source and target
    exchanged. This requires a joint vocabulary without tags, and copies the lengths into memory.

    Threads may share an instance. Pickling stores only the arguments: another process maps the
    files itself.
    """

    def __init__(self, data_dir: Path, split: str, *, bidirectional: bool = False) -> None:
        self._data_dir = data_dir
        self._split = split
        self._bidirectional = bidirectional
        meta = read_meta(data_dir)
        self._vocab_sizes = meta.vocab_sizes
        if split not in meta.splits:
            raise DataError(f"{data_dir} has no {split} pairs; give data.{split} to nmt-preprocess")
        self.corpora: list[CorpusRange] = []
        self._paths: list[Path] = []
        # the index of the first pair of each shard, and as the last item N
        self._shard_starts = [0]
        for corpus_shards in meta.splits[split]:
            corpus_range = CorpusRange(
                name=corpus_shards.corpus,
                start=self._shard_starts[-1],
                num_pairs=corpus_shards.num_pairs,
                weight=corpus_shards.weight,
            )
            self.corpora.append(corpus_range)
            for shard in corpus_shards.shards:
                path = data_dir / shard.file
                _check_size(path, shard.bytes)
                self._paths.append(path)
                self._shard_starts.append(self._shard_starts[-1] + shard.pairs)
        self._shards: list[MappedShard | None] = [None] * len(self._paths)
        if self._shard_starts[-1] == 0:
            raise DataError(f"{data_dir} holds no sentence pairs; preprocess the corpus again")
        self.lengths = self._map_lengths()  # (N, 2), numbers of source and target tokens with EOS
        if bidirectional:
            self._add_reversed_pairs()

    def __reduce__(self) -> tuple[Any, tuple[Path, str]]:
        # pickle passes no keyword arguments to the constructor
        constructor = partial(ParallelData, bidirectional=self._bidirectional)
        return constructor, (self._data_dir, self._split)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[IdArray, IdArray]:
        """Return source and target ids of a pair, without BOS and EOS."""
        shard, row, is_reversed = self._find_row(index)
        src, tgt = shard[row]
        return (tgt, src) if is_reversed else (src, tgt)

    @property
    def is_aligned(self) -> bool:
        """Whether all corpora have word alignments. Maps the first shard of each corpus."""
        for corpus in self.corpora:
            # either all pairs of a corpus have an alignment or none, so the first one suffices
            if corpus.num_pairs and self.alignment(corpus.start) is None:
                return False
        return True

    def alignment(self, index: int) -> IdArray | None:
        """Return the links of a pair (number of links, 2), each a source word and a target word.

        Returns None without an alignment.
        """
        shard, row, is_reversed = self._find_row(index)
        links = shard.alignment(row)
        if is_reversed and links is not None:
            return links[:, ::-1]
        return links

    def texts(self, index: int) -> tuple[str, ...]:
        """Return the text of source and target of a pair.

        Returns () if the data folder has no text, because the setting `keep_text` was false.
        """
        shard, row, is_reversed = self._find_row(index)
        texts = shard.texts(row)
        if is_reversed:
            return texts[::-1]
        return texts

    def _add_reversed_pairs(self) -> None:
        """Append each corpus, and the lengths, with source and target exchanged."""
        num_pairs = len(self.lengths)
        for corpus in self.corpora[:]:
            self.corpora.append(replace(corpus, start=num_pairs + corpus.start, is_reversed=True))
        self.lengths = np.concatenate([self.lengths, self.lengths[:, ::-1]])

    def _find_row(self, index: int) -> tuple[MappedShard, int, bool]:
        """Return the shard of a pair, its row in the shard, and whether the pair is reversed."""
        num_stored = self._shard_starts[-1]
        is_reversed = self._bidirectional and index >= num_stored
        if is_reversed:
            index -= num_stored
        # the last shard that starts at or before `index`
        shard_index = bisect_right(self._shard_starts, index) - 1
        shard = self._shards[shard_index]
        if shard is None:
            shard = self._map_shard(shard_index)
        return shard, index - self._shard_starts[shard_index], is_reversed

    def _map_shard(self, shard_index: int) -> MappedShard:
        """Map and check a shard. Two threads may do this at once."""
        path = self._paths[shard_index]
        start = self._shard_starts[shard_index]
        end = self._shard_starts[shard_index + 1]
        verify_checksums(self._data_dir, path.name)
        shard = MappedShard(path)
        if len(shard) != end - start:
            raise unusable_file_error(
                path, f"is damaged: it has {len(shard)} pairs instead of {end - start}"
            )
        if not np.array_equal(shard.lengths(), self.lengths[start:end]):
            raise unusable_file_error(path, f"does not fit {self._split}.lengths.npy")
        for largest, vocab_size in zip(shard.largest_ids(), self._vocab_sizes, strict=True):
            if largest >= vocab_size:
                raise unusable_file_error(
                    path,
                    f"is damaged: it has the token id {largest}, but the vocabulary size is "
                    f"{vocab_size}",
                )
        self._shards[shard_index] = shard
        return shard

    def _map_lengths(self) -> Lengths:
        """Map `SPLIT.lengths.npy`. Raises `DataError` if it is missing or damaged."""
        path = self._data_dir / f"{self._split}.lengths.npy"
        verify_checksums(self._data_dir, path.name)
        try:
            check_regular(path)
            # `np.load` returns an np.memmap, which is slower to index than a plain array
            lengths: Lengths = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except FileNotFoundError:
            raise unusable_file_error(path, "is missing") from None
        except (ValueError, OSError, EOFError):
            raise unusable_file_error(path) from None
        shape = (self._shard_starts[-1], 2)
        if lengths.shape != shape:
            raise unusable_file_error(
                path, f"is damaged: it has the shape {lengths.shape} instead of {shape}"
            )
        if lengths.dtype.kind not in "iu" or lengths.min() < 1:
            raise unusable_file_error(
                path, "is damaged: it has lengths that are not positive integers"
            )
        return lengths


def _check_size(path: Path, num_bytes: int) -> None:
    """Raise a `DataError` if a shard is missing or its size differs from `meta.json`."""
    if not path.exists():
        raise unusable_file_error(path, "is missing")
    size = path.stat().st_size
    if size != num_bytes:
        raise unusable_file_error(
            path, f"is damaged: it has {size:,} bytes instead of {num_bytes:,}"
        )


@dataclass(frozen=True)
class HeldOutText:
    """The held-out pairs of one corpus, as text."""

    corpus: str  # "" for the text of `data.valid` and `data.test`
    direction: LanguagePair
    sources: list[str]
    targets: list[str]


def _read_text(path: Path) -> list[str]:
    """Read the lines of a file of a data folder. Raises `DataError` if it is missing."""
    try:
        with open_regular(path, max_bytes=MAX_BYTES) as file:
            return list(read_stream(file, str(path)))
    except FileNotFoundError:
        raise unusable_file_error(path, "is missing") from None


def read_held_out(data_dir: Path, split: str) -> list[HeldOutText]:
    """Read the text of `valid` or `test` in a data folder, one item for each corpus.

    Raises `DataError` if the folder lacks the split.
    """
    meta = read_meta(data_dir)
    default_direction = LanguagePair(meta.src_lang, meta.tgt_lang)
    data = ParallelData(data_dir, split)
    verify_checksums(data_dir, f"{split}.src", f"{split}.tgt")
    src = _read_text(data_dir / f"{split}.src")
    tgt = _read_text(data_dir / f"{split}.tgt")
    num_pairs = len(data)
    if len(src) != num_pairs or len(tgt) != num_pairs:
        raise unusable_file_error(
            data_dir,
            f"has {len(src)} lines in {split}.src and {len(tgt)} in {split}.tgt for {num_pairs} "
            "pairs",
        )
    return [
        HeldOutText(
            corpus=corpus.name,
            direction=meta.directions.get(corpus.name, default_direction),
            sources=src[corpus.start : corpus.end],
            targets=tgt[corpus.start : corpus.end],
        )
        for corpus in data.corpora
    ]
