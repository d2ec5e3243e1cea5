"""nmt-import of transformers' models, random ones of many shapes, against transformers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import exported, random_model
from importing import imported, randomize, shuffled, train_spm
from pages import fenced_blocks
from safetensors.torch import load_file
from serving import loaded, running
from tiny import assert_near, hidden_states, sentences

from nmt.checkpoint import load_info
from nmt.config import (
    Activation,
    ExportConfig,
    ExportFormat,
    Norm,
    Normalization,
    Positions,
    SearchConfig,
)
from nmt.data.batch import pad
from nmt.data.tokenizer import (
    MappedTokenizer,
    Tokenizer,
    TokenizerPair,
    Vocabulary,
    read_model,
)
from nmt.errors import ConfigError
from nmt.export.export_model import export_model
from nmt.importing.piece_ids import find_language, sort_pieces
from nmt.model.positions import sinusoidal_positions
from nmt.search.request import SearchRequest
from nmt.translate.engines.native import load_models
from nmt.translate.translator import Translator
from nmt.visualize.embeddings import list_text_ids

LINES = [*sentences(200)][:200]
LIMIT = 8  # tokens of a translation
SHORT_OUTPUT: dict[str, Any] = {"max_length_a": 0, "max_length_b": LIMIT}


def quiet_transformers() -> Any:
    """Import the library, which takes a second."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def settings(**changes: Any) -> dict[str, Any]:
    """Return a tiny architecture of transformers; `heads` and `d_ff` set both stacks."""
    heads = changes.pop("heads", 2)
    d_ff = changes.pop("d_ff", 24)
    return {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": d_ff,
        "decoder_ffn_dim": d_ff,
        "scale_embedding": True,
        "forced_eos_token_id": None,
        **changes,
    }


MARIAN: dict[str, dict[str, Any]] = {
    "swish, bias": settings(activation_function="swish", bias=True),
    "relu, no bias": settings(activation_function="relu"),
    "gelu, deep encoder": settings(activation_function="gelu", encoder_layers=6, decoder_layers=2),
    "odd width": settings(d_model=14, heads=7, d_ff=9, encoder_layers=2),
    "wide decoder": settings(decoder_ffn_dim=40),
    "one head": settings(d_model=10, heads=1, bias=True, decoder_layers=3),
    "separate": settings(separate=True, bias=True),
    "separate, deep decoder": settings(separate=True, encoder_layers=1, decoder_layers=3),
    "short positions": settings(max_position_embeddings=256, bias=True),
    "float16": settings(half=True, bias=True),
    "pickle": settings(pickle=True),
    "unscaled": settings(scale_embedding=False, activation_function="relu"),
    "untied": settings(tie_word_embeddings=False, bias=True),
}
M2M100: dict[str, dict[str, Any]] = {
    "m2m": settings(encoder_layers=2, activation_function="relu"),
    "m2m, pad elsewhere": settings(activation_function="gelu", pad_token_id=3, d_model=12),
    "m2m, unscaled": settings(scale_embedding=False, decoder_layers=2, heads=4),
}


