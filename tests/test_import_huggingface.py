"""nmt-import of transformers' models, random ones of many shapes, against transformers."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import exported, random_model
from importing import imported, randomize, shuffled, train_spm
from safetensors.torch import load_file
from serving import loaded, running
from tiny import hidden_states, sentences

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
from nmt.data.tokenizer import SeparateTokenizers, Tokenizer
from nmt.errors import ConfigError
from nmt.export.export_model import export_model
from nmt.model.positions import sinusoidal_positions
from nmt.translate.backend import SearchRequest, load_models
from nmt.translate.translator import Translator
from nmt.visualize.embeddings import list_text_ids

LINES = [*sentences(200)][:200]
LIMIT = 8  # tokens of a translation
FEW: dict[str, Any] = {"max_length_a": 0, "max_length_b": LIMIT}


def quiet_transformers() -> Any:
    """Import the library, which takes a second."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def settings(**changes: Any) -> dict[str, Any]:
    """Return a tiny architecture as transformers names it; `heads`, `d_ff` are of both stacks."""
    given = {"heads": 2, "d_ff": 24, **changes}
    heads, d_ff = given.pop("heads"), given.pop("d_ff")
    base = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "scale_embedding": True}
    both = {"attention_heads": heads, "ffn_dim": d_ff}
    sides = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in both.items()}
    return base | sides | {"forced_eos_token_id": None} | given


