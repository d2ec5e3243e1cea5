"""Training on each pair in both directions, `bidirectional=true`."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_folder
from toy import assert_resumes_exactly, command, make_run, read_pairs, train, write_corpus

from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_links import link_pieces
from nmt.errors import ConfigError

SIZES = {"a": 30, "b": 7}


def as_lists(data: Any) -> list[tuple[list[int], list[int]]]:
    return [(src.tolist(), tgt.tolist()) for src, tgt in map(data.__getitem__, range(len(data)))]


@pytest.fixture
def data_dir(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Write two corpora whose sources have even ids and whose targets have odd ones."""
    draw = np.random.default_rng(0)
    corpora = {}
    for name, size in SIZES.items():
        pairs = []
        for _ in range(size):
            src = 4 + 2 * draw.integers(0, 100, draw.integers(1, 9))
            tgt = 5 + 2 * draw.integers(0, 100, draw.integers(1, 9))
            pairs.append((src.tolist(), tgt.tolist()))
        corpora[name] = pairs
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    meta = {"src_lang": "en", "tgt_lang": "de", "tokenizer_sha256": tokenizer.sha256}
    write_folder(tmp_path, corpora, tokenizer.vocab_size, pairs_a_shard=12, **meta)
    return tmp_path


def test_all_pairs_are_followed_by_the_same_pairs_reversed(data_dir: Path) -> None:
    pairs = as_lists(ParallelData(data_dir, "train"))
    data = ParallelData(data_dir, "train", bidirectional=True)
    assert len(data) == 2 * len(pairs) == 74
    assert as_lists(data) == pairs + [(tgt, src) for src, tgt in pairs]
    assert as_lists(pickle.loads(pickle.dumps(data))) == as_lists(data)
    assert data.lengths.tolist() == [[len(s) + 1, len(t) + 1] for s, t in as_lists(data)]
    ranges = [(c.name, c.start, c.end, c.is_reversed) for c in data.corpora]
    forward = [("a", 0, 30, False), ("b", 30, 37, False)]
    assert ranges == [*forward, ("a", 37, 67, True), ("b", 67, 74, True)]


def test_an_epoch_has_every_pair_in_both_directions_shuffled(data_dir: Path) -> None:
    run = make_run(data_dir, data_dir / "run", bidirectional=True, tokens_per_update=60)
    sampler = run.samplers[0]
    assert str(sampler.mix) == "every pair once in each direction"
    for epoch in (0, 1):
        updates = [np.concatenate(plan.batches) for plan in sampler.plan_epoch(epoch)]
        assert sorted(np.concatenate(updates).tolist()) == list(range(74))
        directions = [set((rows >= 37).tolist()) for rows in updates]
        assert len(directions) > 5
        assert directions.count({False, True}) > len(directions) / 2
    # the batches have the exchanged ids: even ids on the source side become odd ones
    for row, is_reversed in ((5, False), (37 + 5, True)):
        [[src, decoder_input, tgt]] = read_pairs(run.learner, [[row]], 0)
        assert {i % 2 == 1 for i in src[:-1]} == {is_reversed}
        assert {i % 2 == 0 for i in tgt[:-1]} == {is_reversed}
        assert decoder_input[1:] == tgt[:-1]
    # validation stays in one direction
    assert len(run.validation.data) == 30


def test_the_weight_of_a_corpus_applies_to_both_directions(data_dir: Path) -> None:
    run = make_run(data_dir, data_dir / "run", bidirectional=True, mix={"a": 2.0, "b": 0.0})
    mix = run.samplers[0].mix
    rows = Counter(mix.draw_rows(1, 0).tolist())
    assert rows == dict.fromkeys([*range(30), *range(37, 67)], 2)
    assert str(mix) == (
        "60 of 30 pairs of a + 0 of 7 pairs of b + 60 of 30 pairs of a, reversed + "
        "0 of 7 pairs of b, reversed"
    )
    with pytest.raises(ConfigError, match=r"mix\.c: .*valid: a, b$"):
        make_run(data_dir, data_dir / "run", bidirectional=True, mix={"c": 2.0})


def test_alignments_and_texts_are_reversed_too(tmp_path: Path) -> None:
    arguments = write_corpus(tmp_path)
    lines = (tmp_path / "train.src.txt").read_text(encoding="utf-8").splitlines()
    # each word is linked to the next one of the target, so that the two directions differ
    alignments = [" ".join(f"{i}-{i + 1}" for i in range(len(line.split()) - 1)) for line in lines]
    (tmp_path / "train.align").write_text("\n".join(alignments) + "\n", encoding="utf-8")
    aligned = [f"data.train.alignments={tmp_path / 'train.align'}", "keep_text=true"]
    assert command("preprocess", arguments, aligned) == 0
    data = ParallelData(tmp_path / "data", "train", bidirectional=True)
    num_pairs = len(data) // 2
    assert data.is_aligned
    for index in range(num_pairs):
        links = data.alignment(index)
        reversed_links = data.alignment(num_pairs + index)
        assert links is not None
        assert reversed_links is not None
        assert [(tgt, src) for src, tgt in links.tolist()] == [*map(tuple, reversed_links.tolist())]
        src, tgt = data.texts(index)
        assert data.texts(num_pairs + index) == (tgt, src) != (src, tgt)
    run = make_run(tmp_path / "data", tmp_path / "run", bidirectional=True, guided_alignment=0.1)
    maker = run.learner.batch_maker
    for index in range(5):
        src, tgt = data[index]
        words = [(i + 1, i) for i in range(int(maker.src_starts[src].sum()) - 1)]
        expected = link_pieces(np.array(words), maker.src_starts[tgt], maker.src_starts[src])
        alignment = maker.make_micro_batch(np.array([num_pairs + index])).alignment
        assert alignment is not None
        assert alignment[:, 1:].tolist() == expected.tolist()
        assert len(expected) > 0


def test_pairs_that_cannot_be_exchanged_are_refused(
    tmp_path: Path, data_dir: Path, tokenizer: Tokenizer
) -> None:
    arguments = write_corpus(tmp_path)
    separate = ["tokenizer.separate=true", "tokenizer.vocab_size=290"]
    assert command("preprocess", arguments, separate) == 0
    with pytest.raises(ConfigError, match="one vocabulary for both languages; preprocess with"):
        make_run(tmp_path / "data", tmp_path / "run", bidirectional=True)
    meta = {"src_lang": "en", "tgt_lang": "de", "tokenizer_sha256": tokenizer.sha256}
    direction = {"src_lang": "en", "tgt_lang": "de", "src_tag": "<2de>"}
    pairs = [([4, 6], [5])]
    write_folder(data_dir, {"a": pairs}, tokenizer.vocab_size, directions={"a": direction}, **meta)
    with pytest.raises(ConfigError, match="does not work with tags before sources"):
        make_run(data_dir, data_dir / "run", bidirectional=True)


@pytest.mark.slow
def test_a_run_in_both_directions_is_resumed_exactly_and_fine_tuned(data_dir: Path) -> None:
    settings = ["bidirectional=true", "valid_bleu=false", "tokens_per_update=100"]
    run_dir = assert_resumes_exactly(data_dir, data_dir, settings, ends=(2, 5))
    assert (
        train(data_dir, run_dir, settings[1:], "bidirectional=false", "max_updates=6") == 2
    )  # belongs to another run
    one_direction = [f"init_from={run_dir}", "valid_bleu=false", "max_updates=2"]
    assert train(data_dir, data_dir / "one", one_direction) == 0
    assert train(data_dir, data_dir / "one", one_direction, "bidirectional=true") == 2
