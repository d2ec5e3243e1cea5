"""Pictures show the numbers of the model, the training code or the file that they are made from."""

from __future__ import annotations

import json
import logging
import math
import re
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
from nmt.config import (
    AttentionKind,
    ModelConfig,
    Norm,
    Picture,
    SearchConfig,
    Theme,
    VisualizeConfig,
)
from nmt.data.binary import read_held_out
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import EXIT_USER, ConfigError, NmtError
from nmt.model.transformer import Transformer, count_parameters
from nmt.search.stepper import ModelStepper
from nmt.translate.translator import Translator
from nmt.visualize import (
    architecture,
    attention_figure,
    draw,
    embeddings,
    run_report,
    runs,
    search_tree,
    theory,
)
from nmt.visualize.style import Style

ROOT = Path(__file__).parent.parent
LIGHT = Style(Theme.light)


def heat_maps(figure: Any) -> list[np.ndarray[Any, Any]]:
    """Return the values of the heat maps of a figure."""
    return [image.get_array() for axes in figure.axes for image in axes.get_images()]


def curves(figure: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the curves of a figure by their labels, each (2, N)."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return {str(line.get_label()): np.asarray(line.get_data()) for line in lines}


# --- theory


def test_learning_rates_are_those_of_the_paper() -> None:
    config = VisualizeConfig(schedules=["512:4000", "512:8000", "256:4000", "512:4000:cosine:2e-3"])
    lines = list(curves(theory.draw_schedule(config, LIGHT)).values())
    for i, (d_model, warmup) in enumerate([(512, 4000), (512, 8000), (256, 4000)]):
        updates, rates = lines[i]
        for update in (1, 4000, 20000):
            expected = d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)
            assert updates[update - 1] == update
            assert rates[update - 1] == pytest.approx(expected, rel=1e-9), (d_model, warmup, update)
    assert lines[3][1].max() == pytest.approx(2e-3)
    assert lines[3][1][-1] == pytest.approx(0, abs=1e-9)
    short = theory.draw_schedule(VisualizeConfig(schedules=["512:4000"], steps=100), LIGHT)
    assert list(curves(short)) == ["noam, d_model 512, warm-up 4000: 6.99e-04"]
    for text in ("513:4000", "512", "512:4000:square", "512:0", "0:9", "512:9:cosine:5e--4"):
        with pytest.raises(ConfigError, match="schedules="):
            VisualizeConfig(schedules=[text])


def test_masks_let_a_token_see_itself_and_those_before_it() -> None:
    figure = theory.draw_mask(VisualizeConfig(length=12), LIGHT)
    causal, hidden, padding, _ = heat_maps(figure)
    assert (causal == np.tri(12)).all()
    assert (np.ma.getmaskarray(hidden) == (causal > 0)).all()
    assert padding.sum(axis=1).tolist() == [12, 9, 6, 2]


def test_positions_are_the_formulas_of_their_sources() -> None:
    model = ModelConfig(d_model=20, num_heads=4)
    config = VisualizeConfig(model=model, dimensions=[4, 5, 6, 7], length=50)
    figure = theory.draw_positions(config, LIGHT)
    paper, tensor2tensor, marian = map(np.asarray, heat_maps(figure)[:3])
    positions = np.arange(50)[:, None]
    angles = positions / 10000 ** (np.arange(10) / 10)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    assert np.allclose(marian, expected, atol=1e-5)
    assert np.allclose(paper[:, 0::2], np.sin(angles), atol=1e-5)
    assert np.allclose(paper[:, 1::2], np.cos(angles), atol=1e-5)
    angles = positions / 10000 ** (np.arange(10) / 9)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    assert np.allclose(tensor2tensor, expected, atol=1e-5)
    lines = curves(figure)["dimension 6"]  # equal labels: Marian's, which come last
    assert (lines[1] == marian[:, 6]).all()
    with pytest.raises(ConfigError, match="dimensions=20: model.d_model=20 has 0 to 19"):
        theory.draw_positions(VisualizeConfig(model=model, dimensions=[20]), LIGHT)


def test_the_picture_of_smoothing_shows_the_targets_of_the_loss() -> None:
    for smoothing in (0.1, 0.4):
        expected = torch.full((5,), smoothing / 5)
        expected[2] += 1 - smoothing
        target = theory.smoothed_target(smoothing, 2, 5)
        assert target.tolist() == pytest.approx(expected.tolist())
        for confidence in (0.05, 0.5, 0.99):
            probabilities = torch.full((5,), (1 - confidence) / 4)
            probabilities[2] = confidence
            loss = theory.smoothed_loss(smoothing, confidence, 5)
            assert loss == pytest.approx(-float(expected @ probabilities.log()), rel=1e-5)
        losses = [theory.smoothed_loss(smoothing, c, 5) for c in np.linspace(0.01, 0.999, 400)]
        assert theory.smoothed_loss(smoothing, float(expected[2]), 5) <= min(losses) + 1e-6


