"""How the weights change: the gradient of an update over batches and ranks, and the step it makes.

It knows neither when to validate nor where to save.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmt.config import TrainConfig
from nmt.data import Lengths, Rows
from nmt.data.batch import CPU_PIECE_TOKENS, batch_cost
from nmt.data.batching import Update
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import World, find_dtype, sum_over_ranks
from nmt.model.fast import accelerate
from nmt.model.fast.layers import ROWS_STEP
from nmt.model.transformer import Transformer
from nmt.training.batch import Batch, make_batch
from nmt.training.compiled import make_compiler
from nmt.training.ema import WeightAverage
from nmt.training.flops import matmul_rate, training_flops
from nmt.training.objective import Objective
from nmt.training.optimizer import clip_gradient, make_optimizer
from nmt.training.precision import Precision
from nmt.training.prefetch import Prefetcher
from nmt.training.preflight import preflight

_CHECKPOINTING = "set activation_checkpointing=true"
_ANY_ROW = np.zeros(1, dtype=np.int64)  # for a rank that has no batch in an update


@dataclass(frozen=True)
class Outcome:
    """What an update came to, over all ranks but for `batch_losses`."""

    loss_sum: float  # nats, smoothed
    nll_sum: float  # nats
    gradient_norm: float  # before clipping
    num_positions: int  # of all batches, padding included
    flops: float  # of the model's products for real tokens
    is_stop_asked: bool  # on any rank
    batch_losses: Tensor  # (batches of this rank,)

    @property
    def is_finite(self) -> bool:
        """Whether the weights were changed."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.gradient_norm)


