"""Augmentation: changed text of pairs, which depends only on seed, update and row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from exporting import random_model
from tiny import sentences, tokenizer_config
from toy import assert_resumes_exactly, make_run, read_pairs

from nmt.cli.commands import COMMANDS
from nmt.cli.main import main
from nmt.config import AugmentConfig, Perturbation, StageConfig, TrainConfig
from nmt.data import perturb
from nmt.data.augment import TextAugmenter
from nmt.data.batching import UpdatePlan
from nmt.data.languages import LanguagePair
from nmt.data.tokenizer import Tokenizer
from nmt.data.vocabulary import train_tokenizer
from nmt.errors import ConfigError
from nmt.training import batches

SRC = "the small house, and 42 trees of Anna."
TGT = "das kleine Haus, und 42 Bäume von Anna."
ROWS = range(300)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A tokenizer that can encode every text, with two symbols."""
    return train_tokenizer(sentences(200), tokenizer_config(byte_fallback=True), ["<bt>", "<sep>"])


def augment(
    tokenizer: Tokenizer,
    src: str = SRC,
    tgt: str = TGT,
    max_length: int = 200,
    **probabilities: float,
) -> set[tuple[str, str]]:
    """Return the changed texts of one pair, drawn for each of ROWS."""
    directions = [LanguagePair("en", "de", "<bt>", "")]
    config = AugmentConfig(**probabilities)
    change = TextAugmenter(config, 1, tokenizer, directions, max_length)
    src_ids = np.array(tokenizer.encode(src))
    tgt_ids = np.array(tokenizer.encode(tgt))
    texts = set()
    for new_src, new_tgt in change([(src_ids, tgt_ids)] * len(ROWS), 3, ROWS):
        texts.add((tokenizer.decode([*map(int, new_src)]), tokenizer.decode([*map(int, new_tgt)])))
    return texts


# Made by opustrainer 0.5 with probability 1; it collapses whitespace, as these texts do
CASES = (
    ("straße İstanbul ὀδός", "STRASSE İSTANBUL ὈΔΌΣ", "Straße İstanbul Ὀδός"),
    ("mixedCase o'neill (in) 3rd", "MIXEDCASE O'NEILL (IN) 3RD", "MixedCase O'neill (in) 3rd"),
    ("ßtrange ŉ ǆungla ﬁsh", "SSTRANGE ʼN ǄUNGLA FISH", "SStrange ʼN Ǆungla FIsh"),
    ("“zitat” —dash éclair", "“ZITAT” —DASH ÉCLAIR", "“zitat” —dash Éclair"),
)


@pytest.mark.parametrize(("text", "upper", "title"), CASES)
def test_capitals_equal_those_of_opustrainer(text: str, upper: str, title: str) -> None:
    assert text.upper() == upper
    assert perturb.to_title(text) == title


def test_title_case_keeps_whitespace() -> None:
    assert perturb.to_title("  a\tb  c ") == "  A\tB  C "


def test_case_changes_on_both_sides(byte_tokenizer: Tokenizer) -> None:
    assert augment(byte_tokenizer, upper=1) == {(SRC.upper(), TGT.upper())}
    assert augment(byte_tokenizer, lower=1) == {(SRC.lower(), TGT.lower())}
    expected = (perturb.to_title(SRC), perturb.to_title(TGT))
    assert augment(byte_tokenizer, title=1) == {expected}
    for chinese in ("房子很小。", "房子IBM很小。"):
        assert augment(byte_tokenizer, chinese, TGT, upper=1) == {(chinese, TGT)}
        upper = perturb.perturb_line(chinese, [TGT], Perturbation.upper, Random(1))
        assert upper == (chinese, [TGT])


def test_each_change_has_its_probability(byte_tokenizer: Tokenizer) -> None:
    change = TextAugmenter(AugmentConfig(upper=0.2, lower=0.3), 1, byte_tokenizer, [], 200)
    src = byte_tokenizer.encode(SRC)
    pairs = change([(src, src)] * 2000, 0, range(2000))
    texts = [byte_tokenizer.decode(new_src) for new_src, _ in pairs]
    assert texts.count(SRC.upper()) / 2000 == pytest.approx(0.2, abs=0.03)
    assert texts.count(SRC.lower()) / 2000 == pytest.approx(0.3, abs=0.03)
    assert texts.count(SRC) / 2000 == pytest.approx(0.5, abs=0.03)