MARIAN: dict[str, dict[str, Any]] = {
    "swish, bias": settings(activation_function="swish", bias=True),
    "relu, no bias": settings(activation_function="relu"),
    "gelu, deep encoder": settings(activation_function="gelu", encoder_layers=6, decoder_layers=2),
    "odd width": settings(d_model=14, heads=7, d_ff=9, encoder_layers=2),
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
    """Write a random MarianMT model with its tokenizer as OPUS-MT's repositories have them."""
    transformers = quiet_transformers()
    folder.mkdir()
    shape = dict(shape)
    names = ("bias", "separate", "half", "pickle")
    has_bias, is_separate, is_half, is_pickle = (shape.pop(name, False) for name in names)
    pieces = [train_spm(folder / "source.spm", seed, 40)]
    pieces.append(train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe"))
    joint = dict.fromkeys([*pieces[0], *pieces[1], ">>fra<<", "<pad>"])
    control = ["<unk>", "</s>", "<pad>"]
    ids = shuffled(list(joint), seed)
    if is_separate:  # transformers has one id for each control symbol of both
        first = dict(zip(control, range(3), strict=True))
        sides = [dict.fromkeys([*control, *side]) for side in pieces]
        ids, tgt_ids = ({piece: i for i, piece in enumerate(side)} for side in sides)
        assert all(ids[piece] == tgt_ids[piece] == i for piece, i in first.items())
        (folder / "target_vocab.json").write_text(json.dumps(tgt_ids), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    tokenizer = {"source_lang": "en", "target_lang": "fr", "separate_vocabs": is_separate}
    tokenizer["tokenizer_class"] = "MarianTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    special = {"pad_token_id": ids["<pad>"], "eos_token_id": ids["</s>"]}
    special |= {"decoder_start_token_id": ids["<pad>"], "bad_words_ids": [[ids["<pad>"]]]}
    if is_separate:
        special |= {"decoder_vocab_size": len(tgt_ids), "share_encoder_decoder_embeddings": False}
    config = transformers.MarianConfig(
        vocab_size=len(ids) + 2 * (not is_separate), **special, **shape
    )
    model = transformers.MarianMTModel(config)
    randomize(model, seed)
    if config.tie_word_embeddings:
        model.tie_weights()
    if has_bias:
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(model.final_logits_bias.shape, generator=generator)
        model.final_logits_bias.copy_(bias)
    model = model.half() if is_half else model
    model.save_pretrained(folder)
    if is_pickle:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def write_m2m100(folder: Path, seed: int, shape: dict[str, Any]) -> Path:
    """Write a random M2M100 model with its tokenizer."""
    transformers = quiet_transformers()
    folder.mkdir()
    spm = folder / "sentencepiece.bpe.model"
    pieces = train_spm(spm, seed, 60)
    start = ["<s>", "<pad>", "</s>", "<unk>"]
    if shape.get("pad_token_id") == 3:
        start[1], start[3] = start[3], start[1]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*start, *pieces]))}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    files = {"vocab_file": str(folder / "vocab.json"), "spm_file": str(spm)}
    tokenizer = transformers.M2M100Tokenizer(**files, src_lang="en", tgt_lang="fr")
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(vocab_size=len(vocab) + 108, **shape)
    model = transformers.M2M100ForConditionalGeneration(config)
    randomize(model, seed)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def check(folder: Path, name: str, theirs: Any, tokenizer: Any) -> None:
    """Compare ids of text, logits, and the results of search with those of transformers."""

    model_dir = imported(folder)
    loaded = load_models([model_dir], device="cpu")
    model, ours = loaded.backend.stepper.model, loaded.tokenizer
    theirs = theirs.eval()
    rows = [tokenizer(line).input_ids for line in LINES]
    assert [[*row, ours.src.eos_id] for row in ours.src.encode_batch(LINES)] == rows, name
    labels = [tokenizer(text_target=line).input_ids for line in LINES]
    targets = ours.tgt.encode_batch(LINES)
    assert [[*row, ours.tgt.eos_id] for row in targets] == labels, name
    # those of the source too
    words = [i for i, piece in enumerate(ours.tgt.all_pieces()) if piece.startswith("▁")]
    assert ours.tgt.decode(words).strip() == tokenizer.decode(words), name
    src, lengths = pad(rows, pad_id=ours.src.pad_id), torch.tensor([len(row) for row in rows])
    tgt = pad(targets, pad_id=ours.tgt.pad_id, bos=ours.tgt.bos_id)
    batch = {"input_ids": src, "attention_mask": torch.arange(src.size(1)) < lengths[:, None]}
    with torch.inference_mode():
        wanted = theirs(**batch, decoder_input_ids=tgt).logits
        found = model.logits(hidden_states(model, src, lengths, tgt))
        real = torch.arange(tgt.size(1)) <= torch.tensor([[len(row)] for row in targets])
        torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=1e-5, msg=name)
        for beam_size in (1, 4):
            how = {"num_beams": beam_size, "length_penalty": 0.0, "early_stopping": "never"}
            how |= {"bad_words_ids": [[ours.tgt.pad_id]]} if beam_size > 1 else {"num_beams": 1}
            how["bad_words_ids"] = [[ours.tgt.pad_id]]
            if ours.tgt.prefix:
                how["forced_bos_token_id"] = ours.tgt.prefix[0]
            if beam_size == 1:
                del how["length_penalty"], how["early_stopping"]
            out = theirs.generate(**batch, max_length=LIMIT + 1, **how).tolist()
            none = {"normalization": Normalization.none, "max_length_a": 0, "max_length_b": LIMIT}
            config = SearchConfig(beam_size=beam_size, **none)
            prefixes = [ours.tgt.prefix] * len(LINES) if ours.tgt.prefix else None
            request = SearchRequest([row[:-1] for row in rows], config, prefixes)
            rest = {ours.tgt.pad_id, ours.tgt.eos_id}
            for line, row, best in zip(LINES, out, loaded.backend.search(request), strict=True):
                ids = best[0].tokens
                assert row[1 : len(ids) + 1] == ids, (name, beam_size, line)
                assert set(row[len(ids) + 1 :]) <= rest, (name, beam_size, line)


@pytest.mark.slow
def test_marian_models_compute_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    for seed, (name, shape) in enumerate(MARIAN.items()):
        folder = write_marian(tmp_path / name.replace(", ", "-"), seed, shape)
        model = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32)
        check(folder, name, model, transformers.MarianTokenizer.from_pretrained(folder))
    shown = run_readme(imported(folder), monkeypatch)
    assert shown.strip()
    assert "▁" not in shown


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


