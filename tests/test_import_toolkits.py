"""nmt-import of Marian, OpenNMT-py and fairseq: files that a test writes, read by us and by the
converters of CTranslate2.
"""

from __future__ import annotations

import argparse
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
from tiny import sentences
from torch import nn

from nmt.checkpoint import load_info
from nmt.config import Normalization, Positions, SearchConfig
from nmt.importing.piece_ids import read_yaml_vocabulary
from nmt.model.positions import sinusoidal_positions
from nmt.translate.backend import SearchRequest, load_models

LINES = sentences(40)
LIMIT = 12  # tokens of a translation
Arrays = dict[str, np.ndarray[Any, Any]]


def check(name: str, model_dir: Path, folder: Path, *, pad: str) -> None:
    """Compare scores and ids with those of CTranslate2, of what its converter wrote to `folder`."""
    loaded = load_models([model_dir], device="cpu")
    engine = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
    rows = loaded.tokenizer.src.encode_batch(LINES)
    pieces = [loaded.tokenizer.src.pieces(row) for row in rows]
    targets = loaded.tokenizer.tgt.encode_batch(LINES)
    wanted = engine.score_batch(pieces, [loaded.tokenizer.tgt.pieces(row) for row in targets])
    for line, theirs, ours in zip(
        LINES, wanted, loaded.backend.score(rows, targets, SearchConfig(), 4096), strict=True
    ):
        assert ours.token_log_probs == pytest.approx(theirs.log_probs, abs=1e-5), (name, line)
    for beam_size in (1,) if pad else (1, 4):  # without `pad` its probabilities are others
        none = {"normalization": Normalization.none, "max_length_a": 0, "max_length_b": LIMIT}
        config = SearchConfig(beam_size=beam_size, **none)
        how = {"beam_size": beam_size, "length_penalty": 0, "min_decoding_length": 0}
        how |= {"max_decoding_length": LIMIT, "return_end_token": True, "patience": 4}
        how |= {"suppress_sequences": [[pad]]} if pad else {}
        results = engine.translate_batch(pieces, **how)
        found = loaded.backend.search(SearchRequest(rows, config))
        for line, best, result in zip(LINES, found, results, strict=True):
            ids = loaded.tokenizer.tgt.pieces(best[0].tokens)
            assert ids == result.hypotheses[0], (name, beam_size, line)


# --- Marian


def marian_arrays(draw: np.random.Generator, sizes: dict[str, Any]) -> Arrays:
    """Draw the arrays of a model, with Marian's names."""
    d, f, suffix = sizes["d"], sizes["f"], "_pre" if sizes["pre"] else ""

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return draw.normal(0, shape[0] ** -0.5 if shape[0] > 1 else 0.3, shape).astype("f4")

    found: Arrays = {}
    for stack, depth in (("encoder", sizes["enc"]), ("decoder", sizes["dec"])):
        for layer in range(1, depth + 1):
            name = f"{stack}_l{layer}"
            for part in ("self", "context")[: 1 + (stack == "decoder")]:
                for head in "qkvo":
                    found[f"{name}_{part}_W{head}"] = normal(d, d)
                    found[f"{name}_{part}_b{head}"] = normal(1, d)
                found[f"{name}_{part}_Wo_ln_scale{suffix}"] = 1 + normal(1, d)
                found[f"{name}_{part}_Wo_ln_bias{suffix}"] = normal(1, d)
            found[f"{name}_ffn_W1"], found[f"{name}_ffn_b1"] = normal(d, f), normal(1, f)
            found[f"{name}_ffn_W2"], found[f"{name}_ffn_b2"] = normal(f, d), normal(1, d)
            found[f"{name}_ffn_ffn_ln_scale{suffix}"] = 1 + normal(1, d)
            found[f"{name}_ffn_ffn_ln_bias{suffix}"] = normal(1, d)
        if sizes["pre"]:
            found[f"{stack}_top_ln_scale"] = 1 + normal(1, d)
            found[f"{stack}_top_ln_bias"] = normal(1, d)
    embeddings = {"Wemb": sizes["tgt"]}
    if sizes["tied"] != "all":
        embeddings = {"encoder_Wemb": sizes["src"], "decoder_Wemb": sizes["tgt"]}
    for name, size in embeddings.items():
        found[name] = normal(d, size).T.copy()
    if sizes["tied"] == "none":
        found["decoder_ff_logit_out_W"] = normal(d, sizes["tgt"])
    found["decoder_ff_logit_out_b"] = normal(1, sizes["tgt"])
    return found


