"""The update of the weights: gradients over micro-batches and ranks, and the optimizer step."""

from __future__ import annotations

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

from nmt.config import Adapter, Optimizer, Sharding, TrainConfig
from nmt.data import Rows
from nmt.data.batching import Update
from nmt.errors import ModelError
from nmt.model.fast import FastTransformer
from nmt.model.fast.layers import cache_rounded_weights
from nmt.model.fast.transfer import send
from nmt.runtime.distributed import World, find_dtype, gather, sum_over_ranks
from nmt.training.adapters import merged_state
from nmt.training.batches import FILLER_ROWS, Batch, BatchMaker
from nmt.training.compiled import make_compiler
from nmt.training.costs import matmul_rate, training_flops
from nmt.training.loss import Objective
from nmt.training.optimizer import WeightAverage, clip_gradient, make_optimizers

if TYPE_CHECKING:
    from nmt.training.sharding import Sharded


@dataclass(frozen=True)
class UpdateResult:
    """The figures of an update, over all ranks except for `batch_losses`."""

    loss_sum: float  # nats, smoothed
    nll_sum: float  # nats
    gradient_norm: float  # before clipping
    flops: float  # of the model, without padding
    num_positions: float  # of all batches, padding included
    num_tokens: int  # target tokens without padding
    num_src_tokens: int  # source tokens without padding
    is_stop_requested: bool  # on any rank
    batch_losses: Tensor  # (batches of this rank,)

    @property
    def is_finite(self) -> bool:
        """Whether the weights were changed."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)


class Learner:
    """The model, its optimizers and its loss on one rank: `update` changes the weights once."""

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
        self.vocab_size = batch_maker.tokenizer.tgt.vocab_size
        if device.type == "cuda":  # TF32 rounds float32 factors to 10 bits of mantissa
            torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.dtype = find_dtype(config.dtype, device)
        # For float16: a power of two that keeps small gradients from becoming 0. It halves when a
        # gradient overflows and doubles after 2,000 updates without (Micikevicius et al., 2018).
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)
        self.optimizers = make_optimizers(model, config.optimizer)
        self.average = WeightAverage(model, config.ema_decay) if config.ema_decay else None
        self.sharded: Sharded | None = None  # only while ranks with shards are connected
        may_compile = config.compile
        if config.sharding is Sharding.full:
            may_compile = False
        elif self.dtype is torch.bfloat16:
            # not with FSDP, which gathers weights again without a new version number, so that
            # rounded copies would be stale
            cache_rounded_weights(model)
        self.objective: nn.Module = Objective(
            model,
            smoothing=config.label_smoothing,
            r_drop=config.r_drop,
            compiler=make_compiler(may_compile, device),
        )

    # --- state

    @property
    def best_model(self) -> FastTransformer:
        """The model to validate: the average if there is one. All ranks must ask for it."""
        model = self.model if self.average is None else self.average.model
        return model if self.sharded is None else self.sharded.whole_model(model)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of `best_model` for other commands, with adapters merged."""
        return merged_state(self.model if self.average is None else self.average.model)

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Begin a run with `weights` instead of random ones; only adapters may be missing."""
        self.model.load_state_dict(weights, strict=self.config.adapter is Adapter.none)
        if self.average is not None:
            self.average.load(weights, num_updates=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs in addition to `weights`."""
        state: dict[str, Any] = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "precision": self.scaler.state_dict(),  # empty except for float16
        }
        if self.average is not None:
            state["num_averaged"] = self.average.num_updates
        if self.average is not None or self.config.adapter is not Adapter.none:
            state["trained"] = self.model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Continue from the results of `state_dict` and `weights`.

        Raises `ModelError` if they do not fit the model.
        """
        try:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            if state["precision"]:  # a run that changed to float16 starts with a new scale
                self.scaler.load_state_dict(state["precision"])
            self.model.load_state_dict(state.get("trained", weights))
            if self.average is not None:
                self.average.load(weights, state["num_averaged"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(f"the newest checkpoint does not fit the model ({reason})") from None

    # --- updates

    def update(
        self,
        plan: Update,
        batches: list[list[Batch]],
        learning_rate: float,
        *,
        is_stop_requested: bool,
    ) -> UpdateResult:
        """Change the weights once, unless the loss or the gradient is not finite.

        `batches` are the micro-batches that `batch_maker` made for `plan`. The loss is summed over
        all batches and ranks and divided once by their target tokens.
        """
        if self.config.subword_sampling or self.config.noise.drop:
            plan = self._count_tokens(plan, batches)
        losses = self.accumulate_gradient(plan, batches)  # (batches, 2)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)  # overflowed gradients stay infinite
        norm = clip_gradient(self.model, self.config.optimizer.max_grad_norm)
        result = self._sum_over_ranks(
            losses, norm, plan, batches, is_stop_requested=is_stop_requested
        )
        if result.is_finite:
            self._step(learning_rate)
        self.scaler.update()
        self.zero_grad()
        return result

    def _step(self, learning_rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        if (
            self.sharded is None
        ):  # `cache_rounded_weights` reads versions, which fused kernels do not increase
            torch.autograd.graph.increment_version(list(self.model.parameters()))
        if self.average is not None:
            self.average.update(self.model)

    def zero_grad(self) -> None:
        """Clear the gradient."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _count_tokens(self, plan: Update, batches: list[list[Batch]]) -> Update:
        """Return `plan` with the numbers of tokens after sampling and noise, over all ranks."""
        counts = torch.zeros(2, dtype=torch.int64)  # on the host
        for batch in _flatten(batches) if plan.batches else ():
            counts += torch.tensor([batch.num_tokens, batch.num_src_tokens])
        num_tokens, num_src_tokens = sum_over_ranks(counts)
        return replace(plan, num_tokens=int(num_tokens), num_src_tokens=int(num_src_tokens))

    def accumulate_gradient(self, plan: Update, batches: list[list[Batch]]) -> Tensor:
        """Add up the gradient; return sums of loss and nll of this rank's batches, (batches, 2).

        Ranks exchange gradients once, during the last backward pass.
        """
        self.objective.train()
        # DDP takes the mean over ranks
        weight = self.world.size / plan.num_tokens if plan.batches else 0.0
        sums = torch.zeros(len(batches), 2, device=self.device)
        if self.sharded is not None:
            self._run_missing_batches(len(_flatten(batches)))
        for i, micro_batches in enumerate(batches):
            for micro_batch in micro_batches:
                is_last = i + 1 == len(batches) and micro_batch is micro_batches[-1]
                with nullcontext() if is_last else self._no_sync():
                    loss, nll = self.losses(micro_batch)
                    self.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
                sums[i] += torch.stack([loss.detach(), nll])
        return sums if plan.batches else torch.zeros_like(sums)

    def _run_missing_batches(self, num_batches: int) -> None:
        """Run fillers of weight 0: all ranks must gather the shards of a layer equally often."""
        for _ in range(max(gather(num_batches)) - num_batches):
            loss, _ = self.losses(self.batch_maker.make_micro_batch(FILLER_ROWS))
            (loss * 0.0).backward()  # type: ignore[no-untyped-call]

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and nll of a micro-batch, in nats."""
        batch = batch.to(self.device)
        is_half = self.dtype is not torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if is_half else nullcontext():
            return self.objective(batch)  # type: ignore[no-any-return]

    def run_without_update(self, rows: Rows) -> None:
        """Run a batch forward and backward; add to this rank's gradient without exchanging it."""
        for micro_batch_rows in self.batch_maker.split(rows):
            with self._no_sync():
                loss, _ = self.losses(self.batch_maker.make_micro_batch(micro_batch_rows))
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _no_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _sum_over_ranks(
        self,
        losses: Tensor,
        norm: Tensor,
        plan: Update,
        batches: list[list[Batch]],
        *,
        is_stop_requested: bool,
    ) -> UpdateResult:
        """Sum up the figures of an update over all ranks, in one exchange."""
        flops = 0
        num_positions = 0
        for micro_batches in batches if plan.batches else ():
            for micro_batch in micro_batches:
                flops += training_flops(self.config.model, self.vocab_size, micro_batch.lengths)
            lengths = np.concatenate([micro_batch.lengths for micro_batch in micro_batches])
            num_positions += len(lengths) * int(lengths.max(axis=0).sum())
        if self.config.r_drop:
            flops *= 2
        counts = torch.tensor([float(flops), float(num_positions), float(is_stop_requested)])
        figures = [
            losses.sum(0),
            norm[None] / self.world.size,  # the same on every rank: their sum is the norm
            send(counts, self.device),
        ]
        loss, nll, gradient_norm, all_flops, all_positions, num_stops = sum_over_ranks(
            torch.cat(figures)
        )
        return UpdateResult(
            loss_sum=loss,
            nll_sum=nll,
            gradient_norm=gradient_norm,
            flops=all_flops,
            num_positions=all_positions,
            num_tokens=plan.num_tokens,
            num_src_tokens=plan.num_src_tokens,
            is_stop_requested=num_stops > 0,
            batch_losses=losses[:, 0],
        )

    # --- ranks

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Let the ranks share gradients during the block; all begin with the weights of rank 0."""
        if self.world.size == 1:
            yield
            return
        objective = self.objective
        if self.config.sharding is Sharding.full:
            from nmt.training.sharding import Sharded  # importing it takes a second

            assert isinstance(objective, Objective)
            (optimizer,) = self.optimizers
            self.sharded = Sharded(objective, optimizer, self.average, self.device, self.world.size)
            yield
            return
        with warnings.catch_warnings():  # torch 2.13 renames an argument that 2.6 needs
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.objective = DistributedDataParallel(
                objective,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                broadcast_buffers=False,  # the table of positions grows as a rank needs it
                gradient_as_bucket_view=True,
            )
        try:
            yield
        finally:
            # DDP must be freed before the process group ends: otherwise it is freed with Python's
            # lock held, and gloo's thread may wait for that lock forever
            self.objective = objective

    # --- measurements

    def missing_moment_bytes(self) -> int:
        """Return the memory that Adam's moments will take after the first update."""
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
        tensors += [parameter for parameter in tensors if parameter.requires_grad]  # gradients
        if self.average is not None:
            tensors += self.average.model.parameters()
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                tensors += moments.values()
        if self.sharded is not None:
            return sum(self.sharded.local(tensor).nbytes for tensor in tensors)
        return sum(tensor.nbytes for tensor in tensors)

    def measure_rate(self) -> float:
        """Measure the peak throughput of all ranks in this model's matrices, in operations/s."""
        rate = matmul_rate(
            self.device,
            self.dtype,
            self.config.model,
            vocab_size=self.vocab_size,
            num_tokens=self.config.max_tokens,
        )
        return sum(gather(rate))


def _flatten(batches: list[list[Batch]]) -> list[Batch]:
    return [micro_batch for micro_batches in batches for micro_batch in micro_batches]