def test_the_boxes_of_an_architecture_hold_all_its_parameters() -> None:
    untied = {"norm": Norm.pre, "tied_output": False, "output_bias": True}
    for changes in ({}, untied, *VARIANTS.values()):
        depths = {"num_encoder_layers": 3, "num_decoder_layers": 1}
        config = tiny_config(**{**changes, **depths})
        boxes = []
        for is_decoder, num_layers in ((False, 3), (True, 1)):
            column = architecture.make_column(config, 23, is_decoder=is_decoder)
            boxes += [*column.below, *num_layers * column.layer, *column.above]
        total = sum(box.num_parameters for box in boxes)
        assert total == count_parameters(Transformer(config, 23)), changes
    texts = [architecture.format_count(n) for n in (7, 1024, 1_049_088, 63_082_496, 2_000_000_000)]
    assert texts == ["7", "1.02 k", "1.05 M", "63.1 M", "2 G"]


# --- search, embeddings and attention


def recorded_search(
    tokenizer: Tokenizer, beam_size: int | None
) -> tuple[search_tree.SearchRecord, list[Any], list[Any]]:
    """Return the record and hypotheses of a search with beam 3 or `beam_size`, and `n_best`."""
    model = tiny_model(5, sharpness=2.0, vocab_size=tokenizer.vocab_size)
    config = SearchConfig(beam_size=3, max_length_b=6, loop_guard=False)
    translator = Translator(ModelStepper(model), tokenizer, config)
    record, hypotheses = search_tree.record_search(translator, "the small tree", beam_size)
    options = {} if beam_size is None else {"beam_size": beam_size}
    [translations] = translator.n_best(["the small tree"], **options)
    return record, hypotheses, translations


@pytest.mark.parametrize("beam_size", [None, 1])
def test_the_record_of_a_search_holds_the_probabilities_of_its_hypotheses(
    tokenizer: Tokenizer, beam_size: int | None
) -> None:
    record, hypotheses, translations = recorded_search(tokenizer, beam_size)
    assert [h.score for h in hypotheses] == [t.score for t in translations]
    for hypothesis in hypotheses:
        log_prob = 0.0
        for i, token in enumerate(hypothesis.tokens):
            node = tuple(hypothesis.tokens[:i])
            assert record.log_probs[node] == pytest.approx(log_prob, abs=1e-4)
            log_prob += hypothesis.token_log_probs[i]
            likeliest = dict(record.likeliest[node])
            assert beam_size is None or next(iter(likeliest)) == token  # greedy search
            if token in likeliest:
                expected = math.exp(hypothesis.token_log_probs[i])
                assert likeliest[token] == pytest.approx(expected, rel=1e-4)
    num_nodes = np.bincount([len(node) for node in record.log_probs])  # of each step
    assert num_nodes.max() <= (beam_size or 3)


@pytest.mark.parametrize("beam_size", [None, 1])
def test_no_node_of_a_search_tree_covers_another_and_each_is_beside_its_parent(
    tokenizer: Tokenizer, beam_size: int | None
) -> None:
    record, hypotheses, _ = recorded_search(tokenizer, beam_size)
    layout = search_tree.layout_tree(record, hypotheses)
    assert len(set(layout.values())) == len(layout)
    parents = {node[:-1] for node in layout if node}
    assert parents <= set(layout)
    heights = {height for _, height in layout.values()}
    assert heights == set(range(len(layout.keys() - parents)))  # one for each leaf
    assert all(step == len(node) for node, (step, _) in layout.items())
    for width in (2, 99):  # steps of a row
        starts = range(0, record.num_steps, width)
        rows = [search_tree.layout_row(layout, start, width) for start in starts]
        for start, row in zip(starts, rows, strict=True):
            assert all(start <= step <= start + width for step, _ in row.values())
            heights = {height for _, height in row.values()}
            assert heights == set(range(len(heights)))  # no empty ones
            ordered = sorted(row, key=lambda node: row[node][1])
            assert ordered == sorted(ordered, key=lambda node: layout[node][1])
        for node in layout:
            assert any(node in row and (not node or node[:-1] in row) for row in rows), node


