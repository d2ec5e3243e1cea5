"""nmt-import of Marian, OpenNMT-py and fairseq computes the same as the converters of CTranslate2.

The tests write random models in the formats of these toolkits.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
import yaml
from importing import imported, randomize, shuffled, train_spm
from numpy_marian import NumpyMarian
from serving import change_config
from tiny import sentences
from torch import nn

from nmt.checkpoint import load_info
from nmt.config import Normalization, Positions, SearchConfig
from nmt.errors import ModelError
from nmt.importing.piece_ids import read_yaml_vocabulary
from nmt.model.positions import sinusoidal_positions
from nmt.search.request import SearchRequest
from nmt.translate.engines.native import load_models

LINES = sentences(40)
LIMIT = 12  # tokens of a translation
Arrays = dict[str, np.ndarray[Any, Any]]


def check(name: str, model_dir: Path, converted: Path, *, pad: str) -> None:
    """Compare scores and ids of a model folder with a folder that CTranslate2 converted."""
    loaded = load_models([model_dir], device="cpu")
    engine = ctranslate2.Translator(str(converted), device="cpu", intra_threads=1)
    src = loaded.tokenizer.src
    tgt = loaded.tokenizer.tgt
    rows = src.encode_batch(LINES)
    pieces = [src.pieces(row) for row in rows]
    targets = tgt.encode_batch(LINES)
    expected = engine.score_batch(pieces, [tgt.pieces(row) for row in targets])
    for i, score in enumerate(loaded.backend.score(rows, targets, SearchConfig(), 4096)):
        case = name, LINES[i]
        assert score.token_log_probs == pytest.approx(expected[i].log_probs, abs=1e-5), case
    for beam_size in (1,) if pad else (1, 4):  # suppressing padding changes scores
        config = SearchConfig(
            beam_size=beam_size,
            normalization=Normalization.none,
            max_length_a=0,
            max_length_b=LIMIT,
        )
        results = engine.translate_batch(
            pieces,
            beam_size=beam_size,
            length_penalty=0,
            min_decoding_length=0,
            max_decoding_length=LIMIT,
            return_end_token=True,
            patience=4,
            suppress_sequences=[[pad]] if pad else None,
        )
        for i, hypotheses in enumerate(loaded.backend.search(SearchRequest(rows, config))):
            translation = tgt.pieces(hypotheses[0].tokens)
            assert translation == results[i].hypotheses[0], (name, beam_size, LINES[i])


# --- Marian


def use_positions_of_ctranslate2(model_dir: Path) -> None:
    """Change the positions to those that CTranslate2 computes for models of Marian.

    They have the wavelengths of the paper, and Marian has those of Tensor2Tensor.
    """
    model = load_info(model_dir).model
    assert model.positions is Positions.sinusoidal_concat
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    model_settings = config["model"] | {"positions": "sinusoidal_halves"}
    change_config(model_dir, model=model_settings)


SSRU_SETTINGS = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}


def marian_arrays(rng: np.random.Generator, sizes: dict[str, Any]) -> Arrays:
    """Draw the arrays of a model, with Marian's names."""
    d = sizes["d"]
    f = sizes["f"]
    suffix = "_pre" if sizes["pre"] else ""
    arrays: Arrays = {}

    def draw(name: str, rows: int, columns: int) -> None:
        scale = rows**-0.5 if rows > 1 else 0.3
        arrays[name] = rng.normal(0, scale, (rows, columns)).astype("f4")

    def draw_norm(name: str, suffix: str) -> None:
        draw(f"{name}_scale{suffix}", 1, d)
        draw(f"{name}_bias{suffix}", 1, d)
        arrays[f"{name}_scale{suffix}"] += 1

    for stack, depth in (("encoder", sizes["enc"]), ("decoder", sizes["dec"])):
        attentions = ["self"] if stack == "encoder" else ["self", "context"]
        has_ssru = stack == "decoder" and sizes.get("ssru", False)
        if has_ssru:
            attentions = ["context"]
        if stack == "decoder":
            f = sizes.get("settings", {}).get("transformer-decoder-dim-ffn", f)
        for layer in range(1, depth + 1):
            name = f"{stack}_l{layer}"
            for attention in attentions:
                for head in "qkvo":
                    draw(f"{name}_{attention}_W{head}", d, d)
                    draw(f"{name}_{attention}_b{head}", 1, d)
                draw_norm(f"{name}_{attention}_Wo_ln", suffix)
            if has_ssru:
                draw(f"{name}_rnn_W", d, d)
                draw(f"{name}_rnn_Wf", d, d)
                draw(f"{name}_rnn_bf", 1, d)
                draw_norm(f"{name}_rnn_ln" if suffix else f"{name}_rnn_ffn_ln", suffix)
            draw(f"{name}_ffn_W1", d, f)
            draw(f"{name}_ffn_b1", 1, f)
            draw(f"{name}_ffn_W2", f, d)
            draw(f"{name}_ffn_b2", 1, d)
            draw_norm(f"{name}_ffn_ffn_ln", suffix)
        if sizes["pre"]:
            draw_norm(f"{stack}_top_ln", "")
    embeddings = {"Wemb": sizes["tgt"]}
    if sizes["tied"] != "all":
        embeddings = {"encoder_Wemb": sizes["src"], "decoder_Wemb": sizes["tgt"]}
    for name, size in embeddings.items():
        draw(name, d, size)
        arrays[name] = arrays[name].T.copy()
    if sizes["tied"] == "none":
        draw("decoder_ff_logit_out_W", d, sizes["tgt"])
    draw("decoder_ff_logit_out_b", 1, sizes["tgt"])
    return arrays


