"""Vocabularies of its own for each language, from text to exported folders."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from exporting import LIMIT, exported, foreign_models, native, random_model
from tiny import (
    sentences,
    tokenizer_config,
)
from toy import WORDS, command, train, write_corpus

from nmt import Translator
from nmt.checkpoint import load_info, load_model_tokenizers, load_weights
from nmt.config import (
    CorpusConfig,
    DataConfig,
    ExportFormat,
    Normalization,
    PreprocessConfig,
    SearchConfig,
    TokenizerConfig,
)
from nmt.data.tokenizer import Tokenizer, TokenizerPair, load_tokenizers, save_tokenizers
from nmt.data.vocabulary import open_tokenizers, train_tokenizer
from nmt.errors import ConfigError, ModelError
from nmt.training.batches import make_batch

pytestmark = pytest.mark.slow

SHAPE = [
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_heads=4",
    "model.dropout=0",
    "optimizer.schedule=cosine",
    "optimizer.peak_learning_rate=0.005",
    "max_tokens=600",
    "log_every_updates=100",
    "validate_every_updates=1000",
    "max_updates=250",
    "checkpoint_every_updates=100",
]
BEAM = SearchConfig(beam_size=4, normalization=Normalization.none)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder, a run that has learned it, and its average."""
    folder = tmp_path_factory.mktemp("separate")
    choices = ["separate=true", "vocab_size=36", "byte_fallback=false"]
    files = write_corpus(folder, num_train=400, words=(1, 3))
    settings = [*files, *(f"tokenizer.{choice}" for choice in choices)]
    assert command("preprocess", *settings, "num_threads=1") == 0
    assert train(folder / "data", folder / "run", *SHAPE) == 0
    assert command("average", f"run_dir={folder / 'run'}", "last=2") == 0
    return folder


