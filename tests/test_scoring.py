"""Scores of given translations, in Python and by `nmt-score`."""

from __future__ import annotations

import io
import json
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
from nmt.search import stepper as stepper_module
from nmt.search.stepper import ModelStepper
from nmt.translate.engines.native import load_models

Rows = list[list[int]]
SRC = ["", *sentences(12, seed=3), "the </s> <pad> house", "größer", ""]
TGT = [*sentences(13, seed=4), "a </s>", "", ""]


def random_rows(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (count,), generator=generator).tolist()
    return [
        torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def log_probs_of(
    stepper: ModelStepper, rows: Rows, targets: Rows, max_tokens: int = 4096
) -> list[list[float]]:
    found = score_ids(stepper, rows, targets, SearchConfig(), max_tokens)
    return [hypothesis.token_log_probs for hypothesis in found]


def test_scores_equal_those_of_each_pair_alone() -> None:
    model = decided_model()
    rows, targets = random_rows(25, 1), random_rows(25, 2)
    pairs = list(zip(rows, targets, strict=True))
    sources = [(torch.tensor([[*row, EOS]]), torch.tensor([len(row) + 1])) for row in rows]
    expected = [
        teacher_forced(model, source, 0, [*target, EOS])
        for source, target in zip(sources, targets, strict=True)
    ]
    for max_tokens in (1, 40, 4096):
        found = log_probs_of(ModelStepper(model), rows, targets, max_tokens)
        for pair, log_probs, wanted in zip(pairs, found, expected, strict=True):
            assert log_probs == pytest.approx(wanted, abs=1e-4), (max_tokens, pair)
    assert log_probs_of(ModelStepper(model), [], []) == []


def test_scores_do_not_depend_on_the_pieces_that_logits_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepper, pairs = ModelStepper(decided_model()), (random_rows(9, 1), random_rows(9, 2))
    whole = log_probs_of(stepper, *pairs)
    sizes: list[int] = []
    usual = stepper.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return usual(hidden)

    monkeypatch.setattr(stepper.model, "logits", watched)
    monkeypatch.setattr(stepper_module, "MAX_LOGITS", 3 * VOCAB_SIZE)
    for some, all_at_once in zip(log_probs_of(stepper, *pairs), whole, strict=True):
        assert some == pytest.approx(all_at_once, abs=1e-5)
    assert max(sizes) == 3


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


def run_score(folder: Path, *arguments: str, status: int = 0) -> list[str]:
    output = folder / "scores"
    output.unlink(missing_ok=True)
    places = [f"src={folder / 'src'}", f"tgt={folder / 'tgt'}", f"output={output}"]
    given = [f"model_dir={folder / 'model1'}", "num_threads=1", "device=cpu", *places, *arguments]
    assert command("score", *given) == status
    return output.read_text(encoding="utf-8").splitlines() if output.exists() else []


def scored(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_score(folder, "format=json", *arguments)]


@pytest.mark.slow
def test_text_output_is_the_measure_that_is_asked_for(folder: Path) -> None:
    objects = scored(folder)
    assert [o["index"] for o in objects] == list(range(len(SRC)))
    for measure in ("log_prob", "per_token", "score"):
        lines = run_score(folder, f"measure={measure}")
        assert [float(line) for line in lines] == [o[measure] for o in objects]
    settings = ["measure=score", "normalization=none", "word_reward=0.5", "window_lines=3"]
    rewarded = run_score(folder, *settings)
    for o, reward in zip(objects[:-1], rewarded, strict=False):
        length = len(o["token_log_probs"])
        assert length == len(o["tokens"]) + 1
        assert o["log_prob"] == pytest.approx(sum(o["token_log_probs"]), abs=1e-9)
        assert o["per_token"] == pytest.approx(o["log_prob"] / length)
        assert o["score"] == pytest.approx(o["log_prob"] / ((5 + length) / 6) ** 0.6)
        assert float(reward) == pytest.approx(o["log_prob"] + 0.5 * length, abs=1e-4)


def test_two_empty_lines_score_0_and_one_is_scored_as_it_is(
    folder: Path, tokenizer: Tokenizer
) -> None:
    objects = scored(folder)
    assert (SRC[-1], TGT[-1]) == ("", "")
    assert (objects[-1]["log_prob"], objects[-1]["tokens"]) == (0.0, [])
    backend = load_models([folder / "model1"], device="cpu").backend
    encoded = [tokenizer.encode_batch(lines) for lines in (SRC, TGT)]
    for o, h in zip(objects[:-1], backend.score(*encoded, SearchConfig(), 100), strict=False):
        assert o["token_log_probs"] == pytest.approx(h.token_log_probs, abs=1e-5)
    lengths = [len(o["token_log_probs"]) for o in objects]
    assert lengths[0] > 1  # a target without a source
    assert lengths[-2] == 1  # a source without a target: EOS


@pytest.mark.slow
def test_mistakes_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "short").write_text("a\nb\n", encoding="utf-8")
    for arguments, message in (
        ([f"tgt={folder / 'short'}"], f"src has {len(SRC)} lines, {folder / 'short'} 2;"),
        (["src=null"], "give src=FILE and tgt=FILE"),
        (["src=-", "tgt=-"], "src is stdin already"),
        (["alignment=true"], "alignment=true: needs format=json"),
        (["window_lines=0"], "window_lines=0: must be at least 1"),
        (["output=/nowhere/scores"], "/nowhere does not exist"),
        ([f"output={folder / 'tgt'}"], "is the input; give the path of another file"),
    ):
        assert run_score(folder, *arguments, status=2) == []
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
    models = [f"model_dir={folder / name}" for name in ("model1", "model2")]
    both = f"model_dir=[{folder / 'model1'},{folder / 'model2'}]"
    first, second = (run_score(folder, model) for model in models)
    found = run_score(folder, both, "combine=log_probabilities")
    for line, one, other in zip(found, first, second, strict=True):
        assert float(line) == pytest.approx((float(one) + float(other)) / 2, abs=1e-4)
    assert found != run_score(folder, both)


