"""Guided alignment: IBM model 1 on pairs of known alignment, the loss, and training."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from searching import save_tiny
from tiny import plain, tiny_config
from torch import Tensor
from toy import WORDS, assert_resumes_exactly, make_run, train

from nmt import Translator
from nmt.config import TrainConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_alignment import (
    NUM_ITERATIONS,
    WordAligner,
    estimate_translations,
    make_links,
)
from nmt.errors import ConfigError
from nmt.model.alignment import alignment_attention
from nmt.model.attention import causal_mask
from nmt.training.initial_weights import use_initial_architecture

NUM_IDS = 40


def pairs_with_alignment() -> list[tuple[Any, Any, set[tuple[int, int]]]]:
    """Return 400 pairs of ids whose words move, with their links; id 0 has no counterpart."""
    draw = np.random.default_rng(2)
    translation_of = draw.permutation(NUM_IDS)
    pairs = []
    for _ in range(400):
        src = draw.choice(np.arange(1, NUM_IDS), size=draw.integers(3, 9), replace=False)
        order = np.argsort(np.arange(len(src)) + draw.normal(scale=1.0, size=len(src)))
        tgt = np.append(translation_of[src[order]], NUM_IDS)  # and a token without a source
        links = {(int(position), i) for i, position in enumerate(order)}
        pairs.append((np.append(src, 0), tgt, links))
    return pairs


def test_words_are_aligned_with_their_translations_or_with_none() -> None:
    pairs = pairs_with_alignment()
    training_pairs = [(src, tgt) for src, tgt, _ in pairs]
    aligner = WordAligner(training_pairs, src_vocab_size=NUM_IDS, tgt_vocab_size=NUM_IDS + 1)
    num_right = 0
    num_proposed = 0
    num_true = 0
    for src, tgt, links in pairs:
        proposed = {(s, t) for _, t, s in aligner.align([(src, tgt)], has_joint_ids=False).tolist()}
        num_right += len(proposed & links)
        num_proposed += len(proposed)
        num_true += len(links)
    assert num_right / num_true > 0.99
    # two tokens without a counterpart, one on each side of all pairs, are in each other's link
    assert num_proposed - num_right <= len(pairs) * 1.05


def estimate_by_dictionaries(pairs: list[tuple[Any, Any]], null_id: int) -> dict[Any, float]:
    """Estimate IBM model 1 one link at a time; each source gets a token `null_id`."""
    probs: dict[Any, float] = defaultdict(lambda: 1.0)
    for _ in range(NUM_ITERATIONS):
        counts: dict[Any, float] = defaultdict(float)
        totals: dict[Any, float] = defaultdict(float)
        for src, tgt in pairs:
            for tgt_id in tgt:
                src_ids = [*src, null_id]
                normalizer = sum(probs[src_id, tgt_id] for src_id in src_ids)
                for src_id in src_ids:
                    share = probs[src_id, tgt_id] / normalizer
                    counts[src_id, tgt_id] += share
                    totals[src_id] += share
        probs = {key: count / totals[key[0]] for key, count in counts.items()}
    return probs


def test_translations_are_estimated_as_by_dictionaries() -> None:
    draw = np.random.default_rng(5)
    pairs = []
    for _ in range(20):
        src_length, tgt_length = draw.integers(1, 6, size=2)
        src = draw.integers(5, size=src_length).tolist()
        tgt = draw.integers(4, size=tgt_length).tolist()
        pairs.append((src, tgt))
    estimate = estimate_translations(make_links(pairs, null_id=5), num_src_ids=6, num_tgt_ids=4)
    links = zip(estimate.src.tolist(), estimate.tgt.tolist(), strict=True)
    estimated_probs = dict(zip(links, estimate.probs.tolist(), strict=True))
    assert estimated_probs == pytest.approx(estimate_by_dictionaries(pairs, null_id=5))


def test_the_memory_of_an_alignment_does_not_grow_with_the_number_of_pairs() -> None:
    draw = np.random.default_rng(4)
    pairs = [(draw.integers(50, size=100), draw.integers(50, size=100)) for _ in range(60)]
    aligner = WordAligner(pairs, src_vocab_size=50, tgt_vocab_size=50)
    tracemalloc.start()
    links = aligner.align(pairs, has_joint_ids=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e7  # one array of all possible links has 5 MB, and there are ten or more
    expected = []
    for i, pair in enumerate(pairs):
        for _, tgt, src in aligner.align([pair], has_joint_ids=True).tolist():
            expected.append([i, tgt, src])
    assert links.tolist() == expected


def test_equal_ids_are_copies_only_in_a_joint_vocabulary() -> None:
    aligner = WordAligner([([1, 2], [3, 4])], src_vocab_size=9, tgt_vocab_size=9)
    assert aligner.align([([7, 8, 7], [8, 7, 7])], has_joint_ids=False).tolist() == []
    # repeated ids are aligned with the nearest one
    pairs = [([], [1]), ([7, 8, 7], [7, 8, 7]), ([7], [])]
    links = aligner.align(pairs, has_joint_ids=True)
    assert links.tolist() == [[1, 0, 0], [1, 1, 1], [1, 2, 2]]
    assert aligner.align([([], [1]), ([7], [])], has_joint_ids=True).tolist() == []


def test_a_token_of_either_side_has_at_most_one_link() -> None:
    draw = np.random.default_rng(3)
    pairs = [(draw.integers(9, size=20), draw.integers(9, size=20)) for _ in range(20)]
    aligner = WordAligner(pairs, src_vocab_size=9, tgt_vocab_size=9)
    links = aligner.align(pairs, has_joint_ids=False).tolist()
    assert len(links) > 100
    tgt_tokens = {(pair, tgt_position) for pair, tgt_position, _ in links}
    src_tokens = {(pair, src_position) for pair, _, src_position in links}
    assert len(tgt_tokens) == len(links)
    assert len(src_tokens) == len(links)


def test_the_links_of_a_pair_do_not_depend_on_the_other_pairs() -> None:
    draw = np.random.default_rng(1)
    pairs = []
    for _ in range(200):
        src_length, tgt_length = draw.integers(1, 40, size=2)
        pairs.append((draw.integers(9, size=src_length), draw.integers(9, size=tgt_length)))
    aligner = WordAligner(pairs, src_vocab_size=9, tgt_vocab_size=9)
    links = []
    for i, pair in enumerate(pairs):
        for _, tgt, src in aligner.align([pair], has_joint_ids=True).tolist():
            links.append([i, tgt, src])
    assert sorted(aligner.align(pairs, has_joint_ids=True).tolist()) == sorted(links)


def naive_alignment_loss(weights: Tensor, links: list[tuple[int, int]]) -> Tensor:
    """Sum -log of the weights (T, S) at the links, one at a time."""
    loss = torch.zeros(())
    for src_position, tgt_position in links:
        loss = loss - (weights[tgt_position, src_position] + 1e-6).log()
    return loss


@pytest.mark.parametrize(
    ("num_heads", "shift", "simcut"), [(None, 0, 0.0), (1, 1, 0.0), (None, 0, 3.0)]
)
def test_the_loss_adds_the_cross_entropy_of_the_alignment(
    toy_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_heads: int | None,
    shift: int,
    simcut: float,
) -> None:
    monkeypatch.setattr("nmt.training.loss.CUT_PROB", 0.5)
    weight = 0.3
    model = tiny_config(alignment_heads=num_heads, alignment_shift=shift == 1)
    run = make_run(toy_data, tmp_path, guided_alignment=weight, model=model, simcut=simcut)
    batch = run.learner.batch_maker.make_micro_batch(np.arange(6))
    assert batch.alignment is not None
    objective = run.learner.objective
    torch.manual_seed(3)  # of the embeddings that SimCut cuts
    loss, nll = objective(batch)
    objective.alignment_weight = 0.0
    torch.manual_seed(3)
    usual_loss, usual_nll = objective(batch)
    assert nll == usual_nll
    twin = plain(run.learner.model)
    attention = alignment_attention(twin)
    expected = torch.zeros(())
    num_links = 0
    first_src = first_tgt = 0
    for number, (src_length, tgt_length) in enumerate(batch.lengths.tolist()):
        src = batch.src[first_src : first_src + src_length][None]
        tgt = batch.tgt_in[first_tgt : first_tgt + tgt_length][None]
        record: dict[Any, Any] = {attention: None}
        src_mask = torch.ones(1, 1, 1, src_length, dtype=torch.bool)
        twin(src, src_mask, tgt, causal_mask(tgt_length), record)
        links = [(s, t) for pair, t, s in batch.alignment.tolist() if pair == number]
        weights = record[attention][0][:num_heads].mean(dim=0)  # (T, S)
        expected = expected + naive_alignment_loss(weights[shift:], links)
        num_links += len(links)
        first_src += src_length
        first_tgt += tgt_length
    assert num_links > 20
    torch.testing.assert_close(loss - usual_loss, weight * expected, rtol=1e-4, atol=1e-3)
    objective.alignment_weight = weight
    torch.manual_seed(3)
    run.learner.zero_grad()
    (objective(batch)[0] - usual_loss.detach()).backward()
    assert float(alignment_attention(run.learner.model).in_projection.weight.grad.abs().sum()) > 0


def share_of_right_positions(run_dir: Path, tokenizer: Tokenizer) -> float:
    """Return the share of target pieces that are aligned with the word that they translate."""
    translator = Translator.load(run_dir, device="cpu", backend="native")
    words = list(WORDS)

    def split(text: str) -> list[str]:
        return tokenizer.pieces(tokenizer.encode(text))

    lines = [f"{first} {second} {words[0]}" for first in words for second in words]
    num_right = 0
    num_words = 0
    for line in lines:
        targets = [" ".join(WORDS[word] for word in line.split(" "))]
        [scored] = translator.score([line], targets, alignment=True)
        src_pieces = split(line)
        tgt_pieces = split(targets[0])
        src_words = np.cumsum([piece.startswith("▁") for piece in src_pieces]).tolist()
        tgt_words = np.cumsum([piece.startswith("▁") for piece in tgt_pieces]).tolist()
        for position, word in zip(scored.alignment, tgt_words, strict=True):
            num_right += position < len(src_words) and src_words[position] == word
            num_words += 1
    return num_right / num_words


@pytest.mark.slow
def test_a_guided_model_attends_to_the_words_that_it_translates(
    toy_data: Path, tmp_path: Path
) -> None:
    settings = ["max_updates=150", "valid_bleu=false", "optimizer.warmup_steps=100"]
    settings += ["checkpoint_every_updates=150", "validate_every_updates=150"]
    tokenizer = Tokenizer((toy_data / "tokenizer.model").read_bytes())
    shares = {}
    for weight in (0, 1):
        run = tmp_path / f"weight-{weight}"
        assert train(toy_data, run, settings, f"guided_alignment={weight}") == 0
        shares[weight] = share_of_right_positions(run, tokenizer)
    assert shares[1] > 0.9
    assert shares[1] > shares[0] + 0.2


@pytest.mark.slow
def test_a_run_with_guided_alignment_and_simcut_resumes_exactly(
    toy_data: Path, tmp_path: Path
) -> None:
    options = ["guided_alignment=0.1", "simcut=1", "subword_sampling=0.2", "valid_bleu=false"]
    assert_resumes_exactly(toy_data, tmp_path, options, ends=(5, 9))


def test_a_guided_run_is_neither_compiled_nor_sharded(toy_data: Path, tmp_path: Path) -> None:
    model = tiny_config()
    for conflict in ({"compile": True}, {"sharding": "full"}):
        with pytest.raises(ConfigError, match="guided_alignment=0.1: does not work with"):
            make_run(toy_data, tmp_path, model=model, guided_alignment=0.1, **conflict)


def test_fine_tuning_may_align_with_other_heads(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", tokenizer)
    model = tiny_config(alignment_heads=1, alignment_shift=True)
    config = TrainConfig(init_from=str(folder), run_dir=str(tmp_path / "run"), model=model)
    assert use_initial_architecture(config).model.alignment_heads == 1
    assert use_initial_architecture(config).model.alignment_shift
    with pytest.raises(ConfigError, match="must be at most model.num_heads=4"):
        tiny_config(alignment_heads=5)
