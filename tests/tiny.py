"""Tiny models and ids that the tests share."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Mapping
from typing import Any

import sentencepiece
import torch
from torch import Tensor, nn

from nmt.config import Decoder, ModelConfig, TokenizerConfig
from nmt.model.attention import MultiHeadAttention, causal_mask, padding_mask
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.fast.packing import pack
from nmt.model.layers import FeedForward
from nmt.model.transformer import Ssru, Transformer
from nmt.training import costs

torch.set_num_threads(1)
costs.PEAK_SECONDS = 0.01  # no test asks how fast this machine is

PAD, UNK, BOS, EOS = range(4)
VOCAB_SIZE = 23
WORDS = ["the", "a", "small", "green", "house", "tree", "sees", "Haus", "grün", "größer", "über"]


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers a side and 16 dimensions, without dropout."""
    settings: dict[str, Any] = {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 4,
        "dropout": 0.0,
    }
    return ModelConfig(**settings | changes)


def draw_large(model: Transformer) -> None:
    """Draw larger weights than initialization does, by Xavier's rule for each matrix of a layer.

    With the initial weights, an untrained model would repeat one word.
    """
    for embedding in (model.embedding, model.src_embedding):
        if embedding is not None:
            embedding.reset_parameters()
            nn.init.normal_(embedding.weight, std=model.config.d_model**-0.5)
    if model.output_weight is not None:
        nn.init.normal_(model.output_weight, std=model.config.d_model**-0.5)
    for module in model.modules():
        if isinstance(module, (MultiHeadAttention, FeedForward, Ssru)):
            linears = []
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    child.reset_parameters()
                    linears.append((name, child))
            for name, linear in linears:
                rows = module.qkv_sizes if name == "in_projection" else [len(linear.weight)]
                for block in linear.weight.split(rows):
                    nn.init.xavier_uniform_(block)


