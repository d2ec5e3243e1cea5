"""Attention of every layer and head, against the plain model with a softmax written out here."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import random_model
from tiny import assert_near, plain, sentences, tiny_model
from torch import Tensor

from nmt.config import Norm, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError, DataError
from nmt.model.attention import MultiHeadAttention, causal_mask, padding_mask
from nmt.search.stepper import EnsembleStepper, ModelStepper
from nmt.translate.attention import KINDS, PairAttention, word_numbers
from nmt.translate.translator import Translator

LINES = ["the small green house", "", "größer über", "a"]
CONFIG = SearchConfig(beam_size=3, max_length_a=1.0, max_length_b=4)


def translator(tokenizer: Tokenizer, **changes: object) -> Translator:
    shape = {"num_encoder_layers": 1, "num_decoder_layers": 3, **changes}
    model = tiny_model(5, sharpness=2.0, vocab_size=tokenizer.vocab_size, **shape)
    return Translator(ModelStepper(model), tokenizer, CONFIG)


def naive(module: MultiHeadAttention, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
    """Compute the weights (H, T, S) one head and query at a time, in float64."""
    x = x[0].double()
    memory = memory[0].double()
    wq, wk, _ = module.in_projection.weight.double().chunk(3)
    bq, bk, _ = module.in_projection.bias.double().chunk(3)
    size = x.size(1) // module.num_heads
    weights = torch.zeros(module.num_heads, len(x), len(memory), dtype=torch.float64)
    for head in range(module.num_heads):
        rows = slice(head * size, (head + 1) * size)
        queries = x @ wq[rows].T + bq[rows]
        keys = memory @ wk[rows].T + bk[rows]
        for i, query in enumerate(queries):
            logits = keys[visible[i]] @ query / math.sqrt(size)
            weights[head, i, visible[i]] = logits.exp() / logits.exp().sum()
    return weights


@torch.inference_mode()
def expected(translator: Translator, src: list[int], tgt: list[int]) -> dict[str, list[Tensor]]:
    """Compute the attention weights of the plain model from the inputs of its attention modules."""
    model = plain(translator.backend.stepper.model)  # type: ignore[attr-defined]
    weights: dict[str, list[Tensor]] = defaultdict(list)

    def watch(module: MultiHeadAttention, inputs: tuple[Any, ...]) -> None:
        x, memory, mask = inputs[:3]
        kind = "cross" if memory is not x else "decoder" if mask.mask.dim() == 2 else "encoder"
        visible = mask.mask.expand(1, 1, x.size(1), memory.size(1))[0, 0]
        weights[kind].append(naive(module, x, memory, visible))

    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(watch)
    mask = padding_mask(torch.tensor([len(src)]), len(src))
    model(torch.tensor([src]), mask, torch.tensor([tgt]), causal_mask(len(tgt)))
    return weights


def test_attention_is_the_naive_softmax_of_every_layer_and_head(tokenizer: Tokenizer) -> None:
    targets = ["das Haus", "the tree", "", "über"]
    for norm in Norm:
        model_translator = translator(tokenizer, norm=norm)
        pairs = model_translator.attention(LINES, targets)
        for line, target, pair in zip(LINES, targets, pairs, strict=True):
            src = [*tokenizer.encode(line), tokenizer.eos_id]
            tgt = [tokenizer.bos_id, *tokenizer.encode(target)]
            assert pair.src == tokenizer.pieces(src)
            assert pair.tgt == tokenizer.pieces(tgt)
            assert pair.predicted == [*pair.tgt[1:], "</s>"]
            for kind, layers in expected(model_translator, src, tgt).items():
                weights = getattr(pair, kind)
                case = norm, line, kind
                assert_near(weights.double(), torch.stack(layers), case, atol=1e-6, rtol=0)
                assert_near(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), case)
            hidden = ~causal_mask(len(tgt))
            assert (pair.decoder[..., hidden] == 0).all()
            assert len(tgt) == 1 or (pair.decoder[..., ~hidden] > 0).all()


def test_attention_without_targets_belongs_to_the_translations_of_search(
    tokenizer: Tokenizer,
) -> None:
    model = translator(tokenizer)
    for options in ({}, {"beam_size": 1}):
        translations = model.n_best(LINES, **options)
        for i, pair in enumerate(model.attention(LINES, **options)):
            assert pair.predicted[:-1] == translations[i][0].tokens
            assert pair.cross.shape == (3, 4, len(pair.predicted), len(pair.src))


def test_a_model_without_source_eos_never_attends_to_eos(tokenizer: Tokenizer) -> None:
    model = translator(tokenizer, source_eos=False)
    pairs = model.attention(LINES, LINES)
    for line, pair in zip(LINES, pairs, strict=True):
        assert pair.src == (tokenizer.pieces(tokenizer.encode(line)) or ["</s>"]), line
        src = tokenizer.encode(line) or [tokenizer.eos_id]
        tgt = [tokenizer.bos_id, *tokenizer.encode(line)]
        for kind, layers in expected(model, src, tgt).items():
            weights = getattr(pair, kind).double()
            assert_near(weights, torch.stack(layers), (line, kind), atol=1e-6, rtol=0)


def test_engines_without_attention_and_unequal_numbers_of_lines_are_refused(
    tokenizer: Tokenizer,
) -> None:
    model = translator(tokenizer)
    stepper = model.backend.stepper  # type: ignore[attr-defined]
    ensemble = Translator(EnsembleStepper([stepper, stepper]), tokenizer, CONFIG)
    with pytest.raises(ConfigError, match="shows no attention"):
        ensemble.attention(["a"], ["a"])
    with pytest.raises(DataError, match="4 sources and 1 targets"):
        model.attention(LINES, ["a"])
    with pytest.raises(ConfigError, match="beam_sizes: no such option"):
        model.attention(LINES, beam_sizes=2)


def test_the_maps_for_pages_are_rounded_to_a_255th(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", tokenizer)
    [pair] = Translator.load(folder, device="cpu", backend="native").attention(
        sentences(1, seed=4), ["the tree"]
    )
    content = pair.as_json()
    for kind in KINDS:
        weights = getattr(pair, kind).numpy()
        map = content["maps"][kind]
        levels = np.frombuffer(base64.b64decode(map["data"]), np.uint8).reshape(map["shape"])
        assert np.abs(levels / 255 - weights).max() <= 0.5 / 255 + 1e-6, kind
    assert isinstance(pair, PairAttention)
    assert (content["src"], content["predicted"]) == (pair.src, pair.predicted)


def test_pieces_are_grouped_to_words() -> None:
    cases = {
        ("<s>", "▁the", "▁gr", "ün", "e", "▁tree"): [0, 1, 2, 2, 2, 3],
        ("▁the", "se", ".", "</s>"): [0, 0, 0, 1],
        ("<s>", "un", "der", "</s>"): [0, 1, 1, 2],
        ("▁", "你", "好", "ab", "</s>"): [0, 1, 2, 2, 3],
        ("</s>",): [0],
    }
    for pieces, numbers in cases.items():
        assert word_numbers(list(pieces)) == numbers, pieces