def test_symbols_and_tags_stay(byte_tokenizer: Tokenizer) -> None:
    src = "<bt> the house<sep> the tree"
    tgt = "das Haus<sep> der Baum"
    # decoding a whole source keeps the tag, since it is a piece of the text
    assert augment(byte_tokenizer, src, tgt, upper=1) == {
        ("<bt> THE HOUSE<sep> THE TREE", "DAS HAUS<sep> DER BAUM")
    }
    for typo_src, same_tgt in augment(byte_tokenizer, src, tgt, typos=1):
        assert typo_src.startswith("<bt> ")
        assert typo_src.count("<sep>") == 1
        assert same_tgt == tgt


def test_final_marks_go_on_both_sides_or_not_at_all(byte_tokenizer: Tokenizer) -> None:
    assert augment(byte_tokenizer, punct=1) == {(SRC[:-1], TGT[:-1])}
    assert perturb.remove_end_marks("Really?", "是吗？") == ("Really", "是吗")
    for pair in (
        ("Really?", "Wirklich!"),
        ("Yes.", "Ja"),
        ("Yes", "Ja."),
        ("...", "."),
        ("No.", "."),
    ):
        assert perturb.remove_end_marks(*pair) == pair


def test_typos_are_in_the_source_only(byte_tokenizer: Tokenizer) -> None:
    pairs = augment(byte_tokenizer, typos=1)
    assert {tgt for _, tgt in pairs} == {TGT}
    assert len({src for src, _ in pairs} - {SRC}) > 0.8 * len(ROWS)
    assert perturb.add_typos("房子很小。", 4, Random(1)) == "房子很小。"
    for letter, neighbors in {"s": "qweadzxc", "S": "QWEADZXC", "P": "OL", "ß": "ß"}.items():
        letters = {perturb._draw_neighbor(letter, Random(seed)) for seed in range(200)}
        assert letters == set(neighbors)
    for seed in range(500):  # each typo changes a text by at most one character more or less
        assert abs(len(perturb.add_typos(SRC, 1, Random(seed))) - len(SRC)) <= 1


def test_noise_is_the_same_on_both_sides(byte_tokenizer: Tokenizer) -> None:
    pairs = augment(byte_tokenizer, noise=1)
    assert len(pairs) > 0.9 * len(ROWS)
    for src, tgt in pairs:
        assert src == tgt != ""


def test_inline_noise_is_at_points_that_correspond(byte_tokenizer: Tokenizer) -> None:
    words = set(SRC.split())
    prefix_lengths = set()
    for src, tgt in augment(byte_tokenizer, inline_noise=1):
        common_prefix = os.path.commonprefix([src, SRC])
        added = [word for word in src.split() if word not in words]
        assert added, src
        assert all(word in tgt for word in added)
        prefix_lengths.add(len(common_prefix))
    assert {0, len(SRC)} <= prefix_lengths
    for seed in range(200):
        src, tgt = perturb.insert_word(SRC, TGT, "★", Random(seed))
        assert (src.split().index("★") == 0) == (tgt.split().index("★") == 0)
        if "42 ★" in src:
            assert "42 ★" in tgt


def test_a_pair_that_would_become_too_long_stays(byte_tokenizer: Tokenizer) -> None:
    length = len(byte_tokenizer.encode(TGT)) + 1
    assert augment(byte_tokenizer, max_length=length, upper=1) == {(SRC, TGT)}
    assert augment(byte_tokenizer, SRC.lower(), TGT.lower(), max_length=length, lower=1)


def test_text_with_unknown_characters_stays() -> None:
    tokenizer = train_tokenizer(
        sentences(200), tokenizer_config(vocab_size=80, byte_fallback=False)
    )
    assert tokenizer.unk_id in tokenizer.encode("Ω")
    src = np.array(tokenizer.encode("the Ω house"))
    tgt = np.array(tokenizer.encode("das Haus"))
    change = TextAugmenter(AugmentConfig(upper=1), 1, tokenizer, [], 200)
    pair = (src, tgt)
    [new_pair] = change([pair], 0, [0])
    assert new_pair is pair


def test_words_to_copy_survive_the_normalization_of_text(byte_tokenizer: Tokenizer) -> None:
    for seed in range(1000):
        text = perturb.draw_words_to_copy(Random(seed))
        assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


# --- in a run


