"""Training on text that is cut anew in every epoch: draws, batches, gradients, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import sentences, tokenizer_config
from test_gradients import exact_gradient
from toy import assert_same_weights, command, make_setup, train, write_corpus

from nmt.config import TokenizerType
from nmt.data.batching import Update
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the toy corpus with its text, tags included."""
    place = tmp_path_factory.mktemp("text")
    assert command("preprocess", *write_corpus(place, 60), "keep_text=true") == 0
    return place / "data"


def test_cuts_keep_the_text_and_depend_on_the_seed_alone() -> None:
    for kind in TokenizerType:
        tokenizer = train_tokenizer(sentences(200), tokenizer_config(type=kind, vocab_size=285))
        assert tokenizer.can_sample()
        text, lengths = "the small green house sees a tree", []
        for alpha in (0.001, 0.3, 0.9) if kind is TokenizerType.bpe else (9.0, 0.3, 0.01):
            cuts = [tokenizer.sample(text, alpha=alpha, seed=seed) for seed in range(50)]
            again = [tokenizer.sample(text, alpha=alpha, seed=seed) for seed in range(49, -1, -1)]
            assert cuts == again[::-1], (kind, alpha)
            assert {tokenizer.decode(cut) for cut in cuts} == {text}, (kind, alpha)
            lengths.append(np.mean([len(cut) for cut in cuts]))
        usual = len(tokenizer.encode(text))
        assert lengths[0] == pytest.approx(usual, rel=0.05)
        assert lengths[0] + 0.5 < lengths[1] < lengths[2] - 1, kind


def test_a_merge_is_left_out_as_often_as_the_probability_says(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.all_pieces()
    text = next(word for word in ("a", "s", "t") if "▁" + word in pieces)
    cuts = [len(tokenizer.sample(text, alpha=0.3, seed=seed)) for seed in range(3000)]
    assert np.mean(np.array(cuts) == 2) == pytest.approx(0.3, abs=0.03)  # ▁ and the letter


def test_a_pair_is_cut_by_seed_epoch_and_row_wherever_it_is_batched(
    data_dir: Path, tmp_path: Path
) -> None:
    def draw(cut: list[Any], epoch: int, seed: int = 1) -> list[list[int]]:
        learner = make_setup(data_dir, tmp_path, subword_sampling=0.2, seed=seed).learner
        update = Update([np.array(rows) for rows in cut], 1, 1)
        batches = [one for batch in learner.make_batches(update, epoch) for one in batch]
        ends = [(one.src[: one.num_src_tokens].tolist(), one.lengths[:, 0]) for one in batches]
        cuts = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in ends]
        return [part.tolist() for batch in cuts for part in batch]

    whole = draw([range(20)], 3)
    assert draw([range(9), range(9, 20)], 3) == whole
    assert all(draw([range(20)], *other) != whole for other in ((4,), (3, 2)))
    plain = make_setup(data_dir, tmp_path).learner
    decode = plain.tokenizer.src.decode
    assert [decode(cut[:-1]) for cut in whole] == [plain.data.texts(i)[0] for i in range(20)]


def test_the_gradient_is_divided_by_the_tokens_that_there_are(
    data_dir: Path, tmp_path: Path
) -> None:
    learner = make_setup(data_dir, tmp_path, subword_sampling=0.3).learner
    rows = list(range(12))
    pairs = [tuple(np.array(side) for side in learner._sample(row, 2)) for row in rows]
    planned = learner.lengths[rows].sum(0)
    update = Update([np.array(rows[:5]), np.array(rows[5:])], *map(int, planned[::-1]))
    outcome = learner.update(update, learner.make_batches(update, 2), 0.0, is_stop_asked=False)
    counts = np.sum([[len(side) + 1 for side in pair] for pair in pairs], axis=0)
    assert (outcome.num_src_tokens, outcome.num_tokens) == tuple(counts)
    assert all(counts > planned)
    learner.data = pairs  # type: ignore[assignment]  # the oracle reads the same cuts
    exact = exact_gradient(learner, rows)
    norm = torch.stack([g.norm() for g in exact.values()]).norm()
    assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)


def test_runs_resume_exactly_and_a_folder_without_text_is_refused(
    data_dir: Path, tmp_path: Path, toy_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["subword_sampling=0.1", "valid_bleu=false", "optimizer.name=adafactor"]
    same += ["optimizer.learning_rate_scale=5", "r_drop=1"]
    assert train(data_dir, tmp_path / "whole", *same, "max_updates=8") == 0
    for end in (4, 8):
        assert train(data_dir, tmp_path / "parts", *same, f"max_updates={end}") == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert train(toy_data, tmp_path / "none", *same) == 2
    assert "keeps no text; make it again with keep_text=true" in capsys.readouterr().err