@pytest.fixture(scope="module")
def lines(work_dir: Path) -> list[str]:
    return (work_dir / "valid.src.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over two models of other people, of other sizes and with other ids."""
    folder = tmp_path_factory.mktemp("foreign")
    return random_model(folder / "model", open_tokenizers(foreign_models(folder)))


def test_only_separate_vocabularies_have_a_second_embedding_and_size(
    tokenizer: Tokenizer, foreign: Path, tmp_path: Path
) -> None:
    sizes = {"embedding.weight": 331, "src_embedding.weight": 71}  # each has only its own pieces
    joint = random_model(tmp_path / "joint", tokenizer)
    for folder, expected_sizes in (
        (foreign, sizes),
        (joint, {"embedding.weight": tokenizer.vocab_size}),
    ):
        weights = load_weights(folder)
        assert {n: len(w) for n, w in weights.items() if "embedding" in n} == expected_sizes
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert content["vocab_size"] == expected_sizes["embedding.weight"]
        assert content.get("src_vocab_size") == expected_sizes.get("src_embedding.weight")


def test_a_folder_of_two_vocabularies_has_the_tags_of_each_side(work_dir: Path) -> None:
    data_dir = str(work_dir / "data")
    piece = load_tokenizers(work_dir / "data").tgt.pieces([30])[0]
    for side, refused in (("tgt_tag", False), ("src_tag", True)):
        corpora = {"a": CorpusConfig(tsv=["a.tsv"], **{side: piece})}
        settings = TokenizerConfig(model=data_dir)
        config = PreprocessConfig(data=DataConfig(corpora=corpora), tokenizer=settings)
        with pytest.raises(ConfigError, match="no piece") if refused else nullcontext():
            assert isinstance(open_tokenizers(config), TokenizerPair)
    settings = TokenizerConfig(model=data_dir, separate=True, tgt_model="b.model")
    with pytest.raises(
        ConfigError, match="both sides; leave out tokenizer.tgt_model and tokenizer.separate"
    ):
        open_tokenizers(PreprocessConfig(tokenizer=settings))


def test_a_batch_is_framed_by_the_control_symbols_of_each_side(foreign: Path) -> None:
    tokenizer = load_model_tokenizers(foreign, load_info(foreign))
    src = tokenizer.src
    tgt = tokenizer.tgt
    assert (src.pad_id, src.unk_id, src.bos_id, src.eos_id) == (70, 0, 1, 2)
    assert (tgt.pad_id, tgt.unk_id, tgt.bos_id, tgt.eos_id) == (0, 2, 330, 1)
    batch = make_batch([([5, 6], [7]), ([8], [9, 10])], tokenizer)
    assert batch.src.tolist() == [5, 6, 2, 8, 2]
    assert batch.tgt_in.tolist() == [330, 7, 330, 9, 10]
    assert batch.tgt_out.tolist() == [7, 1, 9, 10, 1]
    rounded = make_batch([([5, 6], [7])], tokenizer, round_to=4)
    assert rounded.src.tolist() == [5, 6, 2, 70]
    assert rounded.tgt_out.tolist() == [7, 1, 0, 0]


def test_folders_hold_a_model_for_each_side_and_those_of_another_model_are_refused(
    work_dir: Path, tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("data", "run/checkpoints/latest", "run/average"):
        names = {path.name for path in (work_dir / name).glob("tokenizer*")}
        assert names == {"tokenizer.src.model", "tokenizer.tgt.model"}
    info = load_info(work_dir / "run/average")
    right = load_model_tokenizers(work_dir / "run/average", info)
    swapped = TokenizerPair(right.tgt, right.src)
    save_tokenizers(tmp_path, swapped)
    assert swapped.sha256 != right.sha256
    with pytest.raises(ModelError, match="has changed since the folder was made"):
        load_model_tokenizers(tmp_path, info)
    (tmp_path / "tokenizer.tgt.model").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.tgt\.model does not exist"):
        load_model_tokenizers(tmp_path, info)
    shutil.copytree(work_dir / "data", tmp_path / "data")
    shutil.copy(tmp_path / "data/tokenizer.src.model", tmp_path / "data/tokenizer.tgt.model")
    (tmp_path / "data/manifest.json").unlink()
    assert train(tmp_path / "data", tmp_path / "run") == 2
    assert "has changed since the folder was made" in capfd.readouterr().err
    folders = [work_dir / "run", random_model(tmp_path / "joint", tokenizer)]
    with pytest.raises(ModelError, match="a different tokenizer"):
        Translator.load(folders, device="cpu", backend="native")
    with pytest.raises(
        ConfigError, match=r"<pad> <unk> <s> </s>.*\[END\].*the same control symbols"
    ):
        open_tokenizers(foreign_models(tmp_path, eos_piece="[END]"))


def test_a_model_learns_through_the_commands(
    work_dir: Path, lines: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "out.txt"
    arguments = [
        f"model_dir={work_dir / 'run'}",
        f"input={work_dir / 'valid.src.txt'}",
        f"output={output}",
    ]
    assert command("translate", *arguments, "device=cpu", "num_threads=1") == 0
    translations = output.read_text(encoding="utf-8").split("\n")[:-1]
    expected = [" ".join(WORDS[word] for word in line.split()) for line in lines]
    assert sum(map(str.__eq__, translations, expected)) >= 0.8 * len(expected)
    translator = Translator.load(work_dir / "run", device="cpu", backend="native")
    (prefixed,) = translator.n_best(["red"], BEAM, prefixes=["grün"])
    assert all(translation.text.startswith("grün") for translation in prefixed)


def test_given_translations_score_as_search_scores_them(work_dir: Path, lines: list[str]) -> None:
    folder = work_dir / "run/average"
    searched = [hypotheses[0] for hypotheses in native(folder, lines, BEAM)]
    tokenizer = load_model_tokenizers(folder, load_info(folder))
    texts = [tokenizer.tgt.decode(hypothesis.tokens) for hypothesis in searched]
    compared = 0
    scored = Translator.load(folder, device="cpu", backend="native").score(lines, texts)
    for hypothesis, text, score in zip(searched, texts, scored, strict=True):
        if [*tokenizer.tgt.encode(text), tokenizer.tgt.eos_id] == hypothesis.tokens:
            assert score.log_prob == pytest.approx(hypothesis.log_prob, abs=1e-4)
            compared += 1
    assert compared >= 0.8 * len(lines)


def test_our_ctranslate2_backend_scores_and_translates_alike(
    work_dir: Path, foreign: Path, lines: list[str]
) -> None:
    for folder, texts_to_translate in (
        (work_dir / "run/average", lines),
        (foreign, sentences(8, seed=6)),
    ):
        output = exported(folder, ExportFormat.ctranslate2)
        native_translator = Translator.load(folder, device="cpu", backend="native")
        exported_translator = Translator.load(
            output, device="cpu", backend="ctranslate2", num_threads=1
        )
        texts = native_translator.translate(
            texts_to_translate, beam_size=1, max_length_a=0, max_length_b=LIMIT
        )
        assert (
            exported_translator.translate(
                texts_to_translate, beam_size=1, max_length_a=0, max_length_b=LIMIT
            )
            == texts
        )
        scores = [
            [s.log_prob for s in side.score(texts_to_translate, texts)]
            for side in (native_translator, exported_translator)
        ]
        assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def test_sides_of_equal_text_have_equal_models_in_two_files(tmp_path: Path) -> None:
    tokenizer_of_both = train_tokenizer(sentences(100), tokenizer_config())
    save_tokenizers(tmp_path, TokenizerPair(tokenizer_of_both, tokenizer_of_both))
    loaded = load_tokenizers(tmp_path)
    assert isinstance(loaded, TokenizerPair)
    assert loaded.src.model == loaded.tgt.model == tokenizer_of_both.model
    assert torch.equal(*(make_batch([([5], [6])], t).src for t in (loaded, tokenizer_of_both)))
