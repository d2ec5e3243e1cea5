"""Training with a new segmentation of the text in every update: draws, batches, resuming."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from ranks import child
from test_gradients import exact_gradient, gradient_norm
from tiny import sentences, tokenizer_config, train_sentencepiece
from toy import assert_resumes_exactly, command, make_run, read_pairs, write_corpus

from nmt.config import TokenizerType
from nmt.data.batching import UpdatePlan
from nmt.data.noise import SubwordSampling, WordSegmenter
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the toy corpus."""
    folder = tmp_path_factory.mktemp("text")
    assert command("preprocess", write_corpus(folder, 60)) == 0
    return folder / "data"


@pytest.mark.slow
def test_cuts_keep_the_text_and_grow_with_the_amount() -> None:
    for kind in (TokenizerType.bpe, TokenizerType.unigram):
        tokenizer = train_tokenizer(
            sentences(200), tokenizer_config(type=kind, vocab_size=285), ["<de>"]
        )
        text = "<de> the small green house Ω sees a tree"
        lengths = []
        ids = np.array(tokenizer.encode(text))
        for alpha in (0.001, 0.3, 0.9) if kind is TokenizerType.bpe else (9.0, 0.3, 0.01):
            sampling = SubwordSampling(tokenizer, alpha, 1)
            fixed = [tokenizer.encode("<de>")[-1], *tokenizer.byte_ids]  # tags and bytes
            num_ids = 0
            for row in range(200):
                cut = sampling(ids, ids, 1, row)[0]
                assert tokenizer.decode(cut) == tokenizer.decode(ids), kind
                assert np.array_equal(cut[np.isin(cut, fixed)], ids[np.isin(ids, fixed)])
                num_ids += len(cut)
            lengths.append(num_ids / 200)
        assert lengths[0] == pytest.approx(len(ids), rel=0.05)
        assert lengths[0] + 0.5 < lengths[1] < lengths[2] - 1, kind


def test_without_dropout_the_cuts_are_those_of_sentencepiece(tokenizer: Tokenizer) -> None:
    cutter = WordSegmenter(tokenizer, 0.0)
    for text in sentences(100, seed=3):
        ids = tokenizer.encode(text)
        assert cutter.segment(ids, np.random.default_rng(1)).tolist() == ids


def test_unigram_cuts_are_drawn_with_their_probabilities() -> None:
    tokenizer = train_tokenizer(
        sentences(200), tokenizer_config(type=TokenizerType.unigram, vocab_size=285)
    )
    cutter = WordSegmenter(tokenizer, 0.3)
    word = "abab"
    cutter.scores = {"a": -1.0, "b": -2.0, "ab": -2.5, "ba": -4.0, "bab": -3.0}

    cuts = ["a b a b", "a b ab", "a ba b", "a bab", "ab a b", "ab ab"]
    scores = {cut: sum(map(cutter.scores.__getitem__, cut.split())) for cut in cuts}
    weights = np.exp(0.3 * np.array(list(scores.values())))
    counts = dict.fromkeys(cuts, 0)
    for i in range(4000):
        counts[" ".join(cutter._draw_unigram_pieces(word, Random(i)))] += 1
    shares = np.array(list(counts.values())) / 4000
    # 4 standard deviations of a share of a half
    assert shares == pytest.approx(weights / weights.sum(), abs=0.03)


def test_a_merge_is_left_out_as_often_as_the_probability_says(tokenizer: Tokenizer) -> None:
    word = next("▁" + x for x in "ast" if "▁" + x in tokenizer.all_pieces())
    cutter = WordSegmenter(tokenizer, 0.3)
    num_cut = 0
    for i in range(4000):
        num_cut += len(cutter._draw_bpe_pieces(word, Random(i))) == 2  # ▁ and the letter
    assert num_cut / 4000 == pytest.approx(0.3, abs=0.03)


def print_cuts(model: bytes) -> None:
    """Print some draws."""
    tokenizer = Tokenizer(model)
    sampling = SubwordSampling(tokenizer, 0.5, 1)
    ids = tokenizer.encode("a small tree")
    for row in range(20):
        print(sampling(ids, ids, 0, row)[0].tolist())


@pytest.mark.slow
def test_every_process_draws_the_same_cuts(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with child(tmp_path / "log", print_cuts, tokenizer.model) as process:
        assert process.wait() == 0, process.stderr
        stderr = process.stderr
    print_cuts(tokenizer.model)
    assert capsys.readouterr().out.strip() in stderr


def test_a_pair_is_cut_by_seed_update_and_row_wherever_it_is_batched(
    data_dir: Path, tmp_path: Path
) -> None:
    def draw(batches: list[Any], epoch: int, seed: int = 1) -> list[list[list[int]]]:
        learner = make_run(data_dir, tmp_path, subword_sampling=0.2, seed=seed).learner
        return read_pairs(learner, batches, epoch)

    expected = draw([range(20)], 3)
    assert draw([range(9), range(9, 20)], 3) == expected
    assert draw([range(20)], 4) != expected
    assert draw([range(20)], 3, seed=2) != expected
    plain = make_run(data_dir, tmp_path).learner
    decode = plain.batch_maker.tokenizers.src.decode
    for row, (src, _, _) in enumerate(expected):
        assert decode(src[:-1]) == decode(plain.batch_maker.data[row][0].tolist())


def test_the_gradient_is_divided_by_the_number_of_drawn_tokens(
    data_dir: Path, tmp_path: Path
) -> None:
    learner = make_run(data_dir, tmp_path, subword_sampling=0.3).learner
    rows = list(range(12))
    cuts = learner.batch_maker.sampling
    assert cuts is not None
    pairs = []
    counts = np.zeros(2)
    for row in rows:
        src, tgt = learner.batch_maker.data[row]
        pairs.append(cuts(src, tgt, 2, row))
        counts += [len(pairs[-1][0]) + 1, len(pairs[-1][1]) + 1]
    planned = learner.batch_maker.lengths[rows].sum(0)
    num_src_planned, num_tgt_planned = planned.tolist()
    batches = [np.array(rows[:5]), np.array(rows[5:])]
    update = UpdatePlan(batches, num_tgt_planned, num_src_planned)
    outcome = learner.update(
        update, learner.batch_maker.make_batches(update, 2), 0.0, is_stop_requested=False
    )
    assert (outcome.num_src_tokens, outcome.num_tokens) == tuple(counts)
    assert all(counts > planned)
    learner.batch_maker.data = pairs  # type: ignore[assignment]  # the oracle reads the same cuts
    exact = exact_gradient(learner, rows)
    assert outcome.gradient_norm == pytest.approx(gradient_norm(exact), rel=1e-5)


@pytest.mark.slow
def test_runs_resume_exactly_and_a_tokenizer_of_characters_is_refused(
    data_dir: Path, tmp_path: Path
) -> None:
    same = ["subword_sampling=0.1", "valid_bleu=false", "optimizer.name=adafactor"]
    same += ["optimizer.schedule=inverse_sqrt", "optimizer.peak_learning_rate=0.28", "r_drop=1"]
    assert_resumes_exactly(data_dir, tmp_path, same, ends=(4, 8))
    model = train_sentencepiece(model_type="char", vocab_size=30, hard_vocab_limit=False)
    with pytest.raises(ConfigError, match="subword_sampling=0.1: needs a bpe or unigram tokenizer"):
        WordSegmenter(Tokenizer(model), 0.1)
