"""Training, search and scoring on a simulated GPU: no tensors of two devices, few waits."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import GPU, Device, DeviceTensor, a_device, replaced
from searching import LENGTHS, TOKENIZER, decided_model, score_ids, source_rows, token_ids
from test_compiled import draw_pairs
from tiny import random_source, tiny_config
from torch import Tensor
from toy import call_before, write_data
from variants import MODERN

from nmt.config import DType, Optimizer, OptimizerConfig, Positions, SearchConfig, TrainConfig
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast.packing import PackedContext, attend_packed, pack
from nmt.runtime.distributed import World
from nmt.search.beam import BeamSearch
from nmt.search.request import SearchRequest
from nmt.search.search import search
from nmt.search.stepper import EnsembleStepper, ModelStepper
from nmt.training.batches import make_batch
from nmt.training.build import Run, build_run
from nmt.training.loss import Objective
from nmt.training.preflight import try_largest_batches

CPU = torch.device("cpu")
PAIRS = [(5, 4), (9, 9), (3, 8), (12, 2), (7, 7)]
RELATIVE: dict[str, Any] = {"positions": Positions.relative, "max_distance": 2}
SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 1}
# the settings of an update that take other ways through it
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": DType.float32, "activation_checkpointing": True},
    "rich": {
        "ema_decay": 0.9,
        "optimizer": OptimizerConfig(name=Optimizer.muon, max_grad_norm=1.0),
    },
    "float16": {"dtype": DType.float16},
    "twice": {
        "r_drop": 1.0,
        "guided_alignment": 0.1,
        "model": tiny_config(dropout=0.1, **SMALL),
        "dtype": DType.float32,
    },
    "modern": {"model": tiny_config(**MODERN, **SMALL)},
    "relative": {"model": tiny_config(**RELATIVE, **SMALL)},
}
PREFIXES = [[5, 6], *[[]] * (len(LENGTHS) - 1)]
# settings of a search, layers, and what some translations begin with: then of two models
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[int]] | None]] = {
    "greedy": ({"beam_size": 1}, {}, None),
    "two models": ({"beam_size": 4}, {}, PREFIXES),
    "all": ({"beam_size": 3, "coverage_penalty": 0.2, "alignment": True}, MODERN, None),
    "draws": ({"beam_size": 3, "sampling": True, "top_k": 9, "top_p": 0.9}, RELATIVE, None),
}


@pytest.fixture(scope="module")
def data_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of a few pairs."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer, PAIRS)
    return folder


def set_up(data_dir: Path, device: torch.device, **settings: Any) -> Run:
    settings = {"model": tiny_config(**SMALL)} | settings
    config = TrainConfig(
        data_dir=str(data_dir),
        run_dir=str(data_dir / "run"),
        max_tokens=20,
        tokens_per_update=100,
        num_threads=1,
        valid_bleu=False,
        compile=False,
        **settings,
    )
    return build_run(config, World(), device)


def losses(setup: Run) -> list[float]:
    """Make an update of several batches; return its loss and the validation loss."""
    (update,) = setup.sampler_at(0).plan_epoch(0)
    assert len(update.batches) > 2
    learner = setup.learner
    batches = setup.learner.batch_maker.make_batches(update)
    outcome = learner.update(update, batches, 0.01, is_stop_requested=False)
    return [outcome.loss_sum, setup.validation.compute_loss(learner.averaged_model)["valid_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["plain", "rich", "float16"],
        pytest.param(["twice", "modern", "relative"], marks=pytest.mark.slow),
    ],
)
def test_an_update_waits_for_the_device_once_and_validation_and_preflight_too(
    data_dir: Path, names: list[str]
) -> None:
    for name in names:
        settings = TRAININGS[name]
        expected = losses(set_up(data_dir, CPU, **settings))
        with a_device() as device:
            setup = set_up(data_dir, GPU, **settings)
            for parameter in setup.learner.model.parameters():
                assert isinstance(parameter, DeviceTensor)
            device.waits.clear()
            device_losses = losses(setup)
            assert device.waits == {
                "distributed.sum_over_ranks: from the device": 1,
                "validation.compute_loss: from the device": 1,
            }, name
            device.waits.clear()
            planned = setup.sampler_at(0).plan_epoch(0).pool_of(0)
            assert try_largest_batches(setup.learner, setup.samplers.values(), planned) == 1  # byte
            assert not device.waits, name
        # with half precision only the output layer is rounded alike
        if name != "twice":  # whose dropout is drawn by each device
            assert device_losses == pytest.approx(
                expected, rel=1e-6 if name == "plain" else 2e-3
            ), name


@pytest.mark.parametrize(
    "names", [["two models", "all"], pytest.param(["greedy", "draws"], marks=pytest.mark.slow)]
)
def test_a_step_of_search_waits_for_the_device_twice_at_most(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    source = random_source(LENGTHS)
    for name in names:
        settings, layers, prefixes = SEARCHES[name]
        config = SearchConfig(max_length_a=0.0, max_length_b=8, **settings)
        steppers = []
        for seed in range(2 if prefixes else 1):
            steppers.append(ModelStepper(decided_model(seed=seed, **SMALL, **layers)))
        request = SearchRequest(source_rows(source), config, prefixes or ())
        expected = search(EnsembleStepper(steppers), request, TOKENIZER)
        with a_device() as device, torch.inference_mode():
            for stepper in steppers:
                stepper.model.to(GPU)
                stepper.device = GPU
            device.waits.clear()
            waits = [0]
            ensemble = EnsembleStepper(steppers)

            def count_waits(*_: Any, device: Device = device, waits: list[int] = waits) -> None:
                waits.append(device.waits.total())

            call_before(monkeypatch, ensemble, "step", count_waits)
            hypotheses = search(ensemble, request, TOKENIZER)
        steps = np.diff(waits)
        assert steps[0] == 0, device.waits  # nor does the encoder
        assert len(steps) > 5
        assert steps.max() <= 2, (name, device.waits)
        assert token_ids(hypotheses) == token_ids(expected), name
        assert len({len(row[0].tokens) for row in hypotheses}) > 1  # some end earlier


@pytest.mark.slow
def test_sentences_join_a_search_on_the_device() -> None:
    config = SearchConfig(max_length_b=10, beam_size=3)

    def find(stepper: ModelStepper) -> dict[int, list[int]]:
        rows = source_rows(random_source(LENGTHS))
        beams = BeamSearch(stepper, SearchRequest(rows, config, n_best=1), TOKENIZER)
        tokens = {}
        later = iter([[], [5, 2], [], [4]])
        while beams.num_live:
            for sentence in beams.step():
                tokens[sentence] = beams.result(sentence)[0].tokens
            if more := next(later, []):
                beams.join(source_rows(random_source(more)))
        return tokens

    expected = find(ModelStepper(decided_model()))
    with a_device() as device, torch.inference_mode():
        stepper = ModelStepper(decided_model().to(GPU))
        stepper.device = GPU
        device.waits.clear()
        assert find(stepper) == expected
    allowed = {"beam._choose: from the device", "state.to_hypotheses: from the device"}
    assert set(device.waits) <= allowed


def test_scoring_waits_for_the_device_once_a_batch() -> None:
    draw = random.Random(0)
    rows = []
    targets = []
    for _ in range(6):
        rows.append(draw.choices(range(2, 22), k=draw.randint(1, 9)))
        targets.append(draw.choices(range(2, 22), k=draw.randint(1, 9)))
    config = SearchConfig(alignment=True)
    stepper = ModelStepper(decided_model())
    expected = score_ids(stepper, rows, targets, config, max_tokens=40)
    with a_device() as device:
        stepper = ModelStepper(decided_model().to(GPU))
        device.waits.clear()
        scored = score_ids(stepper, rows, targets, config, max_tokens=40)
    assert set(device.waits) == {"native._score_batch: from the device"}
    assert 1 < device.waits.total() < len(rows)
    for hypothesis, expected_hypothesis in zip(scored, expected, strict=True):
        assert hypothesis.alignment == expected_hypothesis.alignment
        assert hypothesis.score == pytest.approx(expected_hypothesis.score, rel=1e-5)


def test_the_device_refuses_what_a_gpu_refuses_and_counts_what_waits() -> None:
    numbers = torch.arange(4.0)
    with a_device() as device:
        x = numbers.pin_memory().to(GPU, non_blocking=True)
        assert not device.waits
        for wrong in (lambda: x + numbers, lambda: x.index_select(0, torch.tensor([1]))):
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()
        waiting: dict[str, Any] = {
            "_local_scalar_dense": lambda: bool((x > 1).any()),
            "nonzero": lambda: x.nonzero(),
            "index": lambda: x[x > 1],
            "index_put_": lambda: x.__setitem__(x > 1, 0.5),
            "equal": lambda: torch.equal(x, x),
            "unique_consecutive": lambda: torch.unique_consecutive(x),
            "bincount": lambda: torch.bincount(x.long()),
            "from the device": lambda: x.tolist(),
            "to the device": lambda: torch.tensor([1.0], device=GPU),
        }
        for name, call in waiting.items():
            for mode in (torch.no_grad, torch.inference_mode):
                device.waits.clear()
                with mode():
                    call()
                assert device.waits == {f"outside nmt: {name}": 1}
        assert (x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 1.5, 1.5]


def test_autocast_on_a_gpu_rounds_only_matrix_multiplications(tokenizer: Tokenizer) -> None:
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1}
    model = decided_model(vocab_size=300, **dropouts).train().requires_grad_(False)
    batch = make_batch(draw_pairs(random.Random(0), 5, 9), tokenizer)
    dtypes: dict[str, set[torch.dtype]] = defaultdict(set)  # of the results of each operation

    def see(name: str, result: Any) -> None:
        replaced(result, Tensor, lambda x: dtypes[name].add(x.dtype))

    with a_device(has_autograd=False) as device, torch.no_grad():
        objective = Objective(model.to(GPU), smoothing=0.1)
        device_batch = batch.to(GPU)
        device.see = see
        with torch.autocast("cuda", dtype=torch.bfloat16):
            sums = objective(device_batch)
    assert sums[0].dtype is sums[1].dtype is torch.float32
    for name in ("native_layer_norm", "_softmax", "_safe_softmax", "scatter_add_"):
        assert dtypes[name] == {torch.float32}, name
    for name in ("mm", "addmm", "relu"):
        assert dtypes[name] == {torch.bfloat16}, name


def test_cudnn_which_plans_for_every_shape_is_not_asked_for_attention() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    pack([3, 2]).to(CPU)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with a_device():
        pack([3, 2]).to(GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_over_variable_lengths_is_called_as_torch_declares_it() -> None:
    """As 2.11, 2.12 and 2.13 do; the installed one may have more parameters."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(varlen.varlen_attn)
    if "window_size" not in signature.parameters:
        pytest.skip("torch 2.10 names causality otherwise")
    declared = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    calls: list[dict[str, Any]] = []

    def flash(*args: Any, **named: Any) -> Tensor:
        calls.append(signature.bind(*args, **named).arguments)
        return args[0]  # type: ignore[no-any-return]

    sides = replace(pack([3, 2]), flash_attention=flash)
    x = torch.zeros(5, 2, 8, dtype=torch.bfloat16)
    for is_causal, window in ((True, (-1, 0)), (False, (-1, -1))):
        attend_packed(x, x, x, PackedContext.of(sides, sides, is_causal=is_causal))
        assert list(calls[-1])[:7] == declared
        assert set(calls[-1]) == {*declared, "window_size"}
        assert calls[-1]["window_size"] == window
        assert calls[-1]["cu_seq_q"].dtype is torch.int32
        assert (calls[-1]["max_q"], calls[-1]["max_k"]) == (3, 3)
