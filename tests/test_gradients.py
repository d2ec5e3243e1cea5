"""One update is one update, however its sentences are cut into batches.

The oracle is the mean over all target tokens of the sentences' own losses, one unpadded
sentence at a time, by the plain model and torch's cross-entropy over whole logits in float64.
"""

from __future__ import annotations

import copy
import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    assert_near,
    assert_same_tensors,
    hidden_states,
    plain,
    tiny_config,
    tiny_model,
)
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from toy import make_run, write_data

from nmt.config import DType, Optimizer, OptimizerConfig, Schedule
from nmt.data.batch import MICRO_BATCH_TOKENS, batch_cost
from nmt.data.batching import UpdatePlan
from nmt.data.tokenizer import Tokenizer, TokenizerPair
from nmt.data.vocabulary import find_symbol_ids, load_with_symbols
from nmt.model.fast.layers import FastLinear
from nmt.runtime.distributed import World
from nmt.training import learner as learner_module
from nmt.training.batches import BatchMaker
from nmt.training.checkpoints import TrainerState
from nmt.training.learner import Learner, UpdateResult
from nmt.training.loss import CUT_PROB, cut_embeddings, r_drop_loss
from nmt.training.train import Trainer

LAYERS = importlib.import_module("nmt.model.fast.layers")

LENGTHS = [(1, 1), (40, 2), (2, 45), (3, 3), (7, 1), (1, 30), (12, 12), (5, 1), (60, 60), (2, 2)]
CUTS = {
    "one batch": [range(10)],
    "two": [range(9), range(9, 10)],
    "unequal": [[8], [0, 3, 4, 7, 9], [1, 2, 5, 6]],
    "one by one": [[i] for i in range(10)],
}


@pytest.fixture(scope="module")
def data_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of ten sentence pairs of very unequal length."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, tokenizer, LENGTHS)
    return folder


def make_update(batches: list[Any]) -> UpdatePlan:
    """Make an update of one rank from lists of pair numbers."""
    rows = list(map(np.array, batches))
    num_src_tokens, num_tokens = np.array(LENGTHS)[np.concatenate(rows)].sum(0).tolist()
    return UpdatePlan(rows, num_tokens=num_tokens, num_src_tokens=num_src_tokens)


def accumulate(learner: Learner, update: UpdatePlan) -> Tensor:
    """Add up the gradient of an update."""
    return learner.accumulate_gradient(update, learner.batch_maker.make_batches(update))


def change(
    learner: Learner, update: UpdatePlan, rate: float = 0.01, *, stop: bool = False
) -> UpdateResult:
    """Make an update."""
    return learner.update(
        update, learner.batch_maker.make_batches(update), rate, is_stop_requested=stop
    )


def exact_gradient(learner: Learner, rows: list[int]) -> dict[str, Tensor]:
    """Return the gradient of the pairs by the oracle."""
    model = plain(learner.model).double().eval()
    tokenizer = learner.batch_maker.tokenizers
    total: Any = 0.0
    num_tokens = 0
    for row in rows:
        src, tgt = learner.batch_maker.data[row]
        source = torch.tensor([[*src.tolist(), tokenizer.eos_id]])
        tgt_in = torch.tensor([[tokenizer.bos_id, *tgt.tolist()]])
        tgt_out = torch.tensor([*tgt.tolist(), tokenizer.eos_id])
        hidden = hidden_states(model, source, torch.tensor([source.size(1)]), tgt_in)
        options = {"label_smoothing": learner.config.label_smoothing, "reduction": "sum"}
        logits = model.logits(hidden)[0]
        total = total + torch.nn.functional.cross_entropy(logits, tgt_out, **options)
        num_tokens += len(tgt_out)
    (total / num_tokens).backward()
    return gradient(model)


