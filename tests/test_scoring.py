"""Scores of pairs of source and translation, in Python and by `nmt-score`."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporting import random_model, short_sentences
from searching import decided_model, save_tiny, score_ids, teacher_forced
from tiny import EOS, VOCAB_SIZE, sentences
from toy import command

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_alignment import link_words, number_words
from nmt.search import stepper as stepper_module
from nmt.search.stepper import ModelStepper
from nmt.translate.engines.native import load_models

Rows = list[list[int]]
SRC = ["", *sentences(12, seed=3), "the </s> <pad> house", "größer", ""]
TGT = [*sentences(13, seed=4), "a </s>", "", ""]


def random_rows(count: int, seed: int) -> list[list[int]]:
    """Draw sentences of 0 to 11 ids."""
    rng = random.Random(seed)
    return [rng.choices(range(4, VOCAB_SIZE), k=rng.randrange(12)) for _ in range(count)]


def log_probs_of(
    stepper: ModelStepper, rows: Rows, targets: Rows, max_tokens: int = 4096
) -> list[list[float]]:
    hypotheses = score_ids(stepper, rows, targets, SearchConfig(), max_tokens)
    return [hypothesis.token_log_probs for hypothesis in hypotheses]


def test_scores_equal_a_forward_pass_over_each_pair() -> None:
    model = decided_model()
    rows = random_rows(25, seed=1)
    targets = random_rows(25, seed=2)
    expected = []
    for row, target in zip(rows, targets, strict=True):
        source = torch.tensor([[*row, EOS]]), torch.tensor([len(row) + 1])
        expected.append(teacher_forced(model, source, 0, [*target, EOS]))
    for max_tokens in (1, 40, 4096):
        for i, log_probs in enumerate(log_probs_of(ModelStepper(model), rows, targets, max_tokens)):
            assert log_probs == pytest.approx(expected[i], abs=1e-4), (max_tokens, i)
    assert log_probs_of(ModelStepper(model), [], []) == []


def test_scores_do_not_depend_on_the_chunks_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = ModelStepper(decided_model())
    rows = random_rows(9, seed=1)
    targets = random_rows(9, seed=2)
    expected = log_probs_of(stepper, rows, targets)
    chunk_sizes: list[int] = []
    compute_logits = stepper.model.logits

    def record_chunk(hidden: torch.Tensor) -> torch.Tensor:
        chunk_sizes.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(stepper.model, "logits", record_chunk)
    monkeypatch.setattr(stepper_module, "MAX_LOGITS", 3 * VOCAB_SIZE)
    for i, log_probs in enumerate(log_probs_of(stepper, rows, targets)):
        assert log_probs == pytest.approx(expected[i], abs=1e-5)
    assert max(chunk_sizes) == 3


# --- nmt-score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Two models with one tokenizer, and both sides of a text."""
    folder = tmp_path_factory.mktemp("score")
    for seed in (1, 2):
        save_tiny(folder / f"model{seed}", tokenizer, seed)
    for name, lines in (("src", SRC), ("tgt", TGT)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def run_score(folder: Path, *settings: str, status: int = 0) -> list[str]:
    """Run nmt-score with model1 on the files of the folder; return the lines of its output."""
    output = folder / "scores"
    output.unlink(missing_ok=True)
    files = [f"src={folder / 'src'}", f"tgt={folder / 'tgt'}", f"output={output}"]
    options = [f"model_dir={folder / 'model1'}", "num_threads=1", "device=cpu"]
    assert command("score", options, files, list(settings)) == status
    return output.read_text(encoding="utf-8").splitlines() if output.exists() else []


def score_as_json(folder: Path, *settings: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_score(folder, "format=json", *settings)]


@pytest.mark.slow
def test_text_output_is_the_measure_that_is_asked_for(folder: Path) -> None:
    records = score_as_json(folder)
    assert [record["index"] for record in records] == list(range(len(SRC)))
    for measure in ("log_prob", "per_token", "score"):
        lines = run_score(folder, f"measure={measure}")
        assert [float(line) for line in lines] == [record[measure] for record in records]
    reward_lines = run_score(
        folder, "measure=score", "normalization=none", "word_reward=0.5", "window_lines=3"
    )
    for i, record in enumerate(records[:-1]):
        log_prob = record["log_prob"]
        length = len(record["token_log_probs"])
        assert length == len(record["tokens"]) + 1
        assert log_prob == pytest.approx(sum(record["token_log_probs"]), abs=1e-9)
        assert record["per_token"] == pytest.approx(log_prob / length)
        assert record["score"] == pytest.approx(log_prob / ((5 + length) / 6) ** 0.6)
        assert float(reward_lines[i]) == pytest.approx(log_prob + 0.5 * length, abs=1e-4)


def test_a_pair_of_empty_lines_scores_0_and_a_single_empty_line_is_scored(
    folder: Path, tokenizer: Tokenizer
) -> None:
    records = score_as_json(folder)
    assert SRC[-1] == TGT[-1] == ""
    assert records[-1]["log_prob"] == 0.0
    assert records[-1]["tokens"] == []
    backend = load_models([folder / "model1"], device="cpu").backend
    src_ids = tokenizer.encode_batch(SRC)
    tgt_ids = tokenizer.encode_batch(TGT)
    hypotheses = backend.score(src_ids, tgt_ids, SearchConfig(), 100)
    for i, record in enumerate(records[:-1]):
        expected = hypotheses[i].token_log_probs
        assert record["token_log_probs"] == pytest.approx(expected, abs=1e-5)
    lengths = [len(record["token_log_probs"]) for record in records]
    assert lengths[0] > 1  # a target without a source
    assert lengths[-2] == 1  # a source without a target: EOS


@pytest.mark.slow
def test_invalid_arguments_are_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "short").write_text("a\nb\n", encoding="utf-8")
    for settings, message in (
        ([f"tgt={folder / 'short'}"], f"src has {len(SRC)} lines, {folder / 'short'} 2;"),
        (["src=null"], "give src=FILE and tgt=FILE"),
        (["src=-", "tgt=-"], "src is stdin already"),
        (["alignment=true"], "alignment=true: needs format=json"),
        (["output=/nowhere/scores"], "/nowhere does not exist"),
        ([f"output={folder / 'tgt'}"], "is the input; give the path of another file"),
    ):
        assert run_score(folder, *settings, status=2) == []
        errors = [line for line in capsys.readouterr().err.split("\n") if " model /" not in line]
        assert message in errors[0]
        assert errors[1:] == [""]


