"""How the weights change: the gradient of an update over micro-batches and ranks, and its step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nmt.config import Adapter, Optimizer, Sharding, TrainConfig
from nmt.data import Rows
from nmt.data.batch import MICRO_BATCH_TOKENS, Ids, batch_cost
from nmt.data.batching import Update
from nmt.data.binary import ParallelData
from nmt.data.noise import SubwordSampling, TokenNoise
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.fast.layers import ROWS_STEP, round_once
from nmt.model.fast.transfer import send
from nmt.model.transformer import Transformer
from nmt.runtime.distributed import World, find_dtype, gather, sum_over_ranks
from nmt.training.adapters import choose_parameters, merged_state
from nmt.training.checks import check_model_fits, preflight
from nmt.training.compiled import make_compiler
from nmt.training.costs import matmul_rate, training_flops
from nmt.training.loss import Objective
from nmt.training.microbatches import Batch, make_batch
from nmt.training.optimizer import WeightAverage, clip_gradient, make_optimizer

if TYPE_CHECKING:
    from nmt.training.sharding import Sharded

_ANY_ROW = np.zeros(1, dtype=np.int64)  # for a rank that has no batch in an update


@dataclass(frozen=True)
class Outcome:
    """The figures of an update, over all ranks but for `batch_losses`."""

    loss_sum: float  # nats, smoothed
    nll_sum: float  # nats
    gradient_norm: float  # before clipping
    flops: float  # of the model, for real tokens
    num_positions: float  # of all batches, padding included
    num_tokens: int  # real target tokens
    num_src_tokens: int  # real source tokens
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
        device: torch.device, noise: TokenNoise | None = None,
    ) -> None:  # fmt: skip
        self.config, self.world, self.device, self.noise = config, world, device, noise
        self.data, self.tokenizer, self.lengths = data, tokenizer, data.lengths
        if device.type == "cuda":  # TF32 rounds float32 factors to 10 bits of mantissa
            torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        self.dtype = find_dtype(config.dtype, device)
        amount = config.subword_sampling
        self.cuts = SubwordSampling(tokenizer, amount, config.seed) if amount else None
        # float16: a power of two, so that small gradients do not become 0; it halves when a
        # gradient overflows, and doubles after 2,000 updates without (Micikevicius et al., 2018)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)
        vocab_size, src_vocab_size = tokenizer.tgt.vocab_size, tokenizer.src_vocab_size
        make = partial(Transformer, config.model, vocab_size, src_vocab_size=src_vocab_size)
        with torch.device("meta"), torch.random.fork_rng([]):  # takes no memory, draws nothing
            check_model_fits(make(), config, device, world.size)
        model = make(activation_checkpointing=config.activation_checkpointing)
        self.model = accelerate(model.to(device))
        choose_parameters(self.model, config)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.average = WeightAverage(self.model, config.ema_decay) if config.ema_decay else None
        if self.dtype is torch.bfloat16 and config.sharding is Sharding.none:
            round_once(self.model)  # what is gathered anew has the version of before
        self.sharded: Sharded | None = None  # while ranks are connected that have parts of a model
        may_compile = False if config.sharding is Sharding.full else config.compile
        compiler, smoothing = make_compiler(may_compile, device), config.label_smoothing
        self.objective: nn.Module = Objective(
            self.model, smoothing=smoothing, r_drop=config.r_drop, compiler=compiler
        )
        self.clear_gradient()

    @property
    def best_model(self) -> FastTransformer:
        """The model to validate: the average where one is kept. All ranks ask for it."""
        kept = self.model if self.average is None else self.average.model
        return kept if self.sharded is None else self.sharded.whole_model(kept)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of `best_model`, with adapters merged: what other commands read."""
        return merged_state(self.model if self.average is None else self.average.model)

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Begin a run with `weights` instead of random ones."""
        # which are those of the model: only adapters may be missing
        self.model.load_state_dict(weights, strict=self.config.adapter is Adapter.none)
        if self.average is not None:
            self.average.load(weights, num_updates=0)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue, beside `weights`."""
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "precision": self.scaler.state_dict(),  # empty but for float16
        }
        if self.average is not None:
            state["num_averaged"] = self.average.num_updates
        if self.average is not None or self.config.adapter is not Adapter.none:
            state["trained"] = self.model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Continue from what `state_dict` and `weights` returned."""
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ModelError("the optimizer's state does not fit the model") from None
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                *rows, num_columns = parameter.shape or (1,)
                means = {"row_var": (*rows, 1), "col_var": (*rows[:-1], 1, num_columns)}
                wanted = means.get(name, tuple(parameter.shape))  # of Adafactor's means
                if name != "step" and tuple(moment.shape) != wanted:
                    raise ModelError(
                        f"{name} of the optimizer is {tuple(moment.shape)} for a parameter of "
                        f"{tuple(parameter.shape)}; go on from another checkpoint"
                    )
        if state["precision"]:  # a run that changed to float16 starts with a new scale
            self.scaler.load_state_dict(state["precision"])
        self.model.load_state_dict(state.get("trained", weights))
        if self.average is not None:
            self.average.load(weights, state["num_averaged"])

    def update(
        self, update: Update, batches: list[list[Batch]], learning_rate: float, *,
        is_stop_asked: bool,
    ) -> Outcome:  # fmt: skip
        """Change the weights once, by `make_batches(update)`, unless something is not finite.

        The loss is summed over all batches and ranks and divided once by their target tokens.
        """
        if self.config.subword_sampling or self.config.noise.drop:  # which the plan does not know
            drawn = [batch for some in batches for batch in some if update.batches]
            counts = torch.tensor([[0, 0], *[[b.num_tokens, b.num_src_tokens] for b in drawn]])
            num_tokens, num_src_tokens = map(int, sum_over_ranks(counts.sum(0)))  # on the host
            update = replace(update, num_tokens=num_tokens, num_src_tokens=num_src_tokens)
        losses = self.accumulate_gradient(update, batches)  # (batches, 2)
        self.scaler.unscale_(self.optimizer)  # what overflowed stays infinite
        norm = clip_gradient(self.model, self.config.optimizer.max_grad_norm)
        outcome = self._share(losses, norm, update, batches, is_stop_asked=is_stop_asked)
        if outcome.is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            if self.sharded is None:  # fused kernels leave it out, which `round_once` reads
                torch.autograd.graph.increment_version(list(self.model.parameters()))
            if self.average is not None:
                self.average.update(self.model)
        self.scaler.update()
        self.clear_gradient()
        return outcome

    def clear_gradient(self) -> None:
        """Delete the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate_gradient(self, update: Update, batches: list[list[Batch]]) -> Tensor:
        """Add up the gradient; return sums of loss and nll of this rank's batches, (batches, 2).

        Ranks exchange gradients once, during the last backward pass.
        """
        self.objective.train()
        # DDP takes the mean over ranks
        weight = self.world.size / update.num_tokens if update.batches else 0.0
        sums = torch.zeros(len(batches), 2, device=self.device)
        if self.sharded is not None:  # all ranks need the weights of a layer equally often
            missing = max(gather(sum(map(len, batches)))) - sum(map(len, batches))
            for _ in range(missing):
                loss, _ = self.losses(self._make_batch(_ANY_ROW))
                (loss * 0.0).backward()  # type: ignore[no-untyped-call]
        for i, micro_batches in enumerate(batches):
            for j, micro_batch in enumerate(micro_batches):
                is_last = i + 1 == len(batches) and j + 1 == len(micro_batches)
                with nullcontext() if is_last else self._no_sync():
                    loss, nll = self.losses(micro_batch)
                    self.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
                sums[i] += torch.stack([loss.detach(), nll])
        return sums if update.batches else torch.zeros_like(sums)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the summed loss and nll of a micro-batch, in nats."""
        batch = batch.to(self.device)
        is_half = self.dtype is not torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if is_half else nullcontext():
            return self.objective(batch)  # type: ignore[no-any-return]

    def make_batches(self, update: Update, draw: int = 0) -> list[list[Batch]]:
        """Return the micro-batches of each batch of this rank, or of one that counts nothing; the
        text is cut, and has the noise, of the number `draw`.
        """
        return [
            [self._make_batch(rows, draw) for rows in self._micro_batches(batch)]
            for batch in update.batches or [_ANY_ROW]
        ]

    def _micro_batches(self, rows: Rows) -> list[Rows]:
        """Cut a batch for a CPU, so that the activations of a layer stay in its caches."""
        is_cpu = self.device.type == "cpu"
        count = -(-batch_cost(self.lengths[rows]) // MICRO_BATCH_TOKENS) if is_cpu else 1
        return np.array_split(rows, min(count, len(rows)))

    def _make_batch(self, rows: Rows, draw: int = 0) -> Batch:
        pairs: list[tuple[Ids, Ids]] = []
        inputs: list[Ids] = []  # of the decoder
        for row in rows.tolist():
            pair: tuple[Ids, Ids] = self.data[row]
            if self.cuts is not None:
                pair = self.cuts(*pair, draw, row)
            src, read = pair if self.noise is None else self.noise(*pair, draw, row)
            pairs.append((src, pair[1]))
            inputs.append(read)
        batch = make_batch(
            pairs,
            self.tokenizer,
            inputs,
            round_to=ROWS_STEP,
            source_eos=self.config.model.source_eos,
        )
        return batch.pin() if self.device.type == "cuda" else batch

    def _no_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def _share(
        self, losses: Tensor, norm: Tensor, update: Update, batches: list[list[Batch]], *,
        is_stop_asked: bool,
    ) -> Outcome:  # fmt: skip
        """Sum up over all ranks what the update came to, in one exchange."""
        real = batches if update.batches else []
        lengths = [np.concatenate([one.lengths for one in micro_batches]) for micro_batches in real]
        config, vocab_size = self.config.model, self.tokenizer.tgt.vocab_size
        num_passes = 2 if self.config.r_drop else 1
        counted = [
            float(sum(num_passes * training_flops(config, vocab_size, part) for part in lengths)),
            float(sum(len(part) * int(part.max(axis=0).sum()) for part in lengths)),
            float(is_stop_asked),
        ]
        others = send(torch.tensor(counted), self.device)
        # the norm is the same on every rank; the mean of its copies saves a second exchange
        sums = sum_over_ranks(torch.cat([losses.sum(0), norm[None] / self.world.size, others]))
        loss, nll, gradient_norm, flops, num_positions, num_stops = sums
        return Outcome(
            loss_sum=loss,
            nll_sum=nll,
            gradient_norm=gradient_norm,
            flops=flops,
            num_positions=num_positions,
            num_tokens=update.num_tokens,
            num_src_tokens=update.num_src_tokens,
            is_stop_asked=num_stops > 0,
            batch_losses=losses[:, 0],
        )

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Let the ranks share gradients during the block; all begin with the weights of rank 0."""
        plain = self.objective
        if self.world.size == 1:
            yield
            return
        if self.config.sharding is Sharding.full:
            from nmt.training.sharding import Sharded  # it takes a second

            assert isinstance(plain, Objective)
            given = (plain, self.optimizer, self.average)
            self.sharded = Sharded(*given, self.device, self.world.size)
            yield
            return
        with warnings.catch_warnings():  # torch 2.13 renames an argument that 2.6 needs
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self.objective = DistributedDataParallel(
                plain,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                broadcast_buffers=False,  # the table of positions grows as a rank needs it
                gradient_as_bucket_view=True,
            )
        try:
            yield
        finally:
            # before the process group ends: what DDP holds of the group would be freed last, with
            # Python's lock held, for which gloo's thread may wait forever
            self.objective = plain

    def try_largest(self, rows: Rows, max_tokens: int) -> int:
        """Run the largest batches of the pairs `rows` (`preflight`); return the peak in bytes."""

        def run(some: Rows) -> None:
            for micro_batch in self._micro_batches(rows[some]):
                with self._no_sync():
                    loss, _ = self.losses(self._make_batch(micro_batch))
                    self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

        trained = [p for p in self.model.parameters() if p.requires_grad]
        weight_bytes = sum(p.numel() * p.element_size() for p in trained)
        remedies = [] if self.config.activation_checkpointing else ["activation_checkpointing=true"]
        if self.sharded is not None:
            weight_bytes //= self.world.size
            max_tokens = max(gather(max_tokens))  # all ranks run equally many
        elif self.world.size > 1:
            remedies.append("sharding=full")
        self.objective.train()
        has_moments = self.optimizer.state or self.config.optimizer.name is Optimizer.adafactor
        peak = preflight(
            run,
            self.lengths[rows],
            max_tokens,
            device=self.device,
            ballast_bytes=0 if has_moments else 2 * weight_bytes,  # Adam's
            remedy=f"set {' or '.join(remedies)}" if remedies else "use a smaller model",
        )
        self.clear_gradient()
        return peak

    def state_bytes(self) -> int:
        """Return what weights, their average, gradients and moments take on this device."""
        weights, state = list(self.model.parameters()), self.optimizer.state.values()
        found = [*weights, *(value for moments in state for value in moments.values())]
        found += [parameter for parameter in weights if parameter.requires_grad]  # gradients
        found += [] if self.average is None else self.average.model.parameters()
        if self.sharded is not None:
            found = [self.sharded.local(tensor) for tensor in found]
        return sum(tensor.nbytes for tensor in found)

    def measure_rate(self) -> float:
        """Measure the peak throughput of all ranks in this model's matrices, in operations/s."""
        sizes = {"vocab_size": self.tokenizer.tgt.vocab_size, "num_tokens": self.config.max_tokens}
        return sum(gather(matmul_rate(self.device, self.dtype, self.config.model, **sizes)))