def test_what_nmt_exports_comes_back_as_it_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    concat = {"positions": Positions.sinusoidal_concat}
    shapes: dict[str, dict[str, Any]] = {
        "post": {
            "activation": Activation.gelu,
            "attention_dropout": 0.2,
            "activation_dropout": 0.3,
        },
        "pre": {"norm": Norm.pre, "tied_output": False, "output_bias": True},
        "Tensor2Tensor": concat,
        "M2M100": {"norm": Norm.pre, "position_offset": 1, **concat},
        "offset": {"norm": Norm.pre, "position_offset": 3, "scale_embedding": False},
        "separate": {"num_decoder_layers": 1},
    }
    sides = SeparateTokenizers(tokenizer, tokenizer)
    for name, shape in shapes.items():
        text = sides if name == "separate" else tokenizer
        model_dir = random_model(tmp_path / name, text, **shape)
        again = imported(exported(model_dir, ExportFormat.huggingface))
        before, after = load_info(model_dir), load_info(again)
        assert after.tokenizer_sha256 == before.tokenizer_sha256, name
        for path in model_dir.glob("tokenizer*"):
            assert (again / path.name).read_bytes() == tokenizer.model, name
        changed = {"positions"} if before.model.positions is Positions.sinusoidal else set()
        for setting, value in vars(after.model).items():
            assert value == getattr(before.model, setting) or setting in changed, (name, setting)
        assert (after.src_lang, after.tgt_lang) == ("xx", "yy")
        one, other = (Translator.load(at, device="cpu") for at in (model_dir, again))
        pairs = LINES[:5], LINES[5:10]
        for ours, theirs in zip(one.score(*pairs), other.score(*pairs), strict=True):
            assert theirs.token_log_probs == pytest.approx(ours.token_log_probs, abs=1e-4), name
        assert one.translate(LINES[:1], **FEW) == other.translate(LINES[:1], **FEW), name
        if not changed:
            was, now = (load_file(at / "model.safetensors") for at in (model_dir, again))
            assert was.keys() == now.keys(), name
            assert all(torch.equal(was[key], now[key]) for key in was), name


@pytest.mark.slow
def test_what_is_imported_goes_back_with_the_same_weights(tmp_path: Path) -> None:
    for name, write in (
        ("untied", write_marian),
        ("separate", write_marian),
        ("m2m", write_m2m100),
    ):
        shape = (MARIAN | M2M100)[name]
        folder = write(tmp_path / name, 5, shape)
        back = exported(imported(folder), ExportFormat.huggingface)
        one, other = (load_file(at / "model.safetensors") for at in (folder, back))
        same = {"model.decoder.embed_tokens.weight", "model.shared.weight", "lm_head.weight"}
        for key in one.keys() - same:
            assert torch.equal(one[key], other[key]), (name, key)
        kept = ("activation_function", "scale_embedding", "pad_token_id", "eos_token_id")
        configs = [json.loads((at / "config.json").read_text("utf-8")) for at in (folder, back)]
        for key in (*kept, "decoder_start_token_id", "model_type", "tie_word_embeddings"):
            assert configs[0][key] == configs[1][key], (name, key)


@pytest.mark.slow
def test_folders_of_older_versions_hold_copies_and_shards_in_pickles(tmp_path: Path) -> None:
    folder = write_marian(tmp_path / "opus", 0, MARIAN["swish, bias"])
    wanted = load_file(imported(folder) / "model.safetensors")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shared = weights["model.shared.weight"]
    for stack in ("encoder", "decoder"):
        table = sinusoidal_positions(512, 16, Positions.sinusoidal_halves)
        weights[f"model.{stack}.embed_positions.weight"] = table
        weights[f"model.{stack}.embed_tokens.weight"] = shared
    weights["lm_head.weight"] = shared
    old = {"normalize_before": False, "extra_pos_embeddings": 57, "torch_dtype": "float16"}
    config = json.loads((folder / "config.json").read_text("utf-8")) | old
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    ids = json.loads((folder / "vocab.json").read_text("utf-8"))
    added = {str(ids[name]): {"content": name, "special": True} for name in ("</s>", "<pad>")}
    tokenizer = {"added_tokens_decoder": added, "unk_token": {"content": "<unk>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    results = [load_file(imported(folder) / "model.safetensors")]
    (folder / "pytorch_model.bin").unlink()
    names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(weights)}
    for part in set(names.values()):
        torch.save({k: v for k, v in weights.items() if names[k] == part}, folder / part)
    index = json.dumps({"weight_map": names})
    (folder / "pytorch_model.bin.index.json").write_text(index, "utf-8")
    results.append(load_file(imported(folder) / "model.safetensors"))
    for number, found in enumerate(results):
        assert found.keys() == wanted.keys(), number
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), number


