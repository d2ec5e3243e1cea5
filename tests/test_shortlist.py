"""The shortlist of nmt-export: its candidates, and that CTranslate2 generates no other words."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporting import exported, random_model
from toy import write_data

from nmt.config import DType, ExportConfig, ExportFormat, Quantization, SearchConfig
from nmt.data import word_alignment
from nmt.data.shuffle import shuffle_pairs
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_alignment import draw_pairs, make_links
from nmt.errors import ConfigError
from nmt.export import shortlist
from nmt.export.shortlist import SHORTLIST, find_candidates
from nmt.search.request import SearchRequest
from nmt.translate.engines.ctranslate2 import load_ctranslate2


def test_candidates_are_the_translations_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(3)
    num_pieces = 30
    translation_of = draw.permutation(num_pieces)
    pairs = []
    for _ in range(300):
        src = draw.integers(num_pieces, size=draw.integers(3, 8))
        tgt = draw.permutation(translation_of[src])  # in another order
        pairs.append((src, np.append(tgt, num_pieces)))  # and a token that is in every target
    monkeypatch.setattr(shortlist, "CANDIDATES_PER_PIECE", 3)
    links = make_links(draw_pairs(pairs), null_id=num_pieces)
    candidates = find_candidates(links, num_pieces + 1, num_pieces + 1)
    assert [row[0] for row in candidates] == [*translation_of, num_pieces]
    assert all(len(row) <= 3 for row in candidates)
    monkeypatch.setattr(word_alignment, "MAX_LINKS", 1000)
    num_links = len(make_links(draw_pairs(pairs), null_id=num_pieces).src)
    assert 1000 <= num_links < 1000 + 8 * 9


def test_pairs_are_drawn_in_every_order_and_without_an_order_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [([i], [i]) for i in range(4)]
    orders = Counter(tuple(src[0] for src, _ in shuffle_pairs(pairs, seed)) for seed in range(2400))
    assert set(orders) == set(itertools.permutations(range(4)))
    assert max(orders.values()) < 150
    assert min(orders.values()) > 60
    assert [*shuffle_pairs(pairs)] == [*shuffle_pairs(pairs)]

    class HugeCorpus:
        def __len__(self) -> int:
            return 10**15

        def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
            return [index], [index, index]

    corpus: Any = HugeCorpus()
    drawn = [src[0] for src, _ in itertools.islice(shuffle_pairs(corpus), 1000)]
    assert len(set(drawn)) == 1000
    assert min(drawn) < 10**13
    assert max(drawn) > 99 * 10**13
    monkeypatch.setattr(word_alignment, "MAX_LINKS", 1000)
    assert len(draw_pairs(corpus)) == 250  # of 4 links each


def read_candidates(folder: Path) -> dict[str, list[str]]:
    """Return the target pieces for each source piece, and under "" the pieces of every sentence."""
    candidates = {}
    for line in (folder / SHORTLIST).read_text(encoding="utf-8").splitlines():
        piece, names = line.split("\t")
        candidates[piece] = names.split(" ")
    return candidates


def test_translations_consist_of_candidates(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortlist, "CANDIDATES_PER_PIECE", 4)
    monkeypatch.setattr(shortlist, "NUM_COMMON", 3)
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data", tokenizer, [(9, 9)] * 200)
    model = random_model(tmp_path / "model", tokenizer)
    folder = exported(model, ExportFormat.ctranslate2, shortlist_data=str(tmp_path / "data"))
    assert "use_vmap=True" in (folder / "README.md").read_text(encoding="utf-8")
    candidates = read_candidates(folder)
    pieces = tokenizer.all_pieces()
    control_symbols = pieces[:4]  # CTranslate2 adds them
    assert len(candidates[""]) == 3
    for piece in pieces[4:]:
        assert piece in candidates[piece]
        assert len(candidates[piece]) <= 5
    backend = load_ctranslate2(folder, device="cpu", dtype=DType.float32, num_threads=1).backend
    for beam_size in (1, 4):
        config = SearchConfig(beam_size=beam_size, max_length_b=10)
        for row in ([5, 6, 7], [40, 41], [300]):
            allowed = {*control_symbols, *candidates[""]}
            for token in row:
                allowed.update(candidates[pieces[token]])
            [hypotheses] = backend.search(SearchRequest([row], config))
            for hypothesis in hypotheses:
                assert {pieces[token] for token in hypothesis.tokens} <= allowed
    [samples] = backend.search(SearchRequest([[300]], SearchConfig(beam_size=8, sampling=True)))
    allowed = {*control_symbols, *candidates[""], *candidates[pieces[300]]}
    sampled_ids = chain.from_iterable(sample.tokens for sample in samples)
    assert not {pieces[token] for token in sampled_ids} <= allowed


def test_data_of_another_model_and_other_formats_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, toy_data: Path
) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    with pytest.raises(ConfigError, match="a different tokenizer from the model"):
        exported(model, ExportFormat.ctranslate2, shortlist_data=str(toy_data))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ConfigError, match="shortlist_data=.*format=ctranslate2"):
        ExportConfig(format=ExportFormat.argos, shortlist_data="data")
    plain = exported(model, ExportFormat.ctranslate2, quantization=Quantization.int8)
    assert not (plain / SHORTLIST).exists()