def test_one_side_may_come_from_stdin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_score(folder)
    stream = io.BytesIO((folder / "tgt").read_bytes())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))
    assert run_score(folder, "tgt=-") == expected


@pytest.mark.slow
def test_an_ensemble_scores_the_mean_of_its_models(folder: Path) -> None:
    first_scores = run_score(folder, f"model_dir={folder / 'model1'}")
    second_scores = run_score(folder, f"model_dir={folder / 'model2'}")
    ensemble = f"model_dir=[{folder / 'model1'},{folder / 'model2'}]"
    scores = run_score(folder, ensemble, "combine=log_probabilities")
    for i, line in enumerate(scores):
        mean = (float(first_scores[i]) + float(second_scores[i])) / 2
        assert float(line) == pytest.approx(mean, abs=1e-4)
    assert len(scores) == len(first_scores)
    assert scores != run_score(folder, ensemble)


# --- the same scores as nmt-translate


@pytest.mark.slow
def test_nmt_score_gives_a_translation_the_scores_of_nmt_translate(
    trained_model_dir: Path, tmp_path: Path
) -> None:
    model = f"model_dir={trained_model_dir}"  # mostly copies
    lines = "".join(f"{line}\n" for line in short_sentences(40))
    (tmp_path / "src").write_text(lines, encoding="utf-8")
    output = tmp_path / "translations"
    files = [f"input={tmp_path / 'src'}", f"output={output}"]
    options = [model, "format=json", "num_threads=1", "device=cpu", "beam_size=4"]
    assert command("translate", files, options) == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    translations = [record["hypotheses"][0] for record in records]
    text = "".join(f"{translation['text']}\n" for translation in translations)
    (tmp_path / "tgt").write_text(text, encoding="utf-8")
    num_compared = 0
    for i, record in enumerate(score_as_json(tmp_path, model)):
        if record["tokens"] != translations[i]["tokens"]:
            continue  # the tokenizer splits the text of the translation otherwise
        num_compared += 1
        assert translations[i]["finished"]
        for name in ("log_prob", "score", "token_log_probs"):
            assert record[name] == pytest.approx(translations[i][name], abs=1e-4)
    assert num_compared > 30


def test_the_alignment_of_words_is_the_alignment_of_their_pieces(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    (tmp_path / "src").write_text("the house\n\n", encoding="utf-8")
    (tmp_path / "tgt").write_text("the small house\n\n", encoding="utf-8")
    [record, empty] = score_as_json(tmp_path, f"model_dir={model}", "alignment=true")
    src_words = number_words(record["source_tokens"])
    tgt_words = number_words(record["tokens"])
    assert (src_words[-2], tgt_words[-1]) == (1, 2)
    eos = len(src_words) - 1
    links = set()
    for tgt_word, position in zip(tgt_words, record["alignment"], strict=True):
        if position != eos:
            links.add(f"{src_words[position]}-{tgt_word}")
    lines = run_score(tmp_path, f"model_dir={model}", "measure=alignment")
    assert set(lines[0].split()) == links
    assert "alignment" not in empty
    assert lines[1] == ""


def test_pieces_of_a_word_link_it_once_and_eos_links_nothing() -> None:
    src = ["▁the", "▁ho", "use"]
    tgt = ["▁das", "▁H", "a", "us", "."]
    assert link_words(src, tgt, [0, 1, 2, 2, 3]) == [(0, 0), (1, 1)]
    assert link_words([], tgt, [0, 0, 0, 0, 0]) == []