# --- what nmt-translate says of the same tokens


@pytest.mark.slow
def test_nmt_score_gives_of_a_translation_what_nmt_translate_gave(
    trained_models: dict[str, Path], tmp_path: Path
) -> None:
    model = f"model_dir={trained_models['post-sinusoidal']}"  # mostly copies
    lines = "".join(f"{line}\n" for line in short_sentences(40))
    (tmp_path / "src").write_text(lines, encoding="utf-8")
    output = tmp_path / "translations"
    places = [model, f"input={tmp_path / 'src'}", f"output={output}"]
    options = ["format=json", "num_threads=1", "device=cpu", "beam_size=4"]
    assert command("translate", *places, *options) == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    best = [record["hypotheses"][0] for record in records]
    (tmp_path / "tgt").write_text("".join(f"{h['text']}\n" for h in best), encoding="utf-8")
    pairs = zip(best, scored(tmp_path, model), strict=True)
    same = [(h, s) for h, s in pairs if h["tokens"] == s["tokens"]]
    assert len(same) > 30
    for h, s in same:
        assert h["finished"]
        for name in ("log_prob", "score", "token_log_probs"):
            assert s[name] == pytest.approx(h[name], abs=1e-4)


def test_json_has_one_alignment_for_each_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", tokenizer)
    paths = {side: tmp_path / side for side in ("src", "tgt", "output")}
    paths["src"].write_text("the house\n")
    paths["tgt"].write_text("the small house\n")
    arguments = [f"{name}={path}" for name, path in paths.items()]
    options = [f"model_dir={model}", "format=json", "alignment=true", "device=cpu"]
    assert command("score", options, arguments) == 0
    record = json.loads(paths["output"].read_text())
    assert len(record["alignment"]) == len(record["tokens"]) > 0
