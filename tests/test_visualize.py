"""Pictures: what is drawn is what the model, the training code or the file says."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import random_model
from matplotlib import font_manager
from sacrebleu.metrics.chrf import CHRF
from tiny import tiny_config, tiny_model
from toy import command, train
from variants import VARIANTS

from nmt import evaluate
from nmt.config import ModelConfig, Norm, Picture, SearchConfig, Theme, VisualizeConfig
from nmt.data.binary import read_held_out
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import EXIT_USER, ConfigError, NmtError
from nmt.model.transformer import Transformer, num_parameters
from nmt.search.stepper import ModelStepper
from nmt.translate.translator import Translator
from nmt.visualize import draw, run_report, runs, theory, words
from nmt.visualize.style import Style

ROOT = Path(__file__).parent.parent
LIGHT = Style(Theme.light)


def images(figure: Any) -> list[np.ndarray[Any, Any]]:
    """Return the content of the heat maps of a figure."""
    return [i.get_array() for axes in figure.axes for i in axes.get_images()]


def curves(figure: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the curves of a figure by their labels, each (2, N)."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return {str(line.get_label()): np.asarray(line.get_data()) for line in lines}


# --- theory


def test_learning_rates_are_those_of_the_paper() -> None:
    config = VisualizeConfig(schedules=["512:4000", "512:8000", "256:4000", "512:4000:cosine:2e-3"])
    found = list(curves(theory.draw_schedule(config, LIGHT)).values())
    for (steps, rates), (d_model, warmup) in zip(
        found, ((512, 4000), (512, 8000), (256, 4000)), strict=False
    ):
        for step in (1, 4000, 20000):
            paper = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
            assert steps[step - 1] == step
            assert rates[step - 1] == pytest.approx(paper, rel=1e-9), (d_model, warmup, step)
    assert found[3][1].max() == pytest.approx(2e-3)
    assert found[3][1][-1] == pytest.approx(0, abs=1e-9)
    short = theory.draw_schedule(VisualizeConfig(schedules=["512:4000"], steps=100), LIGHT)
    assert list(curves(short)) == ["noam, d_model 512, warm-up 4000: 6.99e-04"]
    for text in ("513:4000", "512", "512:4000:square", "512:0", "0:9", "512:9:cosine:5e--4"):
        with pytest.raises(ConfigError, match="schedules="):
            VisualizeConfig(schedules=[text])


def test_masks_let_a_token_see_itself_and_those_before_it() -> None:
    causal, hidden, padding, _ = images(theory.draw_mask(VisualizeConfig(length=12), LIGHT))
    assert causal.sum(axis=1).tolist() == list(range(1, 13))
    assert (causal == np.tri(12)).all()
    assert (np.ma.getmaskarray(hidden) == (causal > 0)).all()
    assert padding.sum(axis=1).tolist() == [12, 9, 6, 2]


def test_positions_are_the_formula_of_the_paper() -> None:
    model = ModelConfig(d_model=20, num_heads=4)
    config = VisualizeConfig(model=model, dimensions=[4, 5, 6, 7], length=50)
    figure = theory.draw_positions(config, LIGHT)
    interleaved, halves, marian = map(np.asarray, images(figure)[:3])
    found = {k: v for k, v in curves(figure).items() if k.startswith("dimension")}
    for pos in (0, 1, 7, 49):
        for i in range(10):
            angle = pos / 10000 ** (2 * i / 20)
            assert interleaved[pos, 2 * i] == pytest.approx(math.sin(angle), abs=1e-5)
            assert interleaved[pos, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-5)
            angle = pos / 10000 ** (i / 9)
            assert halves[pos, [i, 10 + i]] == pytest.approx(
                [math.sin(angle), math.cos(angle)], abs=1e-5
            )
    order = [*range(0, 20, 2), *range(1, 20, 2)]  # sines, then cosines
    assert np.allclose(marian, interleaved[:, order], atol=1e-6)
    assert (found["dimension 6"][1] == marian[:, 6]).all()  # those on the right are read last
    with pytest.raises(ConfigError, match="dimensions=20: model.d_model=20 has 0 to 19"):
        theory.draw_positions(VisualizeConfig(model=model, dimensions=[20]), LIGHT)


def test_smoothing_is_that_of_the_loss() -> None:
    for eps in (0.1, 0.4):
        target = theory.smoothing_target(eps, 2, 5)
        assert target.tolist() == pytest.approx([eps / 5 + (1 - eps) * (i == 2) for i in range(5)])
        for confidence in (0.05, 0.5, 0.99):
            shares = [confidence, *[(1 - confidence) / 4] * 4]
            wanted = [1 - eps + eps / 5, *[eps / 5] * 4]
            cross = -sum(w * math.log(p) for w, p in zip(wanted, shares, strict=True))
            assert theory.smoothed_loss(eps, confidence, 5) == pytest.approx(cross, rel=1e-5)
        lowest = min(
            theory.smoothed_loss(eps, c, 5) for c in np.linspace(0.01, 0.999, 400).tolist()
        )
        assert theory.smoothed_loss(eps, 1 - eps + eps / 5, 5) <= lowest + 1e-6


def test_the_boxes_of_an_architecture_hold_all_its_parameters() -> None:
    own = {"norm": Norm.pre, "tied_output": False, "output_bias": True}
    for case in ({}, own, *VARIANTS.values()):
        depths = {"num_encoder_layers": 3, "num_decoder_layers": 1}
        config = tiny_config(**{**case, **depths})
        total = 0
        for is_decoder, count in ((False, 3), (True, 1)):
            boxes = theory.column_boxes(config, 23, is_decoder=is_decoder)
            sizes = [sum(box.num_parameters for box in part) for part in boxes]
            total += sizes[0] + count * sizes[1] + sizes[2]
        assert total == num_parameters(Transformer(config, 23)), case
    texts = [theory.shorten(n) for n in (7, 1024, 1_049_088, 63_082_496, 2_000_000_000)]
    assert texts == ["7", "1.02 k", "1.05 M", "63.1 M", "2 G"]


# --- text


def test_the_tree_of_a_search_is_what_search_does(tokenizer: Tokenizer) -> None:
    model = tiny_model(5, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    config = SearchConfig(beam_size=3, max_length_b=6)
    translator = Translator(ModelStepper(model), tokenizer, config)
    for beam_size in (None, 1):
        steps, found = words.record_search(translator, "the small tree", beam_size)
        options = {} if beam_size is None else {"beam_size": beam_size}
        [expected] = translator.n_best(["the small tree"], **options)
        assert [h.score for h in found] == [t.score for t in expected]
        places = words.tree_places(steps, found)
        heights = [place for node, place in places.items() if node not in ((),)]
        assert len(heights) == len(set(heights))  # no two nodes on one another
        leaves = [
            node for node in places if not any(other[:-1] == node for other in places if other)
        ]
        assert {y for _, y in heights} == set(range(len(leaves)))
        for node, (x, _) in places.items():
            assert x == len(node)
            assert not node or node[:-1] in places
        for width in (2, 99):  # in rows of so many steps
            rows = [words.row_of_tree(places, i, width) for i in range(0, len(steps), width)]
            for number, row in enumerate(rows):
                assert {x for x, _ in row.values()} <= {
                    number * width + i for i in range(width + 1)
                }
                assert {y for _, y in row.values()} == set(
                    range(len({*(y for _, y in row.values())}))
                )
                order = sorted(row, key=lambda node: row[node][1])
                assert order == sorted(order, key=lambda node: places[node][1])
            for node in places:  # with its parent beside it
                assert any(node in row and (not node or node[:-1] in row) for row in rows), node
        for hypothesis in found:
            log_prob = 0.0
            for i, token in enumerate(hypothesis.tokens):
                before = tuple(hypothesis.tokens[:i])
                assert steps.sums[before] == pytest.approx(log_prob, abs=1e-4)
                log_prob += hypothesis.token_log_probs[i]
                shares = dict(steps.words[before])
                assert beam_size is None or next(iter(shares)) == token  # greedy takes the first
                if token in shares:
                    share = math.exp(hypothesis.token_log_probs[i])
                    assert shares[token] == pytest.approx(share, rel=1e-4)
        most = max(len(row) for row in steps.sums)
        alive = [sum(len(row) == length for row in steps.sums) for length in range(most + 1)]
        assert max(alive) <= (beam_size or 3)


def test_neighbors_and_axes_are_those_of_plain_numpy() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(40, 8)
    ids = list(range(5, 40))
    found = words.neighbors(vectors, vectors[3], ids, num=4)
    array = vectors.numpy()
    cosine = array @ array[3] / (np.linalg.norm(array, axis=1) * np.linalg.norm(array[3]))
    assert [i for i, _ in found] == sorted(ids, key=lambda i: -cosine[i])[:4]
    places = words.project(vectors).numpy()
    values, axes = np.linalg.eigh(np.cov(array.T))
    expected = (array - array.mean(axis=0)) @ axes[:, np.argsort(-values)[:2]]
    assert np.abs(places) == pytest.approx(np.abs(expected), abs=1e-4)  # a sign is free


def test_a_chosen_head_is_drawn_and_what_is_hidden_is_gray(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", tokenizer)
    translator = Translator.load(folder, device="cpu")
    [pair] = translator.attention(["the $small$ tree"], ["das Haus _ ^"])
    chosen = {"layers": [2], "heads": [3, 0]}
    for kind in words.AttentionKind:
        figure = words.attention_figure(pair, LIGHT, kind=kind, **chosen)
        weights = getattr(pair, kind.value)[1].numpy()
        shown = images(figure)
        per_panel = len(shown) // 2
        assert np.allclose(shown[0], weights[2]), kind
        assert np.allclose(shown[per_panel], weights.mean(axis=0)), kind
        if kind is words.AttentionKind.decoder:
            assert (np.ma.getmaskarray(shown[1]) == np.tri(len(pair.tgt), dtype=bool)).all()
    with pytest.raises(ConfigError, match="heads=5: the model has 4"):
        words.attention_figure(pair, LIGHT, kind=words.AttentionKind.cross, layers=[], heads=[5])


def test_characters_without_a_font_are_shown_as_codes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = [f for f in font_manager.fontManager.ttflist if f.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    with caplog.at_level(logging.WARNING, "nmt"):
        codes = Style(Theme.light).find_fonts(["größer שלום עולם", "مرحبا", "Привет"])
        assert codes == {}
        assert not caplog.records
        codes = Style(Theme.light).find_fonts(["你 a"])
    assert "你 a".translate(codes) == "U+4F60 a"
    assert "U+4F60 (cjk unified ideograph-4f60)" in caplog.text


# --- runs and data


@pytest.fixture(scope="module")
def place(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/mine and data/mine, as the commands of docs/pictures.md name them."""
    found = tmp_path_factory.mktemp("pictures")
    (found / "data").mkdir()
    (found / "data" / "mine").symlink_to(toy_data)
    small = ["max_updates=20", "validate_every_updates=10", "log_every_updates=5"]
    small += ["model.num_encoder_layers=2", "model.num_decoder_layers=2", "model.num_heads=4"]
    small += ["search.max_length_a=0", "search.max_length_b=20"]
    assert train(toy_data, found / "runs" / "mine", *small) == 0
    return found