def write_marian(folder: Path, seed: int, shape: dict[str, Any]) -> Path:
    """Write a random MarianMT model with the files of OPUS-MT's repositories."""
    transformers = quiet_transformers()
    folder.mkdir()
    shape = dict(shape)
    has_bias = shape.pop("bias", False)
    is_separate = shape.pop("separate", False)
    is_half = shape.pop("half", False)
    is_pickle = shape.pop("pickle", False)
    src_pieces = train_spm(folder / "source.spm", seed, 40)
    tgt_pieces = train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe")
    ids = shuffled(list(dict.fromkeys([*src_pieces, *tgt_pieces, ">>fra<<", "<pad>"])), seed)
    special: dict[str, Any] = {}
    if is_separate:  # transformers has one id for each control symbol of both vocabularies
        control = ["<unk>", "</s>", "<pad>"]
        ids = number_pieces([*control, *src_pieces])
        tgt_ids = number_pieces([*control, *tgt_pieces])
        write_json(folder / "target_vocab.json", tgt_ids)
        special["decoder_vocab_size"] = len(tgt_ids)
        special["share_encoder_decoder_embeddings"] = False
    write_json(folder / "vocab.json", ids)
    tokenizer = {"source_lang": "en", "target_lang": "fr", "separate_vocabs": is_separate}
    tokenizer["tokenizer_class"] = "MarianTokenizer"
    write_json(folder / "tokenizer_config.json", tokenizer)
    config = transformers.MarianConfig(
        vocab_size=len(ids) if is_separate else len(ids) + 2,
        pad_token_id=ids["<pad>"],
        eos_token_id=ids["</s>"],
        decoder_start_token_id=ids["<pad>"],
        bad_words_ids=[[ids["<pad>"]]],
        **special,
        **shape,
    )
    model = transformers.MarianMTModel(config)
    randomize(model, seed)
    if config.tie_word_embeddings:
        model.tie_weights()
    if has_bias:
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(model.final_logits_bias.shape, generator=generator)
        model.final_logits_bias.copy_(bias)
    if is_half:
        model = model.half()
    model.save_pretrained(folder)
    if is_pickle:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def number_pieces(pieces: list[str]) -> dict[str, int]:
    """Give different pieces ids in their order."""
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_m2m100(
    folder: Path, seed: int, shape: dict[str, Any], more_pieces: Sequence[str] = ()
) -> Path:
    """Write a random M2M100 model with its tokenizer; `more_pieces` are added to its vocabulary."""
    transformers = quiet_transformers()
    folder.mkdir()
    spm = folder / "sentencepiece.bpe.model"
    pieces = train_spm(spm, seed, 60)
    start = ["<s>", "<pad>", "</s>", "<unk>"]
    if shape.get("pad_token_id") == 3:
        start[1], start[3] = start[3], start[1]
    vocab = number_pieces([*start, *pieces, *more_pieces])
    write_json(folder / "vocab.json", vocab)
    files = {"vocab_file": str(folder / "vocab.json"), "spm_file": str(spm)}
    tokenizer = transformers.M2M100Tokenizer(**files, src_lang="en", tgt_lang="fr")
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(vocab_size=len(vocab) + 108, **shape)
    model = transformers.M2M100ForConditionalGeneration(config)
    randomize(model, seed)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def write_nllb(folder: Path, seed: int) -> Path:
    """Write a random model with the files and the languages of NLLB."""
    write_m2m100(folder, seed, M2M100["m2m"])
    vocab = read_json(folder / "vocab.json")
    (folder / "vocab.json").unlink()
    languages = ["ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "<mask>"]
    added = [{"id": len(vocab) + i, "content": name} for i, name in enumerate(languages)]
    content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
    write_json(folder / "tokenizer.json", content)
    settings = {"tokenizer_class": "NllbTokenizer", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", settings)
    return folder


def check(folder: Path, name: str, theirs: Any, tokenizer: Any) -> None:
    """Compare ids of text, logits and results of search with transformers."""
    loaded = load_models([imported(folder)], device="cpu")
    model = loaded.backend.stepper.model
    src_tokenizer = loaded.tokenizer.src
    tgt_tokenizer = loaded.tokenizer.tgt
    rows = [tokenizer(line).input_ids for line in LINES]
    src_rows = src_tokenizer.encode_batch(LINES)
    assert [[*row, src_tokenizer.eos_id] for row in src_rows] == rows, name
    labels = [tokenizer(text_target=line).input_ids for line in LINES]
    targets = tgt_tokenizer.encode_batch(LINES)
    assert [[*row, tgt_tokenizer.eos_id] for row in targets] == labels, name
    pieces = tgt_tokenizer.all_pieces()
    words = [i for i, piece in enumerate(pieces) if piece.startswith("▁")]  # of the source too
    assert tgt_tokenizer.decode(words).strip() == tokenizer.decode(words), name
    src = pad(rows, pad_id=src_tokenizer.pad_id)
    lengths = torch.tensor([len(row) for row in rows])
    tgt = pad(targets, pad_id=tgt_tokenizer.pad_id, bos=tgt_tokenizer.bos_id)
    batch = {"input_ids": src, "attention_mask": torch.arange(src.size(1)) < lengths[:, None]}
    theirs = theirs.eval()
    with torch.inference_mode():
        expected = theirs(**batch, decoder_input_ids=tgt).logits
        logits = model.logits(hidden_states(model, src, lengths, tgt))
        is_token = torch.arange(tgt.size(1)) <= torch.tensor([[len(row)] for row in targets])
        assert_near(logits[is_token], expected[is_token], name)
        bad_words = [[i] for i in (tgt_tokenizer.pad_id, *tgt_tokenizer.unused_ids)]
        for beam_size in (1, 4):
            options: dict[str, Any] = {"bad_words_ids": bad_words}
            if tgt_tokenizer.prefix_ids:
                options["forced_bos_token_id"] = tgt_tokenizer.prefix_ids[0]
            if beam_size > 1:
                options |= {"length_penalty": 0.0, "early_stopping": "never"}
            generated = theirs.generate(
                **batch, num_beams=beam_size, max_length=LIMIT + 1, **options
            ).tolist()
            config = SearchConfig(
                beam_size=beam_size, normalization=Normalization.none, **SHORT_OUTPUT
            )
            prefixes = [tgt_tokenizer.prefix_ids] * len(LINES) if tgt_tokenizer.prefix_ids else []
            request = SearchRequest([row[:-1] for row in rows], config, prefixes)
            for i, hypotheses in enumerate(loaded.backend.search(request)):
                ids = hypotheses[0].tokens
                case = name, beam_size, LINES[i]
                assert generated[i][1 : len(ids) + 1] == ids, case
                ending = set(generated[i][len(ids) + 1 :])
                assert ending <= {tgt_tokenizer.pad_id, tgt_tokenizer.eos_id}, case


@pytest.mark.slow
def test_marian_models_compute_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    for seed, (name, shape) in enumerate(MARIAN.items()):
        folder = write_marian(tmp_path / name.replace(", ", "-"), seed, shape)
        model = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32)
        check(folder, name, model, transformers.MarianTokenizer.from_pretrained(folder))
    output = run_readme(imported(folder), monkeypatch)
    assert output.strip()
    assert "▁" not in output


@pytest.mark.slow
def test_m2m100_models_compute_what_transformers_does(tmp_path: Path) -> None:
    import transformers

    for seed, (name, shape) in enumerate(M2M100.items()):
        folder = write_m2m100(tmp_path / name.replace(", ", "-"), seed, shape)
        model = transformers.M2M100ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        )
        options = {"src_lang": "en", "tgt_lang": "fr"}
        check(folder, name, model, transformers.M2M100Tokenizer.from_pretrained(folder, **options))


