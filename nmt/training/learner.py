"""Updates of the weights: accumulate gradients over micro-batches and ranks, then step.

Each rank runs some of the batches of an update. It divides each batch into micro-batches, and runs
one of them at a time. So the argument `batches` of a method has a list of micro-batches for each
batch of this rank.

All ranks must take part in the exchange of gradients. A rank without a batch therefore runs a
filler, a batch whose loss and gradient do not count (see `FILLER_ROWS`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmt.config import Adapter, DType, Optimizer, Sharding, TrainConfig
from nmt.data import Rows
from nmt.data.batch import batch_cost
from nmt.data.batching import UpdatePlan
from nmt.data.tokenizer import Tokenizers
from nmt.data.vocabulary import find_symbol_ids
from nmt.errors import ModelError, to_one_line
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import cache_rounded_weights, is_bfloat16_faster
from nmt.model.fast.transfer import to_device
from nmt.runtime.distributed import World, find_dtype, gather, sum_over_ranks
from nmt.training.adapters import merged_state_dict
from nmt.training.batches import FILLER_ROWS, Batch, BatchMaker
from nmt.training.compiled import make_compiler
from nmt.training.costs import count_training_flops, measure_flops_per_second
from nmt.training.loss import Objective
from nmt.training.optimizer import (
    ScheduleFree,
    WeightAverage,
    clip_gradient,
    make_optimizers,
)

if TYPE_CHECKING:
    from nmt.training.sharding import Sharded


@dataclass(frozen=True)
class UpdateResult:
    """Statistics of an update. They cover all ranks, except for `batch_losses`."""

    loss_sum: float  # smoothed loss in nats, summed over target tokens
    nll_sum: float  # negative log-likelihood in nats, summed over target tokens
    gradient_norm: float  # norm of the gradient before clipping
    flops: float  # floating-point operations of the model on non-padding tokens
    num_positions: float  # number of source and target tokens of all batches, with padding
    num_tokens: int  # number of target tokens without padding
    num_src_tokens: int  # number of source tokens without padding
    is_stop_requested: bool  # whether any rank has received a signal to stop
    batch_losses: Tensor  # summed loss of each batch of this rank, (batches,)

    @property
    def loss(self) -> float:
        """The smoothed loss in nats per target token."""
        return self.loss_sum / self.num_tokens

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite; otherwise the weights were not changed."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)


def choose_training_dtype(choice: DType, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix multiplications in training for the setting `dtype`.

    `auto` is bfloat16 on the CPUs that train faster with it, and on GPUs that support it. Raises
    `DeviceError` if the device does not support `choice`.
    """
    if choice is DType.auto and device.type == "cpu" and is_bfloat16_faster():
        return torch.bfloat16
    return find_dtype(choice, device)


def find_uncut_ids(model: FastTransformer, tokenizers: Tokenizers) -> dict[nn.Module, Tensor]:
    """Return the ids of tokens that SimCut never cuts, keyed by the embedding of the tokens.

    They are EOS of sources and BOS of targets, as in the code of Gao et al. (2022), and symbols
    such as language tags. An embedding of both sides has the ids of both sides.
    """
    src_ids = [tokenizers.src.eos_id, *find_symbol_ids(tokenizers.src)]
    tgt_ids = [tokenizers.tgt.bos_id, *find_symbol_ids(tokenizers.tgt)]
    device = model.embedding.weight.device
    if model.src_embedding is None:
        return {model.embedding: torch.tensor(src_ids + tgt_ids, device=device)}
    return {
        model.src_embedding: torch.tensor(src_ids, device=device),
        model.embedding: torch.tensor(tgt_ids, device=device),
    }