def tiny_model(
    seed: int = 0,
    *,
    sharpness: float = 1.0,
    vocab_size: int = VOCAB_SIZE,
    src_vocab_size: int | None = None,
    **changes: Any,
) -> FastTransformer:
    """Make an accelerated model in eval mode whose weights, biases and norms are all random.

    `sharpness` scales the output matrix, so that an untrained model has clear preferences.
    """
    model = Transformer(tiny_config(**changes), vocab_size, src_vocab_size=src_vocab_size)
    torch.manual_seed(seed)
    draw_large(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
                module.weight.uniform_(0.5, 1.5)
            if isinstance(module, (nn.LayerNorm, nn.Linear)) and module.bias is not None:
                module.bias.uniform_(-0.5, 0.5)
        model.embedding.weight.mul_(sharpness)
        if model.output_bias is not None:
            model.output_bias.uniform_(-0.5, 0.5)
    return accelerate(model.eval())


def plain(model: Transformer) -> Transformer:
    """Return the plain model, the oracle of all others, with a copy of the weights of `model`."""
    src_embedding = model.src_embedding
    twin = Transformer(
        model.config,
        len(model.embedding.weight),
        src_vocab_size=None if src_embedding is None else len(src_embedding.weight),
    )
    twin.load_state_dict(model.state_dict())
    return twin.to(model.embedding.weight.dtype).train(model.training)


def random_source(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw padded ids (B, S) of sources; return them and their lengths (B,), which count EOS."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        src[row, : length - 1] = torch.randint(4, VOCAB_SIZE, (length - 1,), generator=generator)
        src[row, length - 1] = EOS
    return src, torch.tensor(lengths)


def random_target(batch: int, length: int, seed: int = 1) -> Tensor:
    """Draw decoder inputs (B, T) that start with BOS."""
    generator = torch.Generator().manual_seed(seed)
    tgt = torch.randint(4, VOCAB_SIZE, (batch, length), generator=generator)
    tgt[:, 0] = BOS
    return tgt


def hidden_states(model: Transformer, src: Tensor, src_lengths: Tensor, tgt: Tensor) -> Tensor:
    """Return hidden states for each position of `tgt` (B, T) after padded sources (B, S).

    An accelerated model computes packed sentences, the plain one padded sentences.
    """
    if not isinstance(model, FastTransformer):
        masks = padding_mask(src_lengths, src.size(1)), causal_mask(tgt.size(1))
        return model(src, masks[0], tgt, masks[1])
    sources = pack(src_lengths.tolist())
    targets = pack([tgt.size(1)] * len(tgt))
    ids = sources.unpad(src[:, : sources.longest])
    return targets.pad(model(ids, sources, tgt.flatten(), targets))  # (B, T, D)


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters; each parameter must have one."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return gradients


def exact_copies(*tensors: Tensor) -> list[Tensor]:
    """Return copies in float64 that collect gradients of their own."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_near(
    actual: Any, expected: Any, case: object = "", *, atol: float = 1e-5, rtol: float = 1e-5
) -> None:
    """Compare tensors, or sequences or mappings of tensors; a failure names `case`."""
    compare = torch.testing.assert_close
    compare(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{case}: {text}")


def assert_same_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: object = ""
) -> None:
    """Compare state dicts bit by bit; a failure names `case`."""
    assert_near(actual, expected, case, atol=0, rtol=0)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Draw sentences of 1 to 12 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


def tokenizer_config(**changes: Any) -> TokenizerConfig:
    """Return the settings of a tokenizer that needs only a few sentences."""
    return TokenizerConfig(**{"vocab_size": 330, **changes})


def train_sentencepiece(lines: Iterable[str] | None = None, **options: Any) -> bytes:
    """Train a SentencePiece model as other toolkits do; return the bytes of its file.

    By default, the text is `sentences(200)`.
    """
    model = io.BytesIO()
    settings = {"model_type": "bpe", "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200) if lines is None else lines),
        model_writer=model,
        **settings,
    )
    return model.getvalue()


def decode_by_steps(
    model: FastTransformer, src: Tensor, src_lengths: Tensor, tgt: Tensor
) -> Tensor:
    """Decode (B, T) token by token; return hidden states (B, T, D)."""
    cache = model.start(src, src_lengths)
    return torch.stack([model.step(column, cache) for column in tgt.T], dim=1)


def check_beams(model: FastTransformer, *, max_rows: int, seed: int = 0, case: object = "") -> None:
    """Compare each step with the plain model while beams are reordered and sentences join and end.

    A sentence has up to `max_rows` beams. Two sentences join, so that a column of the cache holds
    different positions for different rows.
    """
    draw = torch.Generator().manual_seed(seed)
    twin = plain(model)
    src, lengths = random_source([5, 20, 6, 1, 9])
    state = model.start(src[:3], lengths[:3])
    sentences = torch.arange(3)  # of each row
    tgt = torch.zeros(3, 40, dtype=torch.long)  # the decoder input of each row
    num_tokens = torch.zeros(3, dtype=torch.long)
    for step in range(40):
        tokens = torch.randint(4, VOCAB_SIZE, (len(tgt),), generator=draw)
        hidden = model.step(tokens, state)
        every_row = torch.arange(len(tgt))
        tgt[every_row, num_tokens] = tokens
        expected = hidden_states(twin, src[sentences], lengths[sentences], tgt[:, : step + 1])
        assert_near(hidden, expected[every_row, num_tokens], (case, step), atol=1e-4)
        if model.config.decoder is Decoder.attention:
            num_columns = state.target_cache.attention_mask.size(1)
            assert num_columns < 1.5 * (step + 1 + 4 * max_rows) + 32, (case, step)
        picks = []
        for sentence in sentences.unique():
            if step != 14 or sentence < 2:  # the other sentences end
                own_rows = (sentences == sentence).nonzero().squeeze(1)
                count = int(torch.randint(1, max_rows + 1, (), generator=draw))
                picks.append(own_rows[torch.randint(len(own_rows), (count,), generator=draw)])
        rows = torch.cat(picks)
        state.reorder(rows)
        sentences = sentences[rows]
        tgt = tgt[rows]
        num_tokens = num_tokens[rows] + 1
        # sentences that have ended leave the memory
        assert len(sentences.unique()) > 0.75 * len(state.source_bias)
        if step in (5, 18):
            joining = 3 if step == 5 else 4
            model.join(state, src[joining : joining + 1], lengths[joining : joining + 1])
            sentences = torch.cat([sentences, torch.tensor([joining])])
            tgt = nn.functional.pad(tgt, (0, 0, 0, 1))
            num_tokens = nn.functional.pad(num_tokens, (0, 1))