class Learner:
    """Model, optimizer and all that turns a batch into better weights, on one rank."""

    def __init__(
        self, config: TrainConfig, data: ParallelData, tokenizer: Tokenizers, world: World,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.config, self.world, self.device = config, world, device
        self.data, self.tokenizer = data, tokenizer
        self.lengths: Lengths = data.lengths()
        self.precision = Precision(find_dtype(config.dtype, device), device, tf32=config.tf32)
        model = Transformer(
            config.model,
            tokenizer.tgt.vocab_size,
            src_vocab_size=tokenizer.src_vocab_size,
            activation_checkpointing=config.activation_checkpointing,
        )
        self.model = accelerate(model.to(device))
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.average: WeightAverage | None = None
        self.prefetcher = Prefetcher(self._make_batches)
        self.objective: nn.Module = Objective(
            self.model,
            smoothing=config.label_smoothing,
            compiler=make_compiler(config.compile, device),
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to validate and to save: the average where one is kept."""
        return self.model.state_dict() if self.average is None else self.average.weights()

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the weights of `weights` for the time of a block."""
        return nullcontext() if self.average is None else self.average.in_place_of(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed beside `weights` to go on, as tensors and primitives."""
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
        }
        if self.average is not None:
            # the average itself is among `weights`
            state |= {"num_averaged": self.average.num_updates, "trained": self.model.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Go on from `state_dict` and `weights`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        self.model.load_state_dict(state.get("trained", weights))
        self._begin_average()
        if self.average is not None:
            self.average.load_state_dict({"num_updates": state["num_averaged"], "weights": weights})

    def _begin_average(self) -> None:
        if self.config.ema_decay:
            self.average = WeightAverage(self.model, self.config.ema_decay)

    def measure_rate(self) -> float:
        """Measure how many operations a second all ranks could do in products of this model."""
        rate = matmul_rate(
            self.device,
            self.precision.dtype,
            self.config.model,
            vocab_size=self.tokenizer.tgt.vocab_size,
            num_tokens=self.config.max_tokens,
        )
        return sum_over_ranks(torch.tensor([rate], device=self.device))[0]

    def connect(self) -> None:
        """Let the ranks share gradients from now on; all begin with the weights of rank 0."""
        if self.average is None:
            self._begin_average()
        if self.world.size > 1:
            with warnings.catch_warnings():  # torch 2.13 renames an argument that 2.6 needs
                warnings.filterwarnings(
                    "ignore", message=".*broadcast_buffers", category=FutureWarning
                )
                self.objective = DistributedDataParallel(
                    self.objective,
                    device_ids=[self.device] if self.device.type == "cuda" else None,
                    broadcast_buffers=False,  # the table of positions grows as a rank needs it
                    gradient_as_bucket_view=True,
                )

    def disconnect(self) -> None:
        """Undo `connect`, before the process group ends: what DDP holds of the group would be freed
        last, with python's lock held, for which gloo's thread may wait forever.
        """
        if isinstance(self.objective, DistributedDataParallel):
            self.objective = self.objective.module

    def update(
        self,
        update: Update,
        learning_rate: float,
        *,
        is_stop_asked: bool,
        following: Update | None = None,
    ) -> Outcome:
        """Change the weights once, unless loss or gradient are not finite; batches of the
        `following` update are made meanwhile.

        The gradient is that of the loss summed over all batches and ranks, divided once by the
        number of their target tokens.
        """
        losses = self.accumulate_gradient(update, following)  # (batches, 2)
        self.precision.unscale(self.optimizer)
        norm = clip_gradient(self.model, self.config.optimizer.max_grad_norm)
        flops, num_positions = self._count(update.batches)
        others = self._send([flops, num_positions, float(is_stop_asked)])
        # the norm is the same on every rank; the mean of its copies saves a second exchange
        sums = sum_over_ranks(torch.cat([losses.sum(0), norm[None] / self.world.size, others]))
        loss, nll, gradient_norm, flops_sum, positions, num_stops = sums
        outcome = Outcome(
            loss, nll, gradient_norm, int(positions), flops_sum, num_stops > 0, losses[:, 0]
        )
        if outcome.is_finite:
            self.precision.step(self.optimizer, learning_rate)
            if self.average is not None:
                self.average.update(self.model)
        self.precision.update()
        self.optimizer.zero_grad(set_to_none=True)
        return outcome

    def accumulate_gradient(self, update: Update, following: Update | None = None) -> Tensor:
        """Add up the gradient of the update; return the sums of loss and nll of each batch of this
        rank, (batches, 2).

        Ranks exchange gradients once, during the last backward pass; DDP takes their mean, so each
        is scaled by the number of ranks.
        """
        self.objective.train()
        weight = self.world.size / update.num_tokens if update.batches else 0.0
        batches = self.prefetcher.take(update, following)
        sums = torch.zeros(len(batches), 2, device=self.device)
        for i, pieces in enumerate(batches):
            for j, piece in enumerate(pieces):
                is_last = i + 1 == len(batches) and j + 1 == len(pieces)
                with nullcontext() if is_last else self._no_sync():
                    loss, nll = self.losses(piece)
                    self.precision.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
                sums[i] += torch.stack([loss.detach(), nll])
        return sums if update.batches else torch.zeros_like(sums)

    def _make_batches(self, update: Update) -> list[list[Batch]]:
        """Return the pieces of each batch of this rank, or of one that will count nothing."""
        rows = update.batches or [_ANY_ROW]
        return [[self._make_batch(piece) for piece in self._pieces(batch)] for batch in rows]

    def _make_batch(self, rows: Rows) -> Batch:
        pairs = [self.data[int(i)] for i in rows]
        batch = make_batch(pairs, self.tokenizer, round_to=ROWS_STEP)
        return batch.pin() if self.device.type == "cuda" else batch

    def _pieces(self, rows: Rows) -> list[Rows]:
        """Cut a batch for a processor so that what a layer computes stays in its caches; the
        gradient is the same sum.
        """
        if self.device.type != "cpu":
            return [rows]
        num_pieces = -(-batch_cost(self.lengths[rows]) // CPU_PIECE_TOKENS)
        return np.array_split(rows, min(num_pieces, len(rows)))

    def try_largest(self, rows: Rows, max_tokens: int) -> int:
        """Run the largest batches of at most `max_tokens` among the pairs `rows` forward and
        backward, without effect on weights; return the peak memory in bytes.

        Raises `ConfigError` when memory does not suffice, see `preflight`.
        """
        weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        is_checkpointing = self.config.activation_checkpointing
        self.objective.train()
        peak = preflight(
            lambda some: self._try(rows[some]),
            self.lengths[rows],
            max_tokens,
            device=self.device,
            ballast_bytes=0 if self.optimizer.state else 2 * weight_bytes,  # Adam's moments
            remedy="use a smaller model" if is_checkpointing else _CHECKPOINTING,
        )
        self.optimizer.zero_grad(set_to_none=True)
        return peak

    def _try(self, rows: Rows) -> None:
        for piece in self._pieces(rows):
            with self._no_sync():
                loss, _ = self.losses(self._make_batch(piece))
                self.precision.scale(loss).backward()  # type: ignore[no-untyped-call]

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and nll of a batch, in nats."""
        batch = batch.to(self.device)
        with self.precision.autocast():
            return self.objective(batch)  # type: ignore[no-any-return]

    def _send(self, values: list[float]) -> Tensor:
        """Copy numbers to the device, without a wait for it."""
        here = torch.tensor(values, pin_memory=self.device.type == "cuda")
        return here.to(self.device, non_blocking=True)

    def _no_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _count(self, batches: list[Rows]) -> tuple[int, int]:
        """Return the operations of this rank's products and its positions, padding included."""
        lengths = [self.lengths[rows] for rows in batches]
        positions = sum(len(part) * int(part.max(axis=0).sum()) for part in lengths)
        vocab_size = self.tokenizer.tgt.vocab_size
        return sum(training_flops(self.config.model, vocab_size, p) for p in lengths), positions