@pytest.mark.parametrize(
    "names",
    [
        ["post", "offset", "separate"],
        pytest.param(["pre", "Tensor2Tensor", "M2M100"], marks=pytest.mark.slow),
    ],
)
def test_an_exported_model_is_imported_unchanged(
    tmp_path: Path, tokenizer: Tokenizer, names: list[str]
) -> None:
    concat = {"positions": Positions.sinusoidal_concat}
    shapes: dict[str, dict[str, Any]] = {
        "post": {
            "activation": Activation.gelu,
            "decoder_d_ff": 40,
            "attention_dropout": 0.2,
            "activation_dropout": 0.3,
        },
        "pre": {"norm": Norm.pre, "tied_output": False, "output_bias": True},
        "Tensor2Tensor": concat,
        "M2M100": {"norm": Norm.pre, "position_offset": 1, **concat},
        "offset": {"norm": Norm.pre, "position_offset": 3, "scale_embedding": False},
        "separate": {"num_decoder_layers": 1},
    }
    sides = TokenizerPair(tokenizer, tokenizer)
    for name in names:
        shape = shapes[name]
        tokenizers = sides if name == "separate" else tokenizer
        model_dir = random_model(tmp_path / name, tokenizers, **shape)
        copy_dir = imported(exported(model_dir, ExportFormat.huggingface))
        info = load_info(model_dir)
        copy_info = load_info(copy_dir)
        assert copy_info.tokenizer_sha256 == info.tokenizer_sha256, name
        for path in model_dir.glob("tokenizer*"):
            assert (copy_dir / path.name).read_bytes() == tokenizer.model, name
        # the export has all sines before all cosines
        is_permuted = info.model.positions is Positions.sinusoidal
        if is_permuted:
            copy_info.model.positions = Positions.sinusoidal
        assert copy_info.model == info.model, name
        assert (copy_info.src_lang, copy_info.tgt_lang) == ("xx", "yy")
        translator = Translator.load(model_dir, device="cpu", backend="native")
        copy = Translator.load(copy_dir, device="cpu", backend="native")
        expected = translator.score(LINES[:5], LINES[5:10])
        for i, score in enumerate(copy.score(LINES[:5], LINES[5:10])):
            assert score.token_log_probs == pytest.approx(expected[i].token_log_probs, abs=1e-4), (
                name
            )
        translations = copy.translate(LINES[:1], **SHORT_OUTPUT)
        assert translations == translator.translate(LINES[:1], **SHORT_OUTPUT), name
        if not is_permuted:
            assert_same_weights(copy_dir, model_dir)