class Learner:
    """Trains a model on one rank, with its optimizers, its average and its loss."""

    def __init__(
        self,
        model: FastTransformer,
        config: TrainConfig,
        batch_maker: BatchMaker,
        world: World,
        device: torch.device,
    ) -> None:
        self.model = model
        self.config = config
        self.batch_maker = batch_maker
        self.world = world
        self.device = device
        self.vocab_size = batch_maker.tokenizers.tgt.vocab_size
        if device.type == "cuda":  # TF32 rounds float32 factors to 10 bits of mantissa
            torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.dtype = choose_training_dtype(config.dtype, device)
        # For float16, scales the loss by a power of two, so that small gradients do not become 0.
        # The scale halves when a gradient overflows and doubles after 2,000 updates without
        # overflow (Micikevicius et al., 2018).
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)
        self.optimizers = make_optimizers(model, config.optimizer)
        self.average: WeightAverage | None = None
        if config.ema_decay:
            self.average = WeightAverage(model, config.ema_decay)
        self.sharded: Sharded | None = None  # set by `ranks_connected` with sharding=full
        should_compile = config.compile
        is_sharded = config.sharding is Sharding.full
        # SimCut cuts embeddings by hooks, which the graph of a whole model does not contain. With
        # activation checkpointing, the whole model is compiled.
        has_uncompiled_hooks = config.simcut > 0 and config.activation_checkpointing
        if is_sharded or config.guided_alignment or has_uncompiled_hooks:
            # These settings do not work with a compiled model. The config refuses compile=true
            # together with them, but with compile=null, `make_compiler` might choose to compile.
            should_compile = False
        if self.dtype is torch.bfloat16 and not is_sharded:
            # The cache rounds a weight again if torch's version number of the weight has changed.
            # FSDP replaces weights without a new number, so that the cache would be out of date.
            cache_rounded_weights(model)
        uncut_ids = None
        if config.simcut:
            uncut_ids = find_uncut_ids(model, batch_maker.tokenizers)
        self.objective: nn.Module = Objective(
            model,
            smoothing=config.label_smoothing,
            r_drop=config.r_drop,
            simcut=config.simcut,
            guided_alignment=config.guided_alignment,
            compiler=make_compiler(should_compile, device),
            used_size=batch_maker.tokenizers.tgt.used_size,  # number of ids that occur
            uncut_ids=uncut_ids,
        )

    @property
    def dtype_name(self) -> str:
        """The dtype of matrix multiplications, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    # --- state

    @property
    def averaged_model(self) -> FastTransformer:
        """The model with averaged weights, or the trained model itself if nothing is averaged.

        With a schedule-free optimizer, each access computes a new copy of the model.
        """
        optimizer = self.optimizers[0]
        if isinstance(optimizer, ScheduleFree):
            return optimizer.averaged_copy(self.model)
        if self.average is not None:
            return self.average.model
        return self.model

    def model_to_validate(self) -> FastTransformer:
        """Return `averaged_model` with whole weights. With sharding, all ranks must call it."""
        if self.sharded is None:
            return self.averaged_model
        return self.sharded.gather_model(self.averaged_model)

    def weights_to_save(self) -> dict[str, Tensor]:
        """Return the weights of `averaged_model`, with adapters merged."""
        return merged_state_dict(self.averaged_model)

    def set_initial_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the random weights of a new run; only weights of adapters may be missing."""
        self.model.load_state_dict(weights, strict=self.config.adapter is Adapter.none)
        if self.average is not None:
            self.average.load(weights, num_updates=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to `weights_to_save`."""
        state: dict[str, Any] = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "precision": self.scaler.state_dict(),  # empty except for float16
        }
        if self.average is not None:
            state["num_averaged"] = self.average.num_updates
        is_schedule_free = self.config.optimizer.name is Optimizer.schedule_free
        has_average = self.average is not None or is_schedule_free
        if has_average or self.config.adapter is not Adapter.none:
            # `weights_to_save` returns averaged weights, or merges adapters
            state["trained"] = self.model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore the results of `state_dict` and `weights_to_save`.

        Raises `ModelError` if they do not fit the model.
        """
        try:
            optimizer_states = state["optimizers"]
            for optimizer, optimizer_state in zip(self.optimizers, optimizer_states, strict=True):
                optimizer.load_state_dict(optimizer_state)
            if state["precision"]:  # empty if the run did not use float16
                self.scaler.load_state_dict(state["precision"])
            self.model.load_state_dict(state.get("trained", weights))
            if self.average is not None:
                self.average.load(weights, state["num_averaged"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = to_one_line(error, 200)
            raise ModelError(f"the newest checkpoint does not fit the model ({reason})") from None

    # --- updates

    def update(
        self,
        plan: UpdatePlan,
        batches: list[list[Batch]],
        learning_rate: float,
        *,
        is_stop_requested: bool,
    ) -> UpdateResult:
        """Change the weights once, unless the loss or the gradient is not finite.

        `batches` is the result of `batch_maker.make_batches(plan)`. The loss is summed over all
        batches and ranks, and divided once by the number of their target tokens.
        """
        if self.config.changes_lengths:
            plan = self._recount_tokens(plan, batches)
        loss_sums = self.accumulate_gradient(plan, batches)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)  # overflowed gradients stay infinite
        parameters = list(self.model.parameters())  # takes milliseconds, so only once an update
        gradient_norm = clip_gradient(parameters, self.config.optimizer.max_grad_norm)
        result = self._sum_over_ranks(
            loss_sums, gradient_norm, plan, batches, is_stop_requested=is_stop_requested
        )
        if result.is_finite:
            self._step(parameters, learning_rate)
        self.scaler.update()  # lowers the scale of the loss if a gradient has overflowed
        self.zero_grad()
        return result

    def _step(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        """Step the optimizers, which change `parameters`, and update the average."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        if self.sharded is None:
            # The cache of rounded weights compares the version numbers of weights, and fused
            # optimizers do not increase them. With shards there is no such cache.
            torch.autograd.graph.increment_version(parameters)
        if self.average is not None:
            self.average.update(self.model)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _recount_tokens(self, plan: UpdatePlan, batches: list[list[Batch]]) -> UpdatePlan:
        """Return `plan` with the token counts of all ranks after subword sampling and noise."""
        counts = torch.zeros(2, dtype=torch.int64)  # numbers of target and source tokens
        if plan.batches:  # without them, `batches` holds a filler
            for micro_batch in itertools.chain.from_iterable(batches):
                counts += torch.tensor([micro_batch.num_tokens, micro_batch.num_src_tokens])
        num_tokens, num_src_tokens = sum_over_ranks(counts)
        return replace(plan, num_tokens=int(num_tokens), num_src_tokens=int(num_src_tokens))

    def accumulate_gradient(self, plan: UpdatePlan, batches: list[list[Batch]]) -> Tensor:
        """Add up the gradient of an update, and average it over ranks in the last backward pass.

        Returns the summed loss and the summed nll of each batch of this rank, (batches, 2).
        """
        if not self.model.training:  # checked, since the call of `train` takes milliseconds
            self.objective.train()  # a validation has switched to eval mode
        is_filler = not plan.batches
        loss_weight = 0.0
        if not is_filler:
            # the mean over ranks divides by `world.size` again
            loss_weight = self.world.size / plan.num_tokens
        loss_sums = torch.zeros(len(batches), 2, device=self.device)
        if self.sharded is not None:
            self._run_missing_micro_batches(batches)
        last_micro_batch = batches[-1][-1]
        for i, micro_batches in enumerate(batches):
            for micro_batch in micro_batches:
                # DDP averages the gradient over ranks only in the last backward pass
                gradient_context: AbstractContextManager[Any]
                if micro_batch is last_micro_batch:
                    gradient_context = nullcontext()
                else:
                    gradient_context = self._no_sync()
                with gradient_context:
                    loss, nll = self.compute_loss(micro_batch)
                    scaled_loss = self.scaler.scale(loss * loss_weight)
                    scaled_loss.backward()  # type: ignore[no-untyped-call]
                loss_sums[i] += torch.stack([loss.detach(), nll])
        return torch.zeros_like(loss_sums) if is_filler else loss_sums

    def _run_missing_micro_batches(self, batches: list[list[Batch]]) -> None:
        """Run fillers with zero gradient, so that all ranks run the same number of micro-batches.

        FSDP needs this, since all ranks take part in gathering the weights of a layer.
        """
        num_micro_batches = sum(len(micro_batches) for micro_batches in batches)
        num_missing = max(gather(num_micro_batches)) - num_micro_batches
        for _ in range(num_missing):
            loss, _ = self.compute_loss(self.batch_maker.make_micro_batch(FILLER_ROWS))
            zero_loss = loss * 0.0
            zero_loss.backward()  # type: ignore[no-untyped-call]

    def compute_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the summed nll of a micro-batch, in nats."""
        batch = batch.to(self.device)
        precision: AbstractContextManager[Any] = nullcontext()
        if self.dtype is not torch.float32:
            precision = torch.autocast(self.device.type, dtype=self.dtype)
        with precision:
            return self.objective(batch)  # type: ignore[no-any-return]

    def run_without_update(self, rows: Rows, *, only_largest: bool = False) -> None:
        """Run one batch forward and backward, without exchanging gradients or clearing them.

        With `only_largest`, runs only the largest micro-batch. This takes as much memory as running
        all micro-batches, since they run one after the other.
        """
        row_groups = self.batch_maker.split_rows(rows)  # the rows of each micro-batch
        if only_largest:
            costs = [batch_cost(self.batch_maker.lengths[group]) for group in row_groups]
            largest_index = costs.index(max(costs))
            row_groups = [row_groups[largest_index]]
        for group in row_groups:
            with self._no_sync():
                loss, _ = self.compute_loss(self.batch_maker.make_micro_batch(group))
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which DDP does not exchange gradients."""
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _sum_over_ranks(
        self,
        loss_sums: Tensor,
        gradient_norm: Tensor,
        plan: UpdatePlan,
        batches: list[list[Batch]],
        *,
        is_stop_requested: bool,
    ) -> UpdateResult:
        """Sum the statistics of an update over all ranks, with a single all-reduce."""
        flops = 0
        num_positions = 0
        if plan.batches:  # without them, `batches` holds a filler
            for micro_batches in batches:
                for micro_batch in micro_batches:
                    flops += count_training_flops(
                        self.config.model, self.vocab_size, micro_batch.lengths
                    )
                num_positions += count_positions(micro_batches)
        if self.config.r_drop or self.config.simcut:
            flops *= 2  # two forward and backward passes
        counts = torch.tensor([float(flops), float(num_positions), float(is_stop_requested)])
        # every rank has the same norm, so that the shares of all ranks add up to it
        norm_share = gradient_norm.unsqueeze(0) / self.world.size  # (1,)
        # (6,): loss, nll, norm, and the three counts
        rank_values = torch.cat([loss_sums.sum(dim=0), norm_share, to_device(counts, self.device)])
        totals = sum_over_ranks(rank_values)
        loss_sum, nll_sum, norm, total_flops, total_positions, num_stop_requests = totals
        return UpdateResult(
            loss_sum=loss_sum,
            nll_sum=nll_sum,
            gradient_norm=norm,
            flops=total_flops,
            num_positions=total_positions,
            num_tokens=plan.num_tokens,
            num_src_tokens=plan.num_src_tokens,
            is_stop_requested=num_stop_requests > 0,
            batch_losses=loss_sums[:, 0],
        )

    # --- ranks

    @contextmanager
    def ranks_connected(self) -> Iterator[None]:
        """Let the ranks exchange gradients during the `with` block.

        Without sharding, DDP wraps the objective, and first copies the weights of rank 0 to all
        ranks. With sharding=full, FSDP shards the model, whose weights must be equal on all ranks.
        The model stays sharded after the block.
        """
        if self.world.size == 1:
            yield
            return
        objective = self.objective
        if self.config.sharding is Sharding.full:
            from nmt.training.sharding import Sharded  # importing it takes a second

            assert isinstance(objective, Objective)
            (optimizer,) = self.optimizers  # the config accepts only Adam and AdamW here
            self.sharded = Sharded(objective, optimizer, self.average, self.device, self.world.size)
            yield
            return
        device_ids = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # torch 2.13 renames `broadcast_buffers`, but torch 2.6 needs the old name
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.objective = DistributedDataParallel(
                objective,
                device_ids=device_ids,
                broadcast_buffers=False,  # tables of positions may have a different size per rank
                gradient_as_bucket_view=True,
            )
        try:
            yield
        finally:
            # Free DDP before the process group ends. After the end of the group, Python would hold
            # the GIL while it frees DDP, and a thread of gloo may wait forever for the GIL.
            self.objective = objective

    # --- measurements

    def future_moment_bytes(self) -> int:
        """Return the memory that the first update will allocate for the moments of Adam.

        Returns 0 after that update, and for Adafactor, whose moments are small.
        """
        has_state = any(optimizer.state for optimizer in self.optimizers)
        if has_state or self.config.optimizer.name is Optimizer.adafactor:
            return 0
        trained_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        if self.sharded is not None:
            trained_bytes //= self.world.size
        return 2 * trained_bytes

    def state_bytes(self) -> int:
        """Return the memory of weights, average, gradients and moments on this device."""
        tensors = list(self.model.parameters())
        # Trained parameters count twice, since each has a gradient of the same size. The gradients
        # themselves may not exist yet.
        tensors += [parameter for parameter in tensors if parameter.requires_grad]
        if self.average is not None:
            tensors += self.average.model.parameters()
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                tensors += moments.values()
        if self.sharded is not None:
            return sum(self.sharded.local_shard(tensor).nbytes for tensor in tensors)
        return sum(tensor.nbytes for tensor in tensors)

    def measure_peak_flops_per_second(self) -> float:
        """Measure the FLOP/s of all ranks in matrix multiplications of this model's shapes."""
        flops_per_second = measure_flops_per_second(
            self.device,
            self.dtype,
            self.config.model,
            vocab_size=self.vocab_size,
            num_tokens=self.config.max_batch_tokens,
        )
        return sum(gather(flops_per_second))


def count_positions(micro_batches: list[Batch]) -> int:
    """Count the source and target tokens of a batch, with padding to its longest sentences."""
    lengths = np.concatenate([micro_batch.lengths for micro_batch in micro_batches])  # (pairs, 2)
    longest = lengths.max(axis=0)  # (2,), of the source and of the target
    return len(lengths) * int(longest.sum())