def write_marian(folder: Path, seed: int, **shape: Any) -> Path:
    """Write a random model of Marian with its vocabularies."""
    folder.mkdir()
    sizes = {"d": 16, "f": 24, "heads": 2, "enc": 1, "dec": 2, "pre": False, "tied": "all"} | shape
    pieces = {
        "src": train_spm(folder / "source.spm", seed, 40),
        "tgt": train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe"),
    }
    if sizes["tied"] == "all":
        pieces["src"] = pieces["tgt"] = [*pieces["src"], *pieces["tgt"]]
    for side, names in pieces.items():
        names = [piece for piece in dict.fromkeys(names) if piece != "<s>"]
        ids = shuffled([*names, ">>fra<<", "1:2", "'", '"', "\\", ": x"], seed)
        sizes[side] = len(ids)
        lines = [f"{quote(piece)}: {i}\n" for piece, i in ids.items()]
        (folder / f"{side}.vocab.yml").write_text("".join(lines), encoding="utf-8")
    settings = {
        "type": "transformer",
        "enc-depth": sizes["enc"],
        "dec-depth": sizes["dec"],
        "dim-emb": sizes["d"],
        "transformer-dim-ffn": sizes["f"],
        "transformer-heads": sizes["heads"],
        "transformer-no-projection": False,
        "transformer-decoder-autoreg": "self-attention",
        "transformer-ffn-activation": sizes.get("activation", "swish"),
        "transformer-postprocess-emb": "d",
        "transformer-guided-alignment-layer": "last",
        "transformer-preprocess": "n" if sizes["pre"] else "",
        "transformer-postprocess": "da" if sizes["pre"] else "dan",
        "transformer-postprocess-top": "n" if sizes["pre"] else "",
        **(SSRU_SETTINGS if sizes.get("ssru", False) else {}),
        **sizes.get("settings", {}),
    }
    arrays = marian_arrays(np.random.default_rng(seed), sizes)
    text = yaml.safe_dump(settings).encode("utf-8") + b"\0"
    arrays["special:model.yml"] = np.frombuffer(text, dtype=np.int8)
    np.savez(folder / "model.npz", **arrays)
    search = {"beam-size": 6, "normalize": 1, "word-penalty": 0.5}
    decoder = {"models": ["/elsewhere/model.npz"], "vocabs": ["src.vocab.yml", "tgt.vocab.yml"]}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder | search))
    return folder


