"""Decoders with SSRUs: the formula, the loop over packed sentences, search, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import random_model
from searching import LENGTHS, assert_same, config, decided_model, find, score_ids, teacher_forced
from tiny import BOS, assert_near, hidden_states, plain, random_source, random_target, tiny_model
from torch import Tensor

from nmt import Translator
from nmt.config import AttentionKind, Decoder, ExportFormat, Positions, Theme
from nmt.data.tokenizer import Tokenizer
from nmt.errors import ConfigError
from nmt.export.export_model import find_unsupported
from nmt.model.fast.packing import pack
from nmt.model.fast.ssru import register_operators, scan
from nmt.model.ssru import Ssru
from nmt.model.transformer import DecoderLayer
from nmt.search.stepper import EnsembleStepper, ModelStepper
from nmt.translate.attention import attention_shape

SSRU = {"decoder": Decoder.ssru}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"beam_size": 1},
    "beam": {"beam_size": 4, "alignment": True},
    "draws": {"beam_size": 3, "sampling": True, "temperature": 1.3},
}


def loop_naively(gates: Tensor, candidates: Tensor) -> Tensor:
    """Compute the states (B, T, D) one number at a time."""
    states = torch.zeros_like(candidates)
    for b, t, d in torch.cartesian_prod(*[torch.arange(n) for n in gates.shape]).tolist():
        previous = float(states[b, t - 1, d]) if t > 0 else 0.0
        gate = float(gates[b, t, d])
        states[b, t, d] = gate * previous + (1 - gate) * float(candidates[b, t, d])
    return states


@torch.no_grad()
def test_an_ssru_follows_its_formula() -> None:
    unit = Ssru(6).double()
    unit.forget_gate.bias.uniform_(-1, 1)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    gates = 1 / (1 + torch.exp(-(x @ unit.forget_gate.weight.T + unit.forget_gate.bias)))
    states = loop_naively(gates, x @ unit.candidate.weight.T)
    assert_near(unit(x, None), states.clamp(min=0), atol=1e-12)


def test_the_operator_equals_a_naive_loop_and_has_its_gradients() -> None:
    register_operators()
    gates = torch.rand(2, 9, 3)
    candidates = torch.randn(2, 9, 3)
    exact = loop_naively(gates.double(), candidates.double())
    assert_near(scan(gates, candidates).double(), exact, atol=1e-6, rtol=0)
    inputs = (gates[:1, :4].double().requires_grad_(), candidates[:1, :4].double().requires_grad_())
    torch.autograd.gradcheck(scan, inputs)


THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from nmt.model.fast.ssru import register_operators

barrier = threading.Barrier(8)

def register(_: int) -> None:
    barrier.wait()
    register_operators()

with ThreadPoolExecutor(8) as pool:
    list(pool.map(register, range(8)))
"""


@pytest.mark.slow
def test_threads_register_the_operators_once() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True)


@pytest.mark.slow
def test_the_operators_declare_what_torch_needs_to_compile_them() -> None:
    register_operators()
    inputs = [torch.rand(2, 5, 3) for _ in range(4)]
    operators = torch.ops.nmt
    torch.library.opcheck(operators.ssru_scan, [x.requires_grad_() for x in inputs[:2]])
    torch.library.opcheck(operators.ssru_scan_backward, [x.detach() for x in inputs])


def test_packed_targets_of_different_lengths_do_not_affect_each_other() -> None:
    model = tiny_model(**SSRU)
    twin = plain(model)
    src, src_lengths = random_source([4, 7, 2])
    tgt = random_target(3, 6)
    tgt_lengths = [2, 6, 3]
    sources = pack(src_lengths.tolist())
    targets = pack(tgt_lengths)
    hidden = model(sources.unpad(src), sources, targets.unpad(tgt), targets)
    hidden_by_target = hidden.split(tgt_lengths)
    for row, length in enumerate(tgt_lengths):
        pair = slice(row, row + 1)
        expected = hidden_states(twin, src[pair], src_lengths[pair], tgt[pair, :length])
        assert_near(hidden_by_target[row], expected[0], row)


@torch.no_grad()
def test_decoding_starts_from_zeros_instead_of_the_embedding_of_bos() -> None:
    model = plain(tiny_model(**SSRU))
    inputs = [*random_source([4]), random_target(1, 3)]
    expected = hidden_states(model, *inputs)
    model.embedding.weight[BOS] += 1.0
    assert_near(hidden_states(model, *inputs), expected, atol=0, rtol=0)