def write_marian(folder: Path, seed: int, **shape: Any) -> Path:
    """Write a random model of Marian with its vocabularies."""
    folder.mkdir()
    sizes = {"d": 16, "f": 24, "heads": 2, "enc": 1, "dec": 2, "pre": False, "tied": "all"} | shape
    first, second = train_spm(folder / "source.spm", seed, 40), None
    second = train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe")
    is_joint = sizes["tied"] == "all"
    both = (
        [dict.fromkeys([*first, *second])] * 2
        if is_joint
        else [dict.fromkeys(p) for p in (first, second)]
    )
    for name, pieces in zip(("src", "tgt"), both, strict=True):
        names = [piece for piece in pieces if piece != "<s>"]
        ids = shuffled([*names, ">>fra<<", "1:2", "'", '"', "\\", ": x"], seed)
        sizes[name] = len(ids)
        lines = [f"{quote(piece)}: {i}\n" for piece, i in ids.items()]
        (folder / f"{name}.vocab.yml").write_text("".join(lines), encoding="utf-8")
    settings = {
        "type": "transformer", "enc-depth": sizes["enc"], "dec-depth": sizes["dec"],
        "dim-emb": sizes["d"], "transformer-dim-ffn": sizes["f"],
        "transformer-heads": sizes["heads"], "transformer-no-projection": False,
        "transformer-decoder-autoreg": "self-attention",
        "transformer-ffn-activation": sizes.get("activation", "swish"),
        "transformer-postprocess-emb": "d", "transformer-guided-alignment-layer": "last",
        "transformer-preprocess": "n" if sizes["pre"] else "",
        "transformer-postprocess": "da" if sizes["pre"] else "dan",
        "transformer-postprocess-top": "n" if sizes["pre"] else "",
        **sizes.get("settings", {}),
    }  # fmt: skip
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