def test_neighbors_and_components_are_those_of_numpy() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(40, 8)
    ids = list(range(5, 40))
    neighbors = embeddings.find_neighbors(vectors, vectors[3], ids, 4)
    array = vectors.numpy()
    cosine = array @ array[3] / (np.linalg.norm(array, axis=1) * np.linalg.norm(array[3]))
    assert [i for i, _ in neighbors] == sorted(ids, key=lambda i: -cosine[i])[:4]
    components = embeddings.principal_components(vectors).numpy()
    values, axes = np.linalg.eigh(np.cov(array.T))
    expected = (array - array.mean(axis=0)) @ axes[:, np.argsort(-values)[:2]]
    assert np.abs(components) == pytest.approx(np.abs(expected), abs=1e-4)  # a sign is free


def test_a_chosen_head_is_drawn_and_masked_cells_are_gray(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    translator = Translator.load(
        random_model(tmp_path / "model", tokenizer), device="cpu", backend="native"
    )
    [pair] = translator.attention(["the $small$ tree"], ["das Haus _ ^"])
    for kind in AttentionKind:
        figure = attention_figure.attention_figure(pair, LIGHT, kind=kind, layers=[2], heads=[3, 0])
        weights = getattr(pair, kind.value)[1].numpy()
        head, mean = [axes.get_images() for axes in figure.axes]
        assert np.allclose(head[0].get_array(), weights[2]), kind
        assert np.allclose(mean[0].get_array(), weights.mean(axis=0)), kind
        if kind is AttentionKind.decoder:
            is_visible = np.ma.getmaskarray(head[1].get_array())
            assert (is_visible == np.tri(len(pair.tgt), dtype=bool)).all()
    for name, numbers in (
        ("layers", {"layers": [3], "heads": []}),
        ("heads", {"layers": [], "heads": [5]}),
    ):
        with pytest.raises(ConfigError, match=rf"{name}=\d: the model has \d"):
            attention_figure.attention_figure(pair, LIGHT, kind=AttentionKind.cross, **numbers)


def test_figures_with_many_panels_keep_their_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", tokenizer)
    translator = Translator.load(folder, device="cpu", backend="native")
    [pair] = translator.attention(["the green tree"], ["das Haus"])
    figure = attention_figure.attention_figure(
        pair, LIGHT, kind=AttentionKind.cross, layers=[], heads=[]
    )
    assert len(figure.axes) == 8  # 2 layers of 4 heads
    for number, axes in enumerate(figure.axes):
        rows = [label.get_text() for label in axes.get_yticklabels()]
        columns = [label.get_text() for label in axes.get_xticklabels()]
        assert rows == (pair.predicted if number in (0, 4) else [])
        assert columns == (pair.src if number >= 4 else [])


def test_characters_without_a_font_are_shown_as_codes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fonts = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    with caplog.at_level(logging.WARNING, "nmt"):
        replacements = Style(Theme.light).add_fonts_for(["größer שלום עולם", "مرحبا", "Привет"])
        assert replacements == {}
        assert not caplog.records
        replacements = Style(Theme.light).add_fonts_for(["你 a"])
    assert "你 a".translate(replacements) == "U+4F60 a"
    assert "U+4F60 (cjk unified ideograph-4f60)" in caplog.text


# --- runs and data


@pytest.fixture(scope="module")
def folder(toy_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/mine and data/mine, as the commands of docs/pictures.md name them."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "data").mkdir()
    (folder / "data" / "mine").symlink_to(toy_data)
    settings = ["max_updates=20", "validate_every_updates=10", "log_every_updates=5"]
    settings += ["model.num_encoder_layers=2", "model.num_decoder_layers=2", "model.num_heads=4"]
    settings += ["search.max_length_a=0", "search.max_length_b=20"]
    assert train(toy_data, folder / "runs" / "mine", *settings) == 0
    return folder


def test_a_run_is_drawn_while_it_goes_on(tmp_path: Path) -> None:
    metrics = {"nll": 4.0, "learning_rate": 1e-3, "gradient_norm": 2.0, "tokens_per_second": 9.0}
    records = [{"update": 5 * i, **metrics, "loss": 5.0} for i in range(1, 9)]
    records.append({"update": 40, "valid_loss": 3.5, "valid_bleu": 11.0, "valid_perplexity": 33.0})
    text = "\n".join(map(json.dumps, records)) + '\n{"update": 45, "nl'
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    run_a = str(tmp_path / "a")
    run_b = str(tmp_path / "b")
    for axes in runs.draw_run(VisualizeConfig(run_dir=[run_a, run_b]), LIGHT).axes:
        assert len({line.get_color() for line in axes.get_lines()}) == 2, axes.get_title()
    lines = curves(runs.draw_run(VisualizeConfig(run_dir=[run_a]), LIGHT))
    assert lines["validation"].tolist() == [[40], [11.0]]
    with pytest.raises(NmtError, match=r"c/metrics\.jsonl has no metrics yet"):
        runs.read_metrics(tmp_path / "c")


@pytest.mark.slow
def test_a_report_shows_what_the_commands_return(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = VisualizeConfig(run_dir=["runs/mine"], device="cpu")
    test = run_report.translate_test(folder / "runs/mine", folder / "data/mine", config)
    sources = list(read_lines(folder / "data/mine/test.src"))
    references = list(read_lines(folder / "data/mine/test.tgt"))
    hypotheses = Translator.load(folder / "runs/mine", device="cpu", backend="native").translate(
        sources
    )
    assert test.scores == evaluate.evaluate(hypotheses, [references], force=True)
    assert sum(length_bin.num_sentences for length_bin in test.length_bins) == len(sources)
    pairs = set(zip(sources, hypotheses, strict=True))
    sentences = test.worst + test.best
    assert {(sentence.source, sentence.hypothesis) for sentence in sentences} <= pairs
    page = run_report.report_page(config)
    for score in test.scores:
        assert f"{score.value:,.2f}" in page
        assert score.signature in page
    assert page.count('class="sentence"') == len(sentences) == len(test.attention)
    assert '<polyline class="line line-2"' in page
    assert "A Transformer of 2 encoder and 2 decoder layers" in page
    assert "source and target tokens a second, in the median" in page
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(ConfigError, match="what=run to compare several"):
        run_report.report_page(VisualizeConfig(run_dir=["a", "b"]))


def test_the_worst_and_the_best_sentences_of_a_report_are_those_by_chrf(
    toy_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(tmp_path / "model", load_tokenizers(toy_data))
    monkeypatch.setattr(Translator, "translate", lambda _, lines, **__: lines)  # copies the sources
    test = run_report.translate_test(model, toy_data, VisualizeConfig(device="cpu"))
    [text] = read_held_out(toy_data, "test")
    metric = CHRF()
    scores = []
    for source, target in zip(text.sources, text.targets, strict=True):
        scores.append(metric.sentence_score(source, [target]).score)
    scores.sort()
    assert len(set(scores)) > 15
    assert [sentence.chrf for sentence in test.worst] == scores[: len(test.worst)]
    assert [sentence.chrf for sentence in test.best] == scores[::-1][: len(test.best)]


def test_the_points_of_a_chart_are_inside_its_plot() -> None:
    records = [{"update": u, "nll": v} for u, v in ((1, 50.0), (10, 4.0), (20, 2.0), (40, 1.0))]
    records += [{"update": 40, "valid_loss": 3.0}]
    chart = run_report.make_chart(records, runs.METRIC_CHARTS[0])
    assert chart is not None
    _, points = chart.lines[0]
    assert points.split()[-1] == f"{64 + 448}.0,{8 + 146 * (1 - 1.0 / 50):.1f}"
    assert chart.y_ticks[0] == (154, "0")
    assert run_report.make_chart(records, runs.METRIC_CHARTS[2]) is None
    for end in (0.0003, 1.0, 7.3, 1800.0):
        ticks = run_report.round_values(end, 4)
        assert ticks[0] == 0
        assert 2 <= len(ticks) <= 5
        assert ticks[-1] <= end * (1 + 1e-9)


# --- the command


def test_the_gallery_shows_every_picture_with_its_command() -> None:
    """tests/test_page_commands.py runs the commands."""
    text = (ROOT / "docs/pictures.md").read_text(encoding="utf-8")
    assert set(re.findall(r"nmt-visualize what=(\w+)", text)) == {p.value for p in Picture}
    linked = re.findall(r"\]\((pictures/.*?)\)", text)
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs/pictures").iterdir()}
    assert set(linked) == files
    assert all((ROOT / "docs" / name).stat().st_size < 350_000 for name in linked)


@pytest.mark.slow
def test_without_arguments_the_command_lists_all_pictures_and_refuses_wrong_outputs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("visualize") == 0
    listed = capsys.readouterr().out
    assert all(f"  what={picture.value}\n" in listed for picture in Picture)
    assert set(draw.PICTURES) == set(Picture)
    for arguments, message in (
        (["what=mask", "output=mask.html"], "what=mask is written as .png, .svg or .pdf"),
        (["what=mask", "output=mask.gif"], "a picture is a .png, .svg or .pdf file"),
        (["what=report", "output=report.png"], "what=report is written as .html"),
        (["what=run", "run_dir=nowhere"], "has no metrics yet"),
        (
            ["what=upload", "run_dir=nowhere"],
            "name one or more trackers, such as tracker=[tensorboard]",
        ),
    ):
        assert command("visualize", arguments) == EXIT_USER, arguments
        assert message in capsys.readouterr().err, arguments
    assert not list(tmp_path.iterdir())