@torch.no_grad()
def test_every_search_gives_hypotheses_the_scores_of_the_plain_model() -> None:
    model = decided_model(**SSRU)
    stepper = ModelStepper(model)
    source = random_source(LENGTHS[:6])
    prefixes = [[5, 9], []] * 3
    num_finished = 0
    for name, mode in MODES.items():
        settings = config(a=1.0, b=8, **mode)
        results = find(stepper, source, settings, prefixes=prefixes)
        for row, hypotheses in enumerate(results):
            for h in hypotheses:
                expected = teacher_forced(model, source, row, h.tokens)
                assert h.token_log_probs == pytest.approx(expected, abs=1e-4), (name, row)
            finished = [h for h in hypotheses if h.finished]
            num_finished += len(finished)
            rows = [source[0][row, : source[1][row] - 1].tolist()] * len(finished)
            rescored = score_ids(stepper, rows, [h.tokens[:-1] for h in finished], settings)
            assert_same(rescored, finished, tolerance=1e-4)
    assert num_finished > 0


@torch.no_grad()
def test_an_ensemble_of_both_decoders_averages_their_probabilities() -> None:
    models = [decided_model(**SSRU), decided_model(seed=2)]
    source = random_source(LENGTHS[:2])
    stepper = EnsembleStepper([ModelStepper(model) for model in models])
    for row, hypotheses in enumerate(find(stepper, source, config(4, a=1.0, b=8))):
        for h in hypotheses:
            log_probs = torch.tensor([teacher_forced(m, source, row, h.tokens) for m in models])
            expected = log_probs.exp().mean(dim=0).log().tolist()
            assert h.token_log_probs == pytest.approx(expected, abs=1e-4), row


@torch.no_grad()
def test_a_model_with_bfloat16_weights_computes_nearly_the_same() -> None:
    model = decided_model(**SSRU)
    source = random_source(LENGTHS[:6])
    tgt = random_target(6, 5)
    expected = hidden_states(model, *source, tgt)
    rounded = decided_model(**SSRU).bfloat16()
    for twin in (rounded, plain(rounded)):
        assert_near(hidden_states(twin, *source, tgt), expected.bfloat16(), atol=0.1)
    for row, [h] in enumerate(find(ModelStepper(rounded), source, config(1))):
        log_probs = teacher_forced(model, source, row, h.tokens)
        assert h.token_log_probs == pytest.approx(log_probs, abs=0.5), row


def test_a_model_folder_translates_and_shows_the_attention_that_it_has(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = random_model(tmp_path / "model", tokenizer, **SSRU)
    translator = Translator.load(folder, device="cpu", backend="native")
    lines = ["the green house", "a tree", "the small tree sees a green house"]
    together = translator.translate(lines)
    assert together == [translator.translate([line])[0] for line in lines]
    [pair] = translator.attention(lines[:1], together[:1])
    assert pair.decoder.shape[0] == 0
    assert_near(pair.cross.sum(dim=-1), torch.ones(pair.cross.shape[:-1]))
    assert sorted(pair.as_json()["maps"]) == ["cross", "encoder"]
    shape = {"encoder": 2, "decoder": 0, "cross": 2, "heads": 4}
    assert attention_shape(translator.backend) == shape


def test_positions_of_self_attention_act_in_the_encoder_only() -> None:
    for positions in (Positions.relative, Positions.rotary, Positions.alibi):
        model = tiny_model(positions=positions, qk_norm=True, **SSRU)
        for layer in model.decoder_layers:
            assert isinstance(layer, DecoderLayer)
            names = {name.split(".")[0] for name, _ in layer.named_parameters()}
            assert "self_attention" not in names
            assert layer.cross_attention.query_norm is None


def test_formats_without_an_ssru_refuse_it_by_name() -> None:
    for export_format in (
        ExportFormat.ctranslate2,
        ExportFormat.huggingface,
        ExportFormat.argos,
    ):
        unsupported = find_unsupported(tiny_model(**SSRU).config, export_format)
        assert "model.decoder=ssru (only attention)" in unsupported, export_format
    config = tiny_model(num_kv_heads=2, head_size=6, **SSRU).config
    assert find_unsupported(config, ExportFormat.onnx) == [
        "model.head_size=6 (only null)",
        "model.num_kv_heads=2 (only null)",
    ]


def test_the_attention_of_a_decoder_without_it_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from nmt.visualize import attention_figure  # matplotlib takes a second
    from nmt.visualize.style import Style

    folder = random_model(tmp_path / "model", tokenizer, **SSRU)
    translator = Translator.load(folder, device="cpu", backend="native")
    [pair] = translator.attention(["a tree"], ["the tree"])
    with pytest.raises(ConfigError, match="kind=decoder: the decoder of this model has no self"):
        attention_figure.attention_figure(
            pair, Style(Theme.light), kind=AttentionKind.decoder, layers=[], heads=[]
        )