def test_marian_models_find_the_ids_and_scores_of_ctranslate2(tmp_path: Path) -> None:
    from ctranslate2.converters import MarianConverter  # takes a second

    shapes: dict[str, dict[str, Any]] = {
        "tied": {},
        "tied to the output": {"tied": "output", "activation": "relu", "enc": 3, "dec": 1},
        "not tied": {"tied": "none", "d": 12, "heads": 3},
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
        check(name, model_dir, theirs, pad="")
        search = load_info(model_dir).search
        assert (search.beam_size, search.word_reward) == (6, -0.5), name


def test_pieces_of_marian_are_read_as_yaml_writes_them(tmp_path: Path) -> None:
    pieces = [*"ab_LN", "a\xa0b", *"\x85\u2028\u2029", "\a\b\x1b", *"'\"\\", "1:2", "# x"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    path = tmp_path / "vocab.yml"
    lines = [
        f"{yaml.safe_dump(piece, default_style=chr(34), allow_unicode=True).strip()}: {i}\n"
        for piece, i in ids.items()
    ]
    path.write_text("".join(lines), encoding="utf-8")
    assert read_yaml_vocabulary(path) == list(ids.items())


# --- OpenNMT-py


def write_opennmt(folder: Path, seed: int, *, version: int, is_shared: bool) -> Path:
    """Write a random model of OpenNMT-py; version 3 has no biases in attention."""
    folder.mkdir()
    pieces = train_spm(folder / "source.spm", seed, 40)
    pieces += train_spm(folder / "target.spm", seed + 1, 50, model_type="bpe")
    draw = random.Random(seed)
    vocab = {}
    for side in ("src", "tgt"):
        names = [*dict.fromkeys(pieces)] if is_shared else draw.sample([*dict.fromkeys(pieces)], 30)
        vocab[side] = [*dict.fromkeys(["<unk>", "<blank>", "<s>", "</s>", *names])]
    d, f, generator = 16, 24, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (
            shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        )

    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, inner: int, *, bias: bool = True) -> None:
        weights[f"{name}.weight"] = normal(out, inner)
        if bias:
            weights[f"{name}.bias"] = normal(out)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + normal(d), normal(d)

    attention = [("linear_query",), ("linear_keys",), ("linear_values",), ("final_linear",)]
    for stack, layers, depth in (
        ("encoder", "transformer", 2),
        ("decoder", "transformer_layers", 1),
    ):
        for i in range(depth):
            name = f"{stack}.{layers}.{i}"
            for part in ("self_attn", "context_attn")[: 1 + (stack == "decoder")]:
                for (head,) in attention:
                    linear(f"{name}.{part}.{head}", d, d, bias=version == 2)
            linear(f"{name}.feed_forward.w_1", f, d)
            linear(f"{name}.feed_forward.w_2", d, f)
            norm(f"{name}.feed_forward.layer_norm")
            for place in (
                ("layer_norm",) if stack == "encoder" else ("layer_norm_1", "layer_norm_2")
            ):
                norm(f"{name}.{place}")
        norm(f"{stack}.layer_norm")
        side = "src" if stack == "encoder" else "tgt"
        place = f"{stack}.embeddings.make_embedding"
        weights[f"{place}.emb_luts.0.weight"] = normal(len(vocab[side]), d)
        table = sinusoidal_positions(5000, d, Positions.sinusoidal)
        weights[f"{place}.pe.pe"] = table[:, None]
    embedding = "{}.embeddings.make_embedding.emb_luts.0.weight"
    if is_shared:
        weights[embedding.format("encoder")] = weights[embedding.format("decoder")]
    output = {"weight": normal(len(vocab["tgt"]), d), "bias": normal(len(vocab["tgt"]))}
    if is_shared:
        output["weight"] = weights[embedding.format("decoder")]
    output["bias"][1:3] = -100.0  # padding and BOS, which we never generate
    options = argparse.Namespace(
        encoder_type="transformer", decoder_type="transformer", enc_layers=2, dec_layers=1, heads=4,
        transformer_ff=f, position_encoding=True, max_relative_positions=0,
        dropout=[0.3, 0.2], attention_dropout=[0.15],
        **{"hidden_size" if version == 3 else "rnn_size": d},
    )  # fmt: skip
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
        if version == 3:  # what it writes by default since 3.4.2, which CTranslate2 refuses
            content = torch.load(folder / "model_step_10.pt", weights_only=False)
            content["opt"].self_attn_type = "scaled-dot-flash"
            torch.save(content, folder / "model_step_10.pt")
        model_dir = imported(folder)
        check(name, model_dir, theirs, pad="")
        model = load_info(model_dir).model
        shares = model.dropout, model.attention_dropout, model.activation_dropout
        assert shares == (0.2, 0.15, 0.2), name


# --- fairseq


class _Embedding(nn.Embedding):
    """fairseq's: with the positions of a table, from `padding_idx` + 1 on."""

    def __init__(self, d_model: int) -> None:
        super().__init__(100, d_model, padding_idx=1)
        table = sinusoidal_positions(98, d_model, Positions.sinusoidal_concat, 2)
        self.weight.data[2:] = table


class _Layer(nn.Module):
    """The parts of a layer that fairseq's converter reads."""

    def __init__(self, d: int, f: int, *, has_memory: bool) -> None:
        super().__init__()
        for name in ("self_attn", "encoder_attn")[: 1 + has_memory]:
            attention = nn.Module()
            for head in ("q_proj", "k_proj", "v_proj", "out_proj"):
                setattr(attention, head, nn.Linear(d, d))
            setattr(self, name, attention)
            setattr(self, f"{name}_layer_norm", nn.LayerNorm(d))
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.final_layer_norm = nn.LayerNorm(d)


class _Stack(nn.Module):
    """The parts of an encoder or decoder that fairseq's converter reads."""

    def __init__(self, args: argparse.Namespace, size: int, *, is_decoder: bool) -> None:
        super().__init__()
        d, depth = args.encoder_embed_dim, args.encoder_layers
        depth = args.decoder_layers if is_decoder else depth
        self.embed_scale = d**0.5
        self.embed_tokens, self.embed_positions = nn.Embedding(size, d), _Embedding(d)
        f = args.encoder_ffn_embed_dim
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


def stand_in_for_fairseq(folder: Path) -> types.ModuleType:
    """Return the few names of fairseq, which does not install on this Python, that the converter
    uses to build a model and its dictionaries.
    """

    def setup_task(args: argparse.Namespace) -> Any:
        sides = {"source_dictionary": args.source_lang, "target_dictionary": args.target_lang}
        found = {k: _Dictionary(folder / f"dict.{lang}.txt") for k, lang in sides.items()}
        return types.SimpleNamespace(**found)

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
    sizes = {"embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 4}
    both = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
    args = argparse.Namespace(
        arch="transformer", source_lang="en", target_lang="fr", encoder_layers=2, decoder_layers=1,
        encoder_normalize_before=is_pre_norm, decoder_normalize_before=is_pre_norm,
        share_decoder_input_output_embed=is_tied, activation_fn="relu", **both,
    )  # fmt: skip
    fairseq = stand_in_for_fairseq(folder)
    model = fairseq.models.build_model(args, fairseq.tasks.setup_task(args))
    randomize(model, seed)
    weights = model.state_dict()
    for stack in ("encoder", "decoder"):  # fairseq stores no sines
        weights[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        weights[f"{stack}.version"] = torch.tensor([3.0])
        del weights[f"{stack}.embed_positions.weight"]
    torch.save({"args": args, "model": weights, "optimizer_history": []}, folder / "model.pt")
    return folder


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
        monkeypatch.setitem(sys.modules, "fairseq", stand_in_for_fairseq(folder))
        theirs = tmp_path / f"ct2-{seed}"
        content = torch.load(folder / "model.pt", weights_only=False)
        for stack in ("encoder", "decoder"):  # whose own model has the table instead
            table = _Embedding(16).weight.data
            content["model"][f"{stack}.embed_positions.weight"] = table
            for part in ("version", "embed_positions._float_tensor"):
                del content["model"][f"{stack}.{part}"]
        torch.save(content, tmp_path / "whole.pt")
        converter = FairseqConverter(
            str(tmp_path / "whole.pt"), str(folder), unsafe_deserialization=True
        )
        converter.convert(str(theirs))
        model_dir = imported(folder, src_lang="fr", tgt_lang="en")  # names, not those of files
        check(name, model_dir, theirs, pad="<blank>")
        info = load_info(model_dir)
        assert (info.src_lang, info.tgt_lang) == ("fr", "en")