def quote(piece: str) -> str:
    """Return a piece as Marian writes keys of YAML."""
    if any(c in piece for c in "\"\\:'#,[]{}&*!|>%@`") or piece[:1] in "-?" or piece.isdecimal():
        return '"' + piece.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return piece


@pytest.mark.slow
def test_marian_models_find_the_ids_and_scores_of_ctranslate2(tmp_path: Path) -> None:
    from ctranslate2.converters import MarianConverter  # takes a second

    shapes: dict[str, dict[str, Any]] = {
        "tied": {},
        "tied to the output": {"tied": "output", "activation": "relu", "enc": 3, "dec": 1},
        "not tied": {"tied": "none", "d": 12, "heads": 3},
        "wide decoder": {"settings": {"transformer-decoder-dim-ffn": 40}},
        "pre-norm": {"pre": True, "enc": 2},
    }
    for seed, (name, shape) in enumerate(shapes.items()):
        folder = write_marian(tmp_path / name.replace(" ", "-"), seed, **shape)
        vocabs = [str(folder / f"{side}.vocab.yml") for side in ("src", "tgt")]
        if seed % 2:  # as Marian itself names it
            (folder / "decoder.yml").rename(folder / "model.npz.decoder.yml")
        theirs = tmp_path / f"ct2-{seed}"
        MarianConverter(str(folder / "model.npz"), vocabs).convert(str(theirs))
        model_dir = imported(folder)
        search = load_info(model_dir).search
        assert (search.beam_size, search.word_reward) == (6, -0.5), name
        use_positions_of_ctranslate2(model_dir)
        check(name, model_dir, theirs, pad="")


@pytest.mark.parametrize("has_ssru", [False, True])
def test_models_of_marian_have_the_scores_of_its_formulas(tmp_path: Path, has_ssru: bool) -> None:
    folder = write_marian(tmp_path / "theirs", 5, ssru=has_ssru, activation="relu")
    loaded = load_models([imported(folder)], device="cpu")
    arrays = dict(np.load(folder / "model.npz"))
    del arrays["special:model.yml"]
    marian = NumpyMarian(arrays, num_heads=2)
    tokenizer = loaded.tokenizer
    rows = tokenizer.src.encode_batch(LINES[:4])
    config = SearchConfig(beam_size=2, normalization=Normalization.none, max_length_b=6)
    for i, hypotheses in enumerate(loaded.backend.search(SearchRequest(rows, config))):
        src_ids = [*rows[i], tokenizer.src.eos_id]
        for hypothesis in hypotheses:
            expected = marian.log_probs(src_ids, hypothesis.tokens)
            assert hypothesis.token_log_probs == pytest.approx(expected, abs=1e-4)


def test_other_recurrent_decoders_of_marian_are_refused(tmp_path: Path) -> None:
    for name, value in (("dec-cell", "gru"), ("layer-normalization", True)):
        settings = SSRU_SETTINGS | {name: value}
        folder = write_marian(tmp_path / name, 5, ssru=True, settings=settings)
        with pytest.raises(ModelError, match=f"{name}={value!r} cannot be imported"):
            imported(folder)


