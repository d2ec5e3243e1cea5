"""Noise on token ids: its effect on a pair, which depends only on seed, epoch and row."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import sentences, tokenizer_config
from toy import assert_resumes_exactly, make_run, read_pairs, read_records, train

from nmt.config import NoiseConfig
from nmt.data.batching import UpdatePlan
from nmt.data.languages import LanguagePair
from nmt.data.noise import TokenNoise
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer

SRC = list(range(100, 130))
TGT = list(range(200, 220))
ROWS = range(400)


def draw(tokenizer: Tokenizer, pair: tuple[list[int], list[int]], **noise: Any) -> list[Any]:
    """Return the noisy pair for each of ROWS."""
    add_noise = TokenNoise(NoiseConfig(**noise), 1, tokenizer, [])
    noisy = []
    for row in ROWS:
        src, tgt = add_noise(pair[0], pair[1], 0, row)
        noisy.append((src.tolist(), tgt.tolist()))
    return noisy


def draw_side(tokenizer: Tokenizer, side: int, **noise: Any) -> Any:
    """Return the noisy ids (ROWS, length) of one side; check that the other side is unchanged."""
    noisy = []
    for pair in draw(tokenizer, (SRC, TGT), **noise):
        assert pair[1 - side] == (SRC, TGT)[1 - side]
        noisy.append(pair[side])
    return np.array(noisy)


def test_shares_of_tokens_are_dropped_masked_and_hidden(tokenizer: Tokenizer) -> None:
    unknown = tokenizer.unk_id
    for share in (0.1, 0.5):
        rows = draw(tokenizer, (SRC, TGT), drop=share)
        num_kept = 0
        for src, tgt in rows:
            assert src == sorted(set(src))
            assert set(src) <= set(SRC)
            assert tgt == TGT
            num_kept += len(src)
        assert num_kept / (30 * len(ROWS)) == pytest.approx(1 - share, abs=0.02)
        for key, side, clean in (("mask", 0, SRC), ("word_dropout", 1, TGT)):
            ids = draw_side(tokenizer, side, **{key: share})
            assert set(ids[ids != clean]) == {unknown}, key
            assert np.mean(ids == unknown, axis=0) == pytest.approx(share, abs=0.1), key
            assert np.mean(ids == unknown) == pytest.approx(share, abs=0.02), key


def test_hints_stay_whole() -> None:
    symbols = ["__source__", "__target__", "__done__"]
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), symbols)
    hint = "__target__ größer Haus__done__"
    src = tokenizer.encode(f"the green__source__ house tree{hint} sees a__source__ tree{hint} a")
    hint_ids = tokenizer.encode(f"a{hint}")[1:]
    num_changed = 0
    for noisy, _ in draw(tokenizer, (src, TGT), drop=0.3, mask=0.3, swap=2):
        positions = [i for i, token in enumerate(noisy) if token == hint_ids[0]]
        assert [noisy[i : i + len(hint_ids)] for i in positions] == [hint_ids, hint_ids]
        assert [token for token in noisy if tokenizer.pieces([token])[0] in symbols] == [
            token for token in src if tokenizer.pieces([token])[0] in symbols
        ]
        num_changed += noisy != src
    assert num_changed > 0.9 * len(ROWS)


def test_something_remains_of_every_source(tokenizer: Tokenizer) -> None:
    sources = {tuple(src) for src, _ in draw(tokenizer, ([7, 8], [9]), drop=0.99)}
    assert {(7,), (8,)} <= sources <= {(7,), (8,), (7, 8)}


def test_tokens_move_by_as_many_positions_as_swap_says_and_no_more(tokenizer: Tokenizer) -> None:
    for distance in (1, 3):
        sources = draw_side(tokenizer, 0, swap=distance)
        assert (np.sort(sources) == SRC).all()
        moves = sources.argsort() - np.arange(len(SRC))
        assert (moves.min(), moves.max()) == (-distance, distance)


def test_noises_do_not_change_each_others_draws(tokenizer: Tokenizer) -> None:
    combined = draw(tokenizer, (SRC, TGT), drop=0.2, mask=0.3, swap=2, word_dropout=0.1)
    dropped = draw(tokenizer, (SRC, TGT), drop=0.2)
    hidden = draw(tokenizer, (SRC, TGT), mask=0.3)
    for (src, _), (noisy, _), (masked, _) in zip(combined, dropped, hidden, strict=True):
        assert set(src) - {tokenizer.unk_id} == set(noisy) & set(masked)


def test_tags_before_a_text_stay() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), ["<bt>", "<2de>"])
    noise = NoiseConfig(drop=0.9, mask=0.9, swap=5, word_dropout=0.9)
    make = TokenNoise(noise, 1, tokenizer, [LanguagePair("en", "de", "<bt>", "<2de>")])
    src = tokenizer.encode("<bt> the small house")
    tgt = tokenizer.encode("<2de> das Haus")
    num_src = len(tokenizer.encode("<bt>"))
    num_tgt = len(tokenizer.encode("<2de>"))
    for row in ROWS:
        noisy, inputs = make(src, tgt, 0, row)
        assert noisy[:num_src].tolist() == src[:num_src]
        assert len(noisy) > num_src
        assert inputs[:num_tgt].tolist() == tgt[:num_tgt]
    assert {make(src, tgt, 0, row)[1][num_tgt] for row in ROWS} == {tokenizer.unk_id, tgt[num_tgt]}


def test_lines_of_a_document_stay_apart() -> None:
    tokenizer = train_tokenizer(sentences(200), tokenizer_config(), ["<sep>"])
    noise = NoiseConfig(drop=0.5, mask=0.5, swap=5, word_dropout=0.9)
    make = TokenNoise(noise, 1, tokenizer, [])
    sep = tokenizer.encode("<sep>")[-1]
    first = [100, 101, 102]
    second = [110, 111, 112]
    for row in ROWS:
        src_ids, tgt_ids = make([*first, sep, *second], [9, sep, 8], 0, row)
        src = src_ids.tolist()
        tgt = tgt_ids.tolist()
        separator_index = src.index(sep)
        assert tokenizer.unk_id in src or set(src) <= {*first, *second, sep}
        assert not {*src[:separator_index]} & {*second}, row
        assert not {*src[separator_index + 1 :]} & {*first, sep}, row
        assert tgt[1] == sep, row
        assert len(src) > 1, row


# --- in a run

NOISE = {"drop": 0.2, "mask": 0.1, "swap": 2, "word_dropout": 0.2}


def test_a_batch_reads_noise_by_seed_update_and_row_and_learns_the_clean_target(
    random_data: Path, tmp_path: Path
) -> None:
    def read(batches: list[Any], epoch: int, seed: int = 1) -> list[list[list[int]]]:
        learner = make_run(random_data, tmp_path, noise=NoiseConfig(**NOISE), seed=seed).learner
        return read_pairs(learner, batches, epoch)

    pairs = read([range(40)], 3)
    assert read([range(13), range(13, 40)], 3) == pairs
    assert read([range(40)], 4) != pairs
    assert read([range(40)], 3, seed=2) != pairs
    run = make_run(random_data, tmp_path)
    tokenizer = run.tokenizers.src
    add_noise = TokenNoise(NoiseConfig(**NOISE), 1, tokenizer, [])
    for row, (src, tgt_in, tgt_out) in enumerate(pairs):
        clean_src, clean_tgt = run.learner.batch_maker.data[row]
        noisy, inputs = add_noise(clean_src, clean_tgt, 3, row)
        assert src == [*noisy, tokenizer.eos_id]
        assert tgt_in == [tokenizer.bos_id, *inputs]
        assert tgt_out == [*clean_tgt, tokenizer.eos_id]


def test_an_update_counts_the_source_tokens_that_noise_left(
    random_data: Path, tmp_path: Path
) -> None:
    learner = make_run(random_data, tmp_path, noise=NoiseConfig(drop=0.3)).learner
    planned = learner.batch_maker.lengths[:40].sum(0)
    num_src_planned, num_tgt = planned.tolist()
    update = UpdatePlan([np.arange(25), np.arange(25, 40)], num_tgt, num_src_planned)
    batches = learner.batch_maker.make_batches(update, 2)
    result = learner.update(update, batches, 0.0, is_stop_requested=False)
    num_src_tokens = 0
    for batch in chain.from_iterable(batches):
        num_src_tokens += batch.num_src_tokens
    assert (result.num_src_tokens, result.num_tokens) == (num_src_tokens, num_tgt)
    assert num_src_tokens < 0.85 * num_src_planned


@pytest.mark.slow
def test_runs_with_noise_resume_exactly_and_validate_without_it(
    random_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = [f"noise.{key}={value}" for key, value in NOISE.items()]
    run_dir = assert_resumes_exactly(random_data, tmp_path, "valid_bleu=false", noise, ends=(4, 8))
    assert train(random_data, run_dir, "valid_bleu=false", "noise.drop=0", "max_updates=9") == 2
    assert "noise.drop was 0.2, is 0.0" in capsys.readouterr().err
    noisy = make_run(random_data, tmp_path, noise=NoiseConfig(**NOISE))
    clean = make_run(random_data, tmp_path)
    clean.learner.model.load_state_dict(noisy.learner.model.state_dict())
    loss = noisy.validation.compute_loss(noisy.learner.model)
    assert loss == clean.validation.compute_loss(clean.learner.model)
    assert read_records(run_dir, "valid_loss")