def without_dropout(learner: Learner) -> None:
    """Let the model drop nothing from now on."""
    for module in learner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def gradient(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of the accumulated gradient."""
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def gradient_norm(gradients: dict[str, Tensor]) -> float:
    """Return the norm over all weights."""
    return float(parameters_to_vector(gradients.values()).norm())


def assert_close(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Compare gradients to 1e-6 of their norm, and of 1 in each element."""
    assert gradients.keys() == exact.keys()
    expected = parameters_to_vector(exact.values())
    difference = parameters_to_vector(map(gradients.__getitem__, exact)) - expected
    assert expected.norm() > 0.1
    assert difference.norm() < 1e-6 * expected.norm()
    assert difference.abs().max() < 1e-6


def test_gradients_are_the_mean_over_all_target_tokens_however_cut(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_run(data_dir, tmp_path).learner
    exact = exact_gradient(learner, list(range(10)))
    sums = []
    for name, cut in CUTS.items():
        for max_tokens in (MICRO_BATCH_TOKENS, 40):  # the first is more than all pairs have
            monkeypatch.setattr("nmt.training.batches.MICRO_BATCH_TOKENS", max_tokens)
            sums.append(accumulate(learner, make_update(cut)))
            assert len(sums[-1]) == len(cut), name
            assert_close(gradient(learner.model), exact)
            assert_near(sums[-1].sum(0), sums[0].sum(0), (name, max_tokens))
            learner.zero_grad()


def test_the_mean_of_the_gradients_of_ranks_is_the_gradient_of_their_update(
    data_dir: Path, tmp_path: Path
) -> None:
    learner = make_run(data_dir, tmp_path, World(size=3)).learner
    exact = exact_gradient(learner, list(range(10)))
    update = make_update(CUTS["unequal"])
    for batch in update.batches:  # the only one of a rank
        accumulate(learner, replace(update, batches=[batch]))
    mean = {name: total / 3 for name, total in gradient(learner.model).items()}
    assert_close(mean, exact)


@pytest.mark.slow
def test_the_state_of_every_optimizer_can_be_loaded_again(data_dir: Path, tmp_path: Path) -> None:
    for name in Optimizer:
        optimizer = OptimizerConfig(name=name, schedule=Schedule.constant)
        learner = make_run(data_dir, tmp_path, optimizer=optimizer).learner
        update = make_update(CUTS["one batch"])
        change(learner, update)
        weights = learner.weights_to_save()
        state = copy.deepcopy(learner.state_dict())
        resumed = make_run(data_dir, tmp_path, optimizer=optimizer).learner
        resumed.load_state_dict(state, weights)
        assert change(learner, update).loss_sum == change(resumed, update).loss_sum, name
        assert_near(resumed.weights_to_save(), learner.weights_to_save(), name, atol=1e-6)


def test_a_learner_that_loads_the_state_of_another_goes_on_alike(
    data_dir: Path, tmp_path: Path
) -> None:
    update = make_update(CUTS["one batch"])
    schedule_free = OptimizerConfig(name=Optimizer.schedule_free, schedule=Schedule.constant)
    cases: list[dict[str, Any]] = [{}, {"ema_decay": 0.9}, {"optimizer": schedule_free}]
    for changes in cases:
        learner = make_run(data_dir, tmp_path, **changes).learner
        for _ in range(2):
            change(learner, update)
        state, weights = copy.deepcopy((learner.state_dict(), learner.weights_to_save()))
        resumed = make_run(data_dir, tmp_path, **changes).learner
        resumed.load_state_dict(state, weights)
        change(learner, update)
        change(resumed, update)
        assert_same_tensors(resumed.model.state_dict(), learner.model.state_dict(), changes)
        assert_same_tensors(resumed.weights_to_save(), learner.weights_to_save(), changes)


def test_a_gradient_that_is_not_finite_changes_no_weight(data_dir: Path, tmp_path: Path) -> None:
    learner = make_run(data_dir, tmp_path).learner
    learner.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    weights = copy.deepcopy(learner.model.state_dict())
    result = change(learner, make_update(CUTS["one batch"]))
    assert math.isfinite(result.loss)
    assert not result.is_finite
    assert_same_tensors(learner.model.state_dict(), weights)


def test_only_the_largest_micro_batch_runs_where_memory_is_measured(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.training.batches.MICRO_BATCH_TOKENS", 20)
    learner = make_run(data_dir, tmp_path).learner
    batch_maker = learner.batch_maker
    costs: list[int] = []  # of the micro-batches that run

    def record(rows: Any) -> Any:
        costs.append(batch_cost(batch_maker.lengths[rows]))
        return BatchMaker.make_micro_batch(batch_maker, rows)

    monkeypatch.setattr(batch_maker, "make_micro_batch", record)
    rows = np.argsort(batch_maker.lengths.max(axis=1))[-7:]  # the longest pair is the last one
    learner.run_without_update(rows)
    all_costs = list(costs)
    costs.clear()
    learner.run_without_update(rows, only_largest=True)
    assert all_costs[0] < max(all_costs)
    assert costs == [max(all_costs)]


def test_schedule_free_validates_and_saves_the_average_and_trains_other_weights(
    data_dir: Path, tmp_path: Path
) -> None:
    schedule_free = OptimizerConfig(name=Optimizer.schedule_free, schedule=Schedule.constant)
    for dtype in (DType.float32, DType.bfloat16):
        settings = {"optimizer": schedule_free, "dtype": dtype}
        learner = make_run(data_dir, tmp_path, **settings).learner
        update = make_update(CUTS["one batch"])
        bases = []  # z after each update
        for _ in range(2):
            change(learner, update)
            state = learner.optimizers[0].state
            bases.append(
                {name: state[p]["z"].clone() for name, p in learner.model.named_parameters()}
            )
        trained = copy.deepcopy(learner.model)
        averaged = learner.model_to_validate()
        for name, average in averaged.named_parameters():
            mean = (bases[0][name] + bases[1][name]) / 2  # of equal learning rates
            assert_near(average, mean, name, atol=1e-6)
        assert_same_tensors(learner.weights_to_save(), averaged.state_dict())
        assert_same_tensors(learner.model.state_dict(), trained.state_dict())
        assert_same_tensors(learner.state_dict()["trained"], trained.state_dict())
        fresh_model = make_run(data_dir, tmp_path).learner.model
        fresh_model.load_state_dict(averaged.state_dict())
        batch = learner.batch_maker.make_micro_batch(np.arange(10))
        inputs = (batch.src, batch.src_packing, batch.tgt_in, batch.tgt_packing)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = averaged.eval()(*inputs)
            # no weights that were rounded before they were averaged
            assert torch.equal(hidden, fresh_model.eval()(*inputs)), dtype


@pytest.mark.slow
def test_two_passes_of_r_drop_count_once_and_draw_dropout_of_their_own(
    data_dir: Path, tmp_path: Path
) -> None:
    dropping = {"r_drop": 3.0, "model": tiny_config(dropout=0.3)}
    learner = make_run(data_dir, tmp_path, **dropping).learner
    update = make_update(CUTS["unequal"])

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(accumulate(learner, update).sum(0)[0])

    first_loss = loss(1)
    assert loss(2) != first_loss
    assert loss(1) == first_loss
    learner.objective.softmax_loss = r_drop_loss(0.0)
    assert first_loss > loss(1) + 1  # the passes differ
    without_dropout(learner)
    exact = exact_gradient(learner, list(range(10)))
    learner.objective.softmax_loss = r_drop_loss(3.0)
    learner.zero_grad()
    assert loss(1) > 0
    assert_close(gradient(learner.model), exact)
    usual_update = change(make_run(data_dir, tmp_path).learner, update)
    assert change(learner, update).flops == 2 * usual_update.flops


def test_the_second_pass_of_simcut_lacks_some_embeddings(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_run(data_dir, tmp_path, simcut=3.0).learner
    without_dropout(learner)
    model = learner.objective.model
    ids = torch.randint(5, model.embedding.num_embeddings, (4000,))
    uncut_ids = learner.objective.uncut_ids
    eos_id, bos_id = uncut_ids[model.embedding].tolist()
    batch = learner.batch_maker.make_micro_batch(np.arange(10))
    ends = batch.src[batch.lengths[:, 0].cumsum() - 1]
    starts = batch.tgt_in[batch.lengths[:, 1].cumsum() - batch.lengths[:, 1]]
    assert set(ends.tolist()) == {eos_id}
    assert set(starts.tolist()) == {bos_id}
    ids[::4] = eos_id
    ids[1::4] = bos_id
    with cut_embeddings(uncut_ids):
        is_cut = (model.embedding(ids) == 0).all(dim=1)  # (N,)
    assert not is_cut[::4].any()
    assert not is_cut[1::4].any()
    is_word = (ids != eos_id) & (ids != bos_id)
    share = float(is_cut[is_word].float().mean())
    assert share == pytest.approx(CUT_PROB, abs=0.015)
    assert torch.equal(model.embedding(ids), model.embedding.weight[ids])  # not after the block

    update = make_update(CUTS["unequal"])
    exact = exact_gradient(learner, list(range(10)))
    monkeypatch.setattr("nmt.training.loss.CUT_PROB", 0.0)
    loss_without_cut = accumulate(learner, update).sum(0)[0]
    assert_close(gradient(learner.model), exact)  # the KL divergence and its gradient are 0
    monkeypatch.setattr("nmt.training.loss.CUT_PROB", 0.3)
    assert accumulate(learner, update).sum(0)[0] > loss_without_cut + 0.1
    usual_update = change(make_run(data_dir, tmp_path).learner, update)
    assert change(learner, update).flops == 2 * usual_update.flops


def test_simcut_cuts_no_tags_and_other_ids_on_each_side_of_two_vocabularies(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_with_symbols(data_dir / "tokenizer.model", ["<2de>", "<sep>"])
    symbol_ids = find_symbol_ids(tokenizer)
    assert [tokenizer.all_pieces()[i] for i in symbol_ids] == ["<2de>", "<sep>"]
    eos_id, bos_id = tokenizer.eos_id, tokenizer.bos_id
    model = tiny_model(vocab_size=40)
    uncut_ids = learner_module.find_uncut_ids(model, tokenizer)
    assert uncut_ids[model.embedding].tolist() == [eos_id, *symbol_ids, bos_id, *symbol_ids]

    other_tokenizer = Tokenizer.load(data_dir / "tokenizer.model")  # without symbols
    tokenizers = TokenizerPair(tokenizer, other_tokenizer)
    model = tiny_model(vocab_size=40, src_vocab_size=30)
    assert model.src_embedding is not None
    uncut_ids = learner_module.find_uncut_ids(model, tokenizers)
    assert uncut_ids[model.src_embedding].tolist() == [eos_id, *symbol_ids]
    assert uncut_ids[model.embedding].tolist() == [bos_id]

    ids = torch.arange(30).repeat(400)
    with cut_embeddings(
        {model.src_embedding: torch.tensor([7]), model.embedding: torch.tensor([9, 11])}
    ):
        is_cut_in_source = (model.src_embedding(ids) == 0).all(dim=1).view(400, 30).any(dim=0)
        is_cut_in_target = (model.embedding(ids) == 0).all(dim=1).view(400, 30).any(dim=0)
    assert (~is_cut_in_source).nonzero().flatten().tolist() == [7]
    assert (~is_cut_in_target).nonzero().flatten().tolist() == [9, 11]


def test_nothing_is_compiled_where_the_whole_model_would_lack_the_cuts_of_simcut(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = []
    monkeypatch.setattr(
        learner_module, "make_compiler", lambda choice, device: choices.append(choice)
    )
    for number, changes in enumerate(
        [
            {"simcut": 1.0},  # compiled by layer, outside of the embeddings
            {"activation_checkpointing": True},
            {"simcut": 1.0, "activation_checkpointing": True},
        ]
    ):
        make_run(data_dir, tmp_path / str(number), **changes)
    assert choices == [None, None, False]


def test_an_update_reports_the_norm_before_clipping_and_leaves_no_gradient_behind(
    data_dir: Path, tmp_path: Path
) -> None:
    clipped = OptimizerConfig(max_grad_norm=1e-3)
    learner = make_run(data_dir, tmp_path, optimizer=clipped).learner
    exact = exact_gradient(learner, list(range(10)))
    first = change(learner, make_update(CUTS["two"]), 0.0)
    second = change(learner, make_update(CUTS["two"]), 0.0)
    assert gradient(learner.model) == {}
    assert first.gradient_norm == pytest.approx(gradient_norm(exact), rel=1e-5)
    assert first.gradient_norm == second.gradient_norm > 0
    assert first.loss_sum == second.loss_sum


def test_an_update_steps_with_the_rate_of_its_number(data_dir: Path, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(warmup_steps=4)
    setup = make_run(data_dir, tmp_path, optimizer=optimizer)
    rates = []
    for update in range(3):
        run = Trainer(setup, TrainerState(num_updates=update), signals=[])
        work = make_update([range(10)])
        run.train_update(work, setup.learner.batch_maker.make_batches(work))
        rates.append(setup.learner.optimizers[0].param_groups[0]["lr"])
        run.metrics_writer.close()
    peak = (16 * 4) ** -0.5
    assert rates == pytest.approx([peak / 4, peak / 2, peak * 3 / 4])


# --- half precision


@pytest.mark.slow
def test_half_precision_rounds_gradients_but_loses_none(data_dir: Path, tmp_path: Path) -> None:
    for dtype, rounding in ((DType.bfloat16, 2.0**-8), (DType.float16, 2.0**-11)):
        learner = make_run(data_dir, tmp_path, dtype=dtype).learner
        for parameter in learner.model.parameters():
            assert parameter.dtype is torch.float32
        # one token of a million: without a scale most gradients would be 0 in float16
        update = replace(make_update(CUTS["unequal"]), num_tokens=10**6)
        accumulate(learner, update)
        learner.scaler.unscale_(learner.optimizers[0])
        num_tokens = int(np.array(LENGTHS)[:, 1].sum())
        for name, exact in exact_gradient(learner, list(range(10))).items():
            expected = exact * (num_tokens / 10**6)
            rounded = gradient(learner.model)[name]
            # the bias of keys has no gradient, softmax takes it out: only rounding is left there
            limit = 60 * rounding * (expected.norm() + 1e-2 * num_tokens / 10**6)
            assert (rounded - expected).norm() < limit, (dtype, name)
        assert learner.scaler.is_enabled() == (dtype is DType.float16)


@pytest.mark.parametrize("reordered", [0, 1 << 18])  # minimum number of elements
def test_weights_are_rounded_once_an_update_and_again_when_it_changed_them(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reordered: int
) -> None:
    monkeypatch.setattr(LAYERS, "_MIN_REORDERED_WEIGHT", reordered)
    learner = make_run(data_dir, tmp_path, dtype=DType.bfloat16).learner
    update = make_update(CUTS["two"])
    layers = [m for m in learner.model.modules() if isinstance(m, FastLinear)]
    if layers[0].rounded_weights is None:
        pytest.skip("torch has no linear layers of oneDNN here")

    def copies() -> list[Tensor]:
        tensors: list[Tensor] = []
        for layer in layers:
            for block in layer.rounded_weights.values():
                tensors += [block.weight, block.transposed]
        return tensors

    change(learner, update)
    old_copies = copies()
    accumulate(learner, update)
    first_gradient = gradient(learner.model)
    new_copies = copies()
    assert len(old_copies) == 2 * (len(layers) + 2)  # cross-attention has two blocks
    for old, new in zip(old_copies, new_copies, strict=True):
        assert old is not new
        assert new.is_mkldnn == (new.numel() >= reordered)
    learner.zero_grad()
    accumulate(learner, update)
    assert list(map(id, copies())) == list(map(id, new_copies))
    learner.zero_grad()
    for layer in layers:
        layer.rounded_weights = {}
    accumulate(learner, update)
    assert_same_tensors(gradient(learner.model), first_gradient)


def test_a_run_changes_to_float16_and_back(data_dir: Path, tmp_path: Path) -> None:
    halves = make_run(data_dir, tmp_path, dtype=DType.float16).learner
    full = make_run(data_dir, tmp_path).learner
    update = make_update(CUTS["two"])
    change(halves, update)
    for learner, saved_from in ((halves, full), (full, halves), (halves, halves)):
        learner.load_state_dict(saved_from.state_dict(), saved_from.averaged_model.state_dict())
        assert change(learner, update).is_finite