def test_pieces_of_marian_are_read_as_yaml_writes_them(tmp_path: Path) -> None:
    pieces = [*"ab_LN", "a\xa0b", *"\x85\u2028\u2029", "\a\b\x1b", *"'\"\\", "1:2", "# x"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    path = tmp_path / "vocab.yml"
    lines = [
        f"{yaml.safe_dump(piece, default_style=chr(34), allow_unicode=True).strip()}: {i}\n"
        for piece, i in ids.items()
    ]
    long_piece = "x" * 130
    lines.append(f'? "{long_piece}"\n: {len(pieces)}\n')  # as YAML writes keys over 128 characters
    for line_end in ("\n", "\r\n"):
        text = "".join(lines).replace("\n", line_end)
        path.write_text(text, encoding="utf-8", newline="")
        assert read_yaml_vocabulary(path) == [*ids.items(), (long_piece, len(pieces))]


# --- OpenNMT-py


OPENNMT_SIZES = (16, 24)  # of the model and of the feed-forward layers


def draw_opennmt(
    seed: int, vocab_sizes: dict[str, int], *, has_attention_biases: bool, is_shared: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Draw the weights of the layers and of the output of a model of OpenNMT-py."""
    d, f = OPENNMT_SIZES
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        return torch.randn(shape, generator=generator) * scale

    def draw_linear(name: str, out: int, inner: int, *, has_bias: bool = True) -> None:
        weights[f"{name}.weight"] = draw(out, inner)
        if has_bias:
            weights[f"{name}.bias"] = draw(out)

    def draw_norm(name: str) -> None:
        weights[f"{name}.weight"] = 1 + draw(d)
        weights[f"{name}.bias"] = draw(d)

    stacks = {  # depth, name of the layers, attentions and their norms
        "encoder": (2, "transformer", {"self_attn": "layer_norm"}),
        "decoder": (
            1,
            "transformer_layers",
            {"self_attn": "layer_norm_1", "context_attn": "layer_norm_2"},
        ),
    }
    for stack, (depth, layers, attentions) in stacks.items():
        for i in range(depth):
            name = f"{stack}.{layers}.{i}"
            for attention, norm in attentions.items():
                for linear in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                    draw_linear(f"{name}.{attention}.{linear}", d, d, has_bias=has_attention_biases)
                draw_norm(f"{name}.{norm}")
            draw_linear(f"{name}.feed_forward.w_1", f, d)
            draw_linear(f"{name}.feed_forward.w_2", d, f)
            draw_norm(f"{name}.feed_forward.layer_norm")
        draw_norm(f"{stack}.layer_norm")
        side = "src" if stack == "encoder" else "tgt"
        embeddings = f"{stack}.embeddings.make_embedding"
        weights[f"{embeddings}.emb_luts.0.weight"] = draw(vocab_sizes[side], d)
        table = sinusoidal_positions(5000, d, Positions.sinusoidal)
        weights[f"{embeddings}.pe.pe"] = table[:, None]
    output = {"weight": draw(vocab_sizes["tgt"], d), "bias": draw(vocab_sizes["tgt"])}
    output["bias"][1:3] = -100.0  # padding and BOS, which we never generate
    if is_shared:
        name = "{}.embeddings.make_embedding.emb_luts.0.weight"
        output["weight"] = weights[name.format("decoder")]
        weights[name.format("encoder")] = output["weight"]
    return weights, output


def write_opennmt(folder: Path, seed: int, *, version: int, is_shared: bool) -> Path:
    """Write a random model of OpenNMT-py; version 3 has no biases in attention."""
    folder.mkdir()
    pieces = train_spm(folder / "source.spm", seed, 40)
    pieces += train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe")
    pieces = list(dict.fromkeys(pieces))
    rng = random.Random(seed)
    vocab = {}
    for side in ("src", "tgt"):
        names = pieces if is_shared else rng.sample(pieces, 30)
        vocab[side] = list(dict.fromkeys(["<unk>", "<blank>", "<s>", "</s>", *names]))
    vocab_sizes = {side: len(names) for side, names in vocab.items()}
    weights, output = draw_opennmt(
        seed, vocab_sizes, has_attention_biases=version == 2, is_shared=is_shared
    )
    options = argparse.Namespace(
        encoder_type="transformer",
        decoder_type="transformer",
        enc_layers=2,
        dec_layers=1,
        heads=4,
        transformer_ff=OPENNMT_SIZES[1],
        position_encoding=True,
        max_relative_positions=0,
        dropout=[0.3, 0.2],
        attention_dropout=[0.15],
    )
    setattr(options, "hidden_size" if version == 3 else "rnn_size", OPENNMT_SIZES[0])
    content = {"model": weights, "generator": output, "vocab": vocab, "opt": options}
    torch.save({**content, "optim": None}, folder / "model_step_10.pt")
    return folder


@pytest.mark.slow
def test_opennmt_models_find_the_ids_and_scores_of_ctranslate2(tmp_path: Path) -> None:
    from ctranslate2.converters import OpenNMTPyConverter  # takes a second

    for seed, (version, is_shared) in enumerate([(2, False), (3, False), (3, True)]):
        name = f"{version}-{is_shared}"
        folder = write_opennmt(tmp_path / name, seed, version=version, is_shared=is_shared)
        theirs = tmp_path / f"ct2-{seed}"
        converter = OpenNMTPyConverter(str(folder / "model_step_10.pt"), True)
        converter.convert(str(theirs))
        if version == 3:  # the default since 3.4.2, which CTranslate2's converter refuses
            content = torch.load(folder / "model_step_10.pt", weights_only=False)
            content["opt"].self_attn_type = "scaled-dot-flash"
            torch.save(content, folder / "model_step_10.pt")
        model_dir = imported(folder)
        check(name, model_dir, theirs, pad="")
        model = load_info(model_dir).model
        dropouts = model.dropout, model.attention_dropout, model.activation_dropout
        assert dropouts == (0.2, 0.15, 0.2), name


# --- fairseq


class _Embedding(nn.Embedding):
    """The position table of fairseq, which begins at `padding_idx` + 1."""

    def __init__(self, d_model: int) -> None:
        super().__init__(100, d_model, padding_idx=1)
        table = sinusoidal_positions(98, d_model, Positions.sinusoidal_concat, 2)
        self.weight.data[2:] = table


class _Layer(nn.Module):
    """A layer with the modules that CTranslate2's converter reads."""

    def __init__(self, d: int, f: int, *, has_memory: bool) -> None:
        super().__init__()
        for name in ("self_attn", "encoder_attn") if has_memory else ("self_attn",):
            attention = nn.Module()
            for head in ("q_proj", "k_proj", "v_proj", "out_proj"):
                setattr(attention, head, nn.Linear(d, d))
            setattr(self, name, attention)
            setattr(self, f"{name}_layer_norm", nn.LayerNorm(d))
        self.fc1 = nn.Linear(d, f)
        self.fc2 = nn.Linear(f, d)
        self.final_layer_norm = nn.LayerNorm(d)


class _Stack(nn.Module):
    """An encoder or decoder with the modules that CTranslate2's converter reads."""

    def __init__(self, args: argparse.Namespace, size: int, *, is_decoder: bool) -> None:
        super().__init__()
        d = args.encoder_embed_dim
        f = args.decoder_ffn_embed_dim if is_decoder else args.encoder_ffn_embed_dim
        depth = args.decoder_layers if is_decoder else args.encoder_layers
        self.embed_scale = d**0.5
        self.embed_tokens = nn.Embedding(size, d)
        self.embed_positions = _Embedding(d)
        layers = [_Layer(d, f, has_memory=is_decoder) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(d) if args.encoder_normalize_before else None
        self.layernorm_embedding = self.project_in_dim = self.project_out_dim = None
        if is_decoder:
            self.output_projection = nn.Linear(d, size, bias=False)


class _Dictionary:
    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        self.symbols = ["<s>", "<pad>", "</s>", "<unk>", *(line.split(" ")[0] for line in lines)]


def make_fairseq(folder: Path) -> types.ModuleType:
    """Make a module like fairseq, which does not install on current versions of Python.

    It has what CTranslate2's converter uses: functions that build a model and its dictionaries.
    """

    def setup_task(args: argparse.Namespace) -> Any:
        return types.SimpleNamespace(
            source_dictionary=_Dictionary(folder / f"dict.{args.source_lang}.txt"),
            target_dictionary=_Dictionary(folder / f"dict.{args.target_lang}.txt"),
        )

    def build_model(args: argparse.Namespace, task: Any) -> nn.Module:
        model = nn.Module()
        model.encoder = _Stack(args, len(task.source_dictionary.symbols), is_decoder=False)
        model.decoder = _Stack(args, len(task.target_dictionary.symbols), is_decoder=True)
        if args.share_decoder_input_output_embed:
            model.decoder.output_projection.weight = model.decoder.embed_tokens.weight
        return model

    module = types.ModuleType("fairseq")
    module.tasks = types.SimpleNamespace(setup_task=setup_task)
    registry = {"transformer": "transformer"}
    module.models = types.SimpleNamespace(
        ARCH_MODEL_NAME_REGISTRY=registry, build_model=build_model
    )
    module.checkpoint_utils = None
    return module


def write_fairseq(folder: Path, seed: int, *, is_pre_norm: bool, is_tied: bool) -> Path:
    """Write a random checkpoint of fairseq with dictionaries."""
    folder.mkdir()
    for i, (lang, spm) in enumerate((("en", "source.spm"), ("fr", "target.spm"))):
        pieces = train_spm(folder / spm, seed + i, 40 + 10 * i)[3:]
        random.Random(seed).shuffle(pieces)
        text = "".join(f"{piece} {9 - i}\n" for i, piece in enumerate(pieces))
        (folder / f"dict.{lang}.txt").write_text(text, encoding="utf-8")
    args = argparse.Namespace(
        arch="transformer",
        source_lang="en",
        target_lang="fr",
        encoder_layers=2,
        decoder_layers=1,
        encoder_embed_dim=16,
        decoder_embed_dim=16,
        encoder_ffn_embed_dim=24,
        decoder_ffn_embed_dim=40,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_normalize_before=is_pre_norm,
        decoder_normalize_before=is_pre_norm,
        share_decoder_input_output_embed=is_tied,
        activation_fn="relu",
    )
    fairseq = make_fairseq(folder)
    model = fairseq.models.build_model(args, fairseq.tasks.setup_task(args))
    randomize(model, seed)
    weights = model.state_dict()
    for stack in ("encoder", "decoder"):  # fairseq stores no sines
        weights[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        weights[f"{stack}.version"] = torch.tensor([3.0])
        del weights[f"{stack}.embed_positions.weight"]
    torch.save({"args": args, "model": weights, "optimizer_history": []}, folder / "model.pt")
    return folder


def test_positions_of_fairseq_begin_after_the_id_of_padding(tmp_path: Path) -> None:
    """The sines by the formula of fairseq's SinusoidalPositionalEmbedding; its padding id is 1."""
    folder = write_fairseq(tmp_path / "model", 0, is_pre_norm=False, is_tied=True)
    config = load_info(imported(folder)).model
    half = config.d_model // 2
    angles = np.arange(2, 7)[:, None] * np.exp(np.arange(half) * -np.log(10_000) / (half - 1))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # (5, D)
    positions = sinusoidal_positions(5, config.d_model, config.positions, config.position_offset)
    np.testing.assert_allclose(positions.numpy(), expected, atol=1e-6)


@pytest.mark.slow
def test_fairseq_models_find_the_ids_and_scores_of_ctranslate2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctranslate2.converters import FairseqConverter

    for seed, (is_pre_norm, is_tied) in enumerate([(False, True), (True, True), (True, False)]):
        name = f"pre-norm {is_pre_norm}, tied {is_tied}"
        folder = write_fairseq(
            tmp_path / f"m{seed}", seed, is_pre_norm=is_pre_norm, is_tied=is_tied
        )
        monkeypatch.setitem(sys.modules, "fairseq", make_fairseq(folder))
        theirs = tmp_path / f"ct2-{seed}"
        content = torch.load(folder / "model.pt", weights_only=False)
        for stack in ("encoder", "decoder"):  # the model of `make_fairseq` has a table instead
            table = _Embedding(16).weight.data
            content["model"][f"{stack}.embed_positions.weight"] = table
            del content["model"][f"{stack}.version"]
            del content["model"][f"{stack}.embed_positions._float_tensor"]
        torch.save(content, tmp_path / "model.pt")
        converter = FairseqConverter(
            str(tmp_path / "model.pt"), str(folder), unsafe_deserialization=True
        )
        converter.convert(str(theirs))
        model_dir = imported(folder, src_lang="fr", tgt_lang="en")  # override the file
        check(name, model_dir, theirs, pad="<blank>")
        info = load_info(model_dir)
        assert (info.src_lang, info.tgt_lang) == ("fr", "en")