def test_a_run_is_drawn_while_it_goes_on(tmp_path: Path) -> None:
    figures = {"nll": 4.0, "learning_rate": 1e-3, "gradient_norm": 2.0, "tokens_per_second": 9.0}
    lines = [{"update": 5 * i, **figures, "loss": 5.0} for i in range(1, 9)]
    lines.append({"update": 40, "valid_loss": 3.5, "valid_bleu": 11.0, "valid_perplexity": 33.0})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = "\n".join(map(json.dumps, lines)) + '\n{"update": 45, "nl'
        (tmp_path / name / "metrics.jsonl").write_text(text)
    [config] = [VisualizeConfig(run_dir=[str(tmp_path / "a"), str(tmp_path / "b")])]
    figure = runs.draw_run(config, LIGHT)
    for axes in figure.axes:
        assert len({line.get_color() for line in axes.get_lines()}) == 2, axes.get_title()
    found = curves(runs.draw_run(VisualizeConfig(run_dir=[str(tmp_path / "a")]), LIGHT))
    assert found["validation"].tolist() == [[40], [11.0]]
    (tmp_path / "c").mkdir()
    with pytest.raises(NmtError, match="c/metrics.jsonl has no metrics yet"):
        runs.read_metrics(tmp_path / "c")


@pytest.mark.slow
def test_a_report_says_what_the_commands_say(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    config = VisualizeConfig(run_dir=["runs/mine"], device="cpu")
    test = run_report.translate_test(place / "runs/mine", place / "data/mine", config)
    src, tgt = (list(read_lines(place / f"data/mine/test.{side}")) for side in ("src", "tgt"))
    hypotheses = Translator.load(place / "runs/mine", device="cpu").translate(src)
    assert test.scores == evaluate.evaluate(hypotheses, [tgt], force=True)
    assert sum(count for _, count, _ in test.lengths) == len(src)
    ranks = [row.chrf for row in test.worst]
    assert ranks == sorted(ranks)
    every = [CHRF().sentence_score(h, [t]).score for h, t in zip(hypotheses, tgt, strict=True)]
    assert ranks == sorted(every)[: len(ranks)]
    assert [row.chrf for row in test.best] == sorted(every, reverse=True)[: len(test.best)]
    assert {row.source: row.hypothesis for row in test.shown}.items() <= dict(
        zip(src, hypotheses, strict=True)
    ).items()
    page = run_report.report_page(config)
    for score in test.scores:
        assert f"{score.value:,.2f}" in page
        assert score.signature in page
    assert page.count('class="sentence"') == len(test.shown) == len(test.attention)
    assert '<polyline class="line line-2"' in page
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(ConfigError, match="what=run compares several"):
        run_report.report_page(VisualizeConfig(run_dir=["a", "b"]))


def test_the_worst_and_the_best_sentences_of_a_report_are_those_by_chrf(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(tmp_path / "model", load_tokenizers(toy_data))
    monkeypatch.setattr(Translator, "translate", lambda _, lines, **__: lines)  # as they are
    test = run_report.translate_test(model, toy_data, VisualizeConfig(device="cpu"))
    [text] = read_held_out(toy_data, "test")
    pairs = zip(text.sources, text.targets, strict=True)
    every = sorted(CHRF().sentence_score(h, [t]).score for h, t in pairs)
    assert len(set(every)) > 15
    assert [row.chrf for row in test.worst] == every[: len(test.worst)]
    assert [row.chrf for row in test.best] == every[::-1][: len(test.best)]


def test_a_curve_is_in_its_plot() -> None:
    records = [{"update": u, "nll": v} for u, v in ((1, 50.0), (10, 4.0), (20, 2.0), (40, 1.0))]
    records += [{"update": 40, "valid_loss": 3.0}]
    chart = run_report.curve(records, "loss", {"nll": "training", "valid_loss": "validation"})
    assert chart is not None
    points = [tuple(map(float, p.split(","))) for p in chart.lines[0][1].split()]
    assert points[-1] == pytest.approx((64 + 448, 8 + 146 * (1 - 1.0 / 50)), abs=0.06)
    assert chart.y_ticks[0] == (154, "0")
    assert run_report.curve(records, "BLEU", {"valid_bleu": ""}) is None
    for end in (0.0003, 1.0, 7.3, 1800.0):
        ticks = run_report.round_values(end, 4)
        assert ticks[0] == 0
        assert 2 <= len(ticks) <= 5
        assert ticks[-1] <= end * (1 + 1e-9)


# --- the command


@pytest.mark.slow
def test_every_picture_of_the_gallery_is_made_by_its_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    text = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [
        shlex.split(c) for c in re.findall("^ {4}nmt-visualize (what=(?!upload).*)$", text, re.M)
    ]
    drawn = set()
    for arguments in commands:
        assert command("visualize", *arguments) == 0, arguments
        settings = dict(argument.split("=", 1) for argument in arguments)
        drawn.add(settings["what"])
        output = Path(settings["output"])
        start = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doc"}[output.suffix]
        assert output.read_bytes().lstrip().lower().startswith(start.lower()), arguments
    assert drawn == {picture.value for picture in Picture} - {"upload"}
    shown = re.findall(r"\]\((pictures/.*?)\)", text)
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/pictures").iterdir()}
    assert set(shown) == files
    assert all((ROOT / "docs" / name).stat().st_size < 200_000 for name in shown)


@pytest.mark.slow
def test_without_arguments_it_lists_what_it_can_draw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("visualize") == 0
    listed = capsys.readouterr().out
    assert all(f"  what={picture.value}\n" in listed for picture in Picture)
    assert set(draw.PICTURES) == set(Picture)
    for wrong, message in (
        (["what=mask", "output=mask.html"], "what=mask is written as .png, .svg or .pdf"),
        (["what=mask", "output=mask.gif"], "a picture is a .png, .svg or .pdf file"),
        (["what=report", "output=report.png"], "what=report is written as .html"),
        (["what=run", "run_dir=nowhere"], "has no metrics yet"),
        (["what=upload", "run_dir=nowhere"], "name one or more, such as tracker=[wandb,mlflow]"),
    ):
        assert command("visualize", *wrong) == EXIT_USER, wrong
        assert message in capsys.readouterr().err, wrong
    assert not list(tmp_path.iterdir())