def test_batches_depend_on_seed_and_update_and_stage(random_data: Path, tmp_path: Path) -> None:
    def read(config: AugmentConfig, num_updates: int, epoch: int = 3, seed: int = 1) -> Any:
        stages = {"clean": StageConfig(start=5, augment={"typos": 0.0})}
        run = make_run(random_data, tmp_path, augment=config, seed=seed, stages=stages)
        augmenter = run.augmenter_at(num_updates)
        return read_pairs(run.learner, [range(40)], epoch, augmenter)

    typos = AugmentConfig(typos=1)
    pairs = read(typos, 4)
    assert read(typos, 4) == pairs
    assert read(typos, 4, epoch=4) != pairs
    assert read(typos, 4, seed=2) != pairs
    assert read(typos, 5) == read(AugmentConfig(), 0) != pairs


def test_changed_pairs_are_in_micro_batches_of_similar_length(
    random_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MICRO_BATCH_TOKENS", 150)
    run = make_run(random_data, tmp_path, augment=AugmentConfig(inline_noise=0.5))
    maker = run.learner.batch_maker
    rows = np.arange(40)
    plan = UpdatePlan([rows], 1, 1)
    micro_batch_lengths = {}
    for augmenter in (None, run.augmenter_at(0)):
        [micro_batches] = maker.make_batches(plan, 3, augmenter)
        micro_batch_lengths[augmenter] = [batch.lengths for batch in micro_batches]
    plain_lengths, changed_lengths = micro_batch_lengths.values()
    planned = [maker.lengths[part].tolist() for part in maker.split_rows(rows)]
    assert [lengths.tolist() for lengths in plain_lengths] == planned
    assert np.concatenate(changed_lengths).sum() > 1.1 * np.concatenate(plain_lengths).sum()
    longest = 0
    for lengths in changed_lengths:
        assert lengths.max(axis=1).sum() <= 225 or len(lengths) == 1
        assert lengths.max(axis=1).min() >= longest
        longest = lengths.max()
    pairs = maker.change_pairs(rows, 3, run.augmenter_at(0))
    expected = sorted((len(pair.src) + 1, len(pair.tgt) + 1) for pair in pairs)
    assert sorted(map(tuple, np.concatenate(changed_lengths).tolist())) == expected


@pytest.mark.slow
def test_runs_with_augmentation_resume_exactly(random_data: Path, tmp_path: Path) -> None:
    settings = ["augment=default", "augment.typos=0.5", "stages.late.start=6"]
    settings.append("stages.late.augment.upper=0.5")
    assert_resumes_exactly(random_data, tmp_path, "valid_bleu=false", settings, ends=(4, 8))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="add up to at most 1"):
        AugmentConfig(upper=0.6, title=0.6)
    stages = {"late": StageConfig(start=5, augment={"typo": 0.1})}
    with pytest.raises(ConfigError, match=r"stages\.late\.augment\.typo=0\.1: .*typos"):
        TrainConfig(stages=stages)


# --- nmt-evaluate


@pytest.mark.slow
def test_evaluate_scores_changed_text_and_lengths(
    byte_tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(tmp_path / "model", byte_tokenizer, 1)
    source = tmp_path / "in"
    reference = tmp_path / "ref"
    source.write_text("a big house.\na small tree is in the house?\n")
    reference.write_text("Ein Haus.\nein kleiner Baum?\n")
    words = [
        f"model_dir={tmp_path / 'model'}",
        "max_length_b=5",
        f"src={source}",
        f"references={reference}",
    ]
    settings = [
        "perturb=[upper,typos,noise,punct]",
        "by_length=true",
        "metrics=[bleu]",
        "format=json",
    ]
    assert main(COMMANDS["evaluate"], [*words, *settings]) == 0
    names = [score["name"] for score in json.loads(capsys.readouterr().out)["scores"]]
    lengths = ["1 to 3 words (n=1)", "4 to 10 words (n=1)"]
    expected = []
    for kind in ("", "upper ", "typos ", "noise ", "punct "):
        expected.append(f"{kind}BLEU")
        expected += [f"{kind}{length} BLEU" for length in lengths]
    assert names == expected  # typos and noise change the number of words, but not the groups
    assert main(COMMANDS["evaluate"], [f"hypotheses={source}", "perturb=[upper]", words[3]]) == 2
    assert "perturb=upper: does nothing without model_dir" in capsys.readouterr().err


def test_perturbed_lines_keep_what_their_translation_keeps() -> None:
    for kind in Perturbation:
        src, [tgt] = perturb.perturb_line(SRC, [TGT], kind, Random(1))
        assert src != SRC, kind
        assert (tgt == TGT) == (kind is Perturbation.typos)
    references = ["Ja.", "Ja"]  # not all end with the same mark
    assert perturb.perturb_line("Yes.", references, Perturbation.punct, Random(1)) == (
        "Yes.",
        references,
    )