def assert_same_weights(folder: Path, expected_folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    expected = load_file(expected_folder / "model.safetensors")
    assert weights.keys() == expected.keys(), folder.name
    assert all(torch.equal(weights[key], expected[key]) for key in weights), folder.name


@pytest.mark.slow
def test_an_imported_model_is_exported_with_the_same_weights_and_settings(tmp_path: Path) -> None:
    for name, write in (
        ("untied", write_marian),
        ("separate", write_marian),
        ("m2m", write_m2m100),
    ):
        folder = write(tmp_path / name, 5, (MARIAN | M2M100)[name])
        output = exported(imported(folder), ExportFormat.huggingface)
        weights = load_file(output / "model.safetensors")
        expected = load_file(folder / "model.safetensors")
        copies = {"model.decoder.embed_tokens.weight", "model.shared.weight", "lm_head.weight"}
        for key in expected.keys() - copies:
            assert torch.equal(weights[key], expected[key]), (name, key)
        config = read_json(output / "config.json")
        expected_config = read_json(folder / "config.json")
        for key in (
            "activation_function",
            "scale_embedding",
            "pad_token_id",
            "eos_token_id",
            "decoder_start_token_id",
            "model_type",
            "tie_word_embeddings",
        ):
            assert config[key] == expected_config[key], (name, key)


@pytest.mark.slow
def test_folders_of_older_versions_hold_copies_and_shards_in_pickles(tmp_path: Path) -> None:
    folder = write_marian(tmp_path / "opus", 0, MARIAN["swish, bias"])
    expected = imported(folder).rename(tmp_path / "expected")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    embedding = weights["model.shared.weight"]
    for stack in ("encoder", "decoder"):
        table = sinusoidal_positions(512, 16, Positions.sinusoidal_halves)
        weights[f"model.{stack}.embed_positions.weight"] = table
        weights[f"model.{stack}.embed_tokens.weight"] = embedding
    weights["lm_head.weight"] = embedding
    config = read_json(folder / "config.json")
    config |= {"normalize_before": False, "extra_pos_embeddings": 57, "torch_dtype": "float16"}
    config.pop("tie_word_embeddings", None)
    write_json(folder / "config.json", config)
    ids = read_json(folder / "vocab.json")
    added = {str(ids[name]): {"content": name, "special": True} for name in ("</s>", "<pad>")}
    tokenizer = {"added_tokens_decoder": added, "unk_token": {"content": "<unk>"}}
    write_json(folder / "tokenizer_config.json", tokenizer)
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same_weights(imported(folder), expected)
    (folder / "pytorch_model.bin").unlink()
    names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(weights)}
    for shard in set(names.values()):
        tensors = {name: weights[name] for name in weights if names[name] == shard}
        torch.save(tensors, folder / shard)
    write_json(folder / "pytorch_model.bin.index.json", {"weight_map": names})
    assert_same_weights(imported(folder), expected)


def test_a_language_is_not_the_ordinary_piece_of_the_same_name() -> None:
    ids = {"en": 7, "de": 8, "__en__": 100, "__fr__": 101, "deu_Latn": 102}
    expected = {"en": 100, "__en__": 100, "fr": 101, "deu_Latn": 102}
    for lang, language_id in expected.items():
        assert find_language(ids, "src_lang", lang) == language_id
    with pytest.raises(ConfigError, match="tgt_lang=de: did you mean"):
        find_language(ids, "tgt_lang", "de")


def test_ids_without_a_piece_are_not_part_of_a_translation(tmp_path: Path) -> None:
    pieces = train_spm(tmp_path / "spm.model", 1, 60)
    spm = read_model(tmp_path / "spm.model")
    start = ["<s>", "<pad>", "</s>", "<unk>"]
    ids = number_pieces([*start, *pieces])
    size = len(ids) + 5
    padded = sort_pieces(tmp_path / "vocab.json", ids.items(), size)
    vocabulary = Vocabulary(pieces=padded, pad_id=1, unk_id=3, bos_id=0, eos_id=2)
    tokenizer = MappedTokenizer(spm, vocabulary, [])
    text = tokenizer.encode(LINES[0])
    assert tokenizer.decode([size - 1, *text, size - 5, size - 2]) == tokenizer.decode(text)
    assert tokenizer.decode([size - 1]) == ""