@pytest.mark.slow
def test_nllb_has_its_pieces_in_tokenizer_json_and_a_language_before_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_m2m100(tmp_path / "nllb", 3, M2M100["m2m"])
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (folder / "vocab.json").unlink()
    languages = ["ace_Arab", "eng_Latn", "fra_Latn", "<mask>"]
    added = [{"id": len(vocab) + i, "content": name} for i, name in enumerate(languages)]
    content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {"tokenizer_class": "NllbTokenizer", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    model_dir = imported(folder, src_lang="eng_Latn", tgt_lang="fra_Latn")
    info, translator = load_info(model_dir), Translator.load(model_dir)
    assert (info.src_lang, info.tgt_lang) == ("eng_Latn", "fra_Latn")
    src, tgt = translator.tokenizer.src, translator.tokenizer.tgt
    ids = tgt.encode(LINES[0])
    assert tgt.pieces(ids[:1]) == ["fra_Latn"]
    assert not {*list_text_ids(tgt)} & {*tgt.languages.values()}
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
    """Export to CTranslate2, and run the Python of the README there; return what it prints."""
    output = model_dir.parent / "exported"
    export_model(model_dir, output, ExportConfig(model_dir=str(model_dir)))
    text, shown = (output / "README.md").read_text(encoding="utf-8"), io.StringIO()
    monkeypatch.chdir(output)
    with contextlib.redirect_stdout(shown):
        exec(re.search("```python\n(.*?)```", text, re.DOTALL)[1], {})
    return shown.getvalue()


@pytest.mark.slow
def test_a_many_to_many_model_translates_between_all_its_languages(tmp_path: Path) -> None:
    import transformers

    folder = write_m2m100(tmp_path / "m2m", 3, M2M100["m2m"])
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    model_dir = imported(folder, src_lang="en", tgt_lang="fr")
    translator = Translator.load(model_dir, device="cpu")
    search: dict[str, Any] = {"beam_size": 1, "max_length_a": 0, "max_length_b": 12}
    assert len(translator.directions) == 1 + 100 * 99
    texts = {}
    for src_lang, tgt_lang in (("en", "fr"), ("de", "fr"), ("en", "zu"), ("zu", "de")):
        where = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        tokenizer = transformers.M2M100Tokenizer.from_pretrained(folder, **where)
        [best] = translator.n_best(LINES[:1], **search, **where)[0]
        batch = tokenizer(LINES[:1], return_tensors="pt")
        first = {"forced_bos_token_id": tokenizer.get_lang_id(tgt_lang), "max_length": 13}
        [ids] = theirs.generate(**batch, num_beams=1, **first).tolist()
        wanted = [token for token in ids[1:] if token != tokenizer.eos_token_id]
        assert tokenizer.convert_tokens_to_ids(best.tokens) == wanted, where
        assert best.tokens[0] == f"__{tgt_lang}__"
        assert "__" not in best.text
        texts[src_lang, tgt_lang] = best.text
        [scored] = translator.score(LINES[:1], LINES[1:2], **where)
        assert scored.tokens[0] == f"__{tgt_lang}__"
        assert translator.translate(["", LINES[0]], **search, **where) == ["", best.text]
    assert translator.translate(LINES[:1], **search) == [texts["en", "fr"]]
    with pytest.raises(ConfigError, match="tgt_lang=tlh: the model translates en to fr"):
        translator.translate(LINES[:1], tgt_lang="tlh")
    with pytest.raises(ConfigError, match="give src_lang="):
        translator.translate(LINES[:1], tgt_lang="de")
    with running(loaded(model_dir)) as server:
        for (source, target), text in texts.items():
            body = {"text": LINES[0], "source": source, "target": target, "search": search}
            [found] = server.post("/v1/translate", **body, split_sentences=False).json[
                "translations"
            ]
            assert found["text"] == text, (source, target)
        languages = server.get("/languages").json
        assert [len(language["targets"]) for language in languages] == [100] * 100