@pytest.mark.slow
def test_nllb_has_its_pieces_in_tokenizer_json_and_a_language_before_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_nllb(tmp_path / "nllb", 3)
    vocab = read_json(folder / "tokenizer.json")["model"]["vocab"]
    model_dir = imported(folder, src_lang="eng_Latn", tgt_lang="fra_Latn")
    info = load_info(model_dir)
    translator = Translator.load(model_dir, backend="native")
    assert (info.src_lang, info.tgt_lang) == ("eng_Latn", "fra_Latn")
    src = translator.tokenizer.src
    tgt = translator.tokenizer.tgt
    ids = tgt.encode(LINES[0])
    assert tgt.pieces(ids[:1]) == ["fra_Latn"]
    assert not {*list_text_ids(tgt)} & {*tgt.language_ids.values()}
    assert src.pieces(src.encode(LINES[0]))[0] == "eng_Latn"
    assert [vocab[piece] for piece in tgt.pieces(ids[1:])] == ids[1:]
    assert tgt.decode(ids) == LINES[0]
    assert tgt.encode("") == []
    [[best]] = translator.n_best([LINES[0]], beam_size=1)
    assert best.tokens[0] == "fra_Latn"
    assert "fra_Latn" not in best.text
    [scored] = translator.score([LINES[0]], [LINES[1]])
    assert scored.tokens[0] == "fra_Latn"
    assert translator.translate(["", LINES[0]])[0] == ""
    assert "Latn" not in run_readme(model_dir, monkeypatch)


def run_readme(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Export to CTranslate2, run the Python of the README there, and return its output."""
    output = model_dir.parent / "exported"
    export_model(model_dir, output, ExportConfig(model_dir=str(model_dir)))
    text = (output / "README.md").read_text(encoding="utf-8")
    stdout = io.StringIO()
    monkeypatch.chdir(output)
    with contextlib.redirect_stdout(stdout):
        exec(fenced_blocks(text, "python")[0], {})
    return stdout.getvalue()


@pytest.mark.slow
def test_a_many_to_many_model_translates_between_all_its_languages(tmp_path: Path) -> None:
    import transformers

    ordinary_pieces = ["en", "fr"]  # with the names of languages
    folder = write_m2m100(tmp_path / "m2m", 3, M2M100["m2m"], ordinary_pieces)
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    model_dir = imported(folder, src_lang="en", tgt_lang="fr")
    translator = Translator.load(model_dir, device="cpu", backend="native")
    search: dict[str, Any] = {
        "beam_size": 1,
        "max_length_a": 0,
        "max_length_b": 12,
        "loop_guard": False,
    }
    assert len(translator.directions) == 1 + 100 * 99
    texts = {}
    for src_lang, tgt_lang in (("en", "fr"), ("de", "fr"), ("en", "zu"), ("zu", "de")):
        direction = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        tokenizer = transformers.M2M100Tokenizer.from_pretrained(folder, **direction)
        [best] = translator.n_best(LINES[:1], **search, **direction)[0]
        batch = tokenizer(LINES[:1], return_tensors="pt")
        first = {"forced_bos_token_id": tokenizer.get_lang_id(tgt_lang), "max_length": 13}
        [ids] = theirs.generate(**batch, num_beams=1, **first).tolist()
        expected = [token for token in ids[1:] if token != tokenizer.eos_token_id]
        assert tokenizer.convert_tokens_to_ids(best.tokens) == expected, direction
        assert best.tokens[0] == f"__{tgt_lang}__"
        assert "__" not in best.text
        texts[src_lang, tgt_lang] = best.text
        [scored] = translator.score(LINES[:1], LINES[1:2], **direction)
        assert scored.tokens[0] == f"__{tgt_lang}__"
        assert translator.translate(["", LINES[0]], **search, **direction) == ["", best.text]
    assert translator.translate(LINES[:1], **search) == [texts["en", "fr"]]
    with pytest.raises(ConfigError, match="tgt_lang=tlh: the model translates en to fr"):
        translator.translate(LINES[:1], tgt_lang="tlh")
    with pytest.raises(ConfigError, match="give src_lang="):
        translator.translate(LINES[:1], tgt_lang="de")
    with running(loaded(model_dir)) as server:
        for (source, target), text in texts.items():
            body = {"text": LINES[0], "source": source, "target": target, "search": search}
            response = server.post("/v1/translate", **body, split_sentences=False)
            [translation] = response.json["translations"]
            assert translation["text"] == text, (source, target)
        languages = server.get("/languages").json
        assert [len(language["targets"]) for language in languages] == [100] * 100
