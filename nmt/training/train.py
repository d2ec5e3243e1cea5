"""A training run: set up, resume, update, validate, save.

Every rank runs the same lines, and what they decide upon is the same on all of them, so that they
leave the loop together. Rank 0 alone reads and writes the run folder, and logs.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from signal import Signals

import torch

from nmt.checkpoint import ModelInfo
from nmt.config import BestMetric, TrainConfig
from nmt.data.batching import Update
from nmt.errors import NmtError, StoppedError
from nmt.runtime.distributed import World, from_main, gather
from nmt.runtime.progress import Progress
from nmt.training import checkpoints, costs
from nmt.training.checkpoints import Saver, TrainerState
from nmt.training.checks import SpikeDetector, describe_batches, listen
from nmt.training.learner import Outcome
from nmt.training.metrics import Meter, RunLog
from nmt.training.microbatches import Batch
from nmt.training.optimizer import learning_rate
from nmt.training.start import Setup
from nmt.translate.lines import prefetch

log = logging.getLogger(__name__)


def train(config: TrainConfig, config_yaml: str, world: World, device: torch.device) -> int:
    """Train to `max_updates` or until patience ends; return the number of updates done.

    A run folder with checkpoints is continued; `config_yaml` is saved in it. Raises `StoppedError`
    when a signal ended the run before; it is saved then.
    """
    setup = Setup(config, world, device)
    with ExitStack() as stack:
        stop = stack.enter_context(listen())
        if world.is_main:
            lock = checkpoints.locked(setup.run_dir, timeout_seconds=config.timeout_seconds)
            stack.enter_context(lock)
        state = setup.resume()
        if world.is_main:
            with checkpoints.writing(setup.run_dir):
                checkpoints.save_config(setup.run_dir, config_yaml)
        stack.enter_context(setup.learner.connected())
        run = TrainingRun(setup, state, stop)
        stack.callback(run.log.close)
        stack.enter_context(run.progress)
        was_over = run.is_complete()
        run.validate_late()
        while not (run.is_stopped or run.is_complete()):
            run.train_epoch()
        run.finish()
        if not was_over:
            log.info("the run ends: %s", run.why_over())
    return state.update


def dry_run(config: TrainConfig, world: World, device: torch.device) -> str:
    """Try the largest batches and make some updates; return what a run would take, in lines.

    Nothing is read from the run folder, or written to it.
    """
    setup = Setup(config, world, device)
    learner, updates = setup.learner, setup.sampler_at(0).updates(0)

    def step(update: Update) -> float:
        rate = learning_rate(1, config)
        outcome = learner.update(update, learner.make_batches(update), rate, is_stop_asked=False)
        costs.synchronize(device)
        return outcome.flops

    with learner.connected():
        peak_bytes = setup.try_largest(updates.pool_of(0))
        pace = costs.measure_pace(step, updates)
        peak_bytes = max(peak_bytes, costs.peak_memory_bytes(device))
        of_what = "the process" if device.type == "cpu" else "tensors"
        state_bytes, there = learner.state_bytes(), costs.device_memory_bytes(device)
        of_what += f", of {there / 1e9:.2f} GB," if there else ""
        shares = "; sharding=full is not needed"
        if learner.sharded is not None:
            shares = f", 1/{world.size} of them by sharding=full"
        elif world.size > 1:
            shares += f", and leaves 1/{world.size} of that"
        return costs.report(
            updates,
            learner.lengths,
            pace,
            num_updates=config.max_updates,
            memory=f"{peak_bytes / 1e9:.2f} GB of {of_what} on each device, at the peak; "
            f"weights, gradients and moments are {state_bytes / 1e9:.2f} GB{shares}",
            flops_per_second=learner.measure_rate(),
            now=datetime.now(),
        )


class TrainingRun:
    """One rank of a run at work, from the state that it continues from to its end."""

    def __init__(self, setup: Setup, state: TrainerState, stop: list[Signals]) -> None:
        config, world = setup.config, setup.world
        self.setup, self.config, self.learner = setup, config, setup.learner
        self.state, self.stop = state, stop
        self.is_stopped = False
        self.saved_position = state.position
        self.meter, self.spikes = Meter(), SpikeDetector()
        if self.is_complete():
            log.info("the run was over: %s", self.why_over())
        else:
            setup.describe(state)
        self.flops_per_second = self.learner.measure_rate()
        self.log = RunLog(setup.run_dir, state, config, is_main=world.is_main)
        self.progress = Progress(
            "train", "updates",
            total=config.max_updates, done=state.update, has_bar=world.is_main,
        )  # fmt: skip
        self.saver: Saver | None = None  # on rank 0
        if world.is_main:
            self.saver = Saver(setup.run_dir, update=state.update, keep_last=config.keep_last)

    def is_complete(self) -> bool:
        """Whether all updates are done, or so many validations in a row were no better."""
        has_patience = not 0 < self.config.patience <= self.state.bad_validations
        return self.state.update >= self.config.max_updates or not has_patience

    def why_over(self) -> str:
        """Say why a complete run is so, and how to go on."""
        config, state = self.config, self.state
        if state.update >= config.max_updates:
            return f"{state.update} updates are done; a larger max_updates goes on"
        return (
            f"{state.bad_validations} validations without a better {config.best_metric.value} "
            f"(patience={config.patience}) after update {state.update}, the best is update "
            f"{state.best[0][1]}; a larger patience, or patience=0, goes on"
        )

    def is_due(self, every_updates: int) -> bool:
        """Whether something done so often, and at the end, is to be done after this update."""
        is_last = self.state.update == self.config.max_updates
        return is_last or self.state.update % every_updates == 0

    def validate_late(self) -> None:
        """Validate the newest checkpoint if it was saved, but not validated any more."""
        if self.state.update != self.state.validated and from_main(
            self.is_due(self.config.validate_every_updates) or self.log.lost_validation
        ):
            self.validate()

    def train_epoch(self) -> None:
        """Make the remaining updates of an epoch, until another stage begins or the run is over."""
        epoch, sampler = self.state.epoch, self.setup.sampler_at(self.state.update)
        updates = sampler.updates(epoch)
        rest = ((i, updates[i]) for i in range(self.state.update_in_epoch, len(updates)))
        # a pair that a mix repeats in an epoch has other noise each time
        work = ((update, self.learner.make_batches(update, epoch << 32 | i)) for i, update in rest)
        for update, batches in prefetch(work, leave_seconds=60):
            outcome = self.update(update, batches)
            self.state.update += outcome.is_finite
            self.state.update_in_epoch += 1
            next_sampler = self.setup.sampler_at(self.state.update)
            if next_sampler is not sampler or self.state.update_in_epoch == len(updates):
                self.state.epoch, self.state.update_in_epoch = self.state.epoch + 1, 0
            if outcome.is_finite:
                self.after_update(outcome)
            if self.is_stopped or self.is_complete():
                return
            if next_sampler is not sampler:
                self.progress.note(f"a stage begins: an epoch draws {next_sampler.mix}")
                return

    def update(self, update: Update, batches: list[list[Batch]]) -> Outcome:
        """Change the weights once; log an update that is not finite, or whose loss is a spike."""
        number = self.state.update + 1
        checkpoints.seed_update(self.config.seed, self.state, self.setup.world.rank)
        rate = learning_rate(number, self.config)
        outcome = self.learner.update(update, batches, rate, is_stop_asked=bool(self.stop))
        self.is_stopped = outcome.is_stop_asked
        loss = outcome.loss_sum / outcome.num_tokens
        if outcome.is_finite:
            self.state.bad_updates = 0
            self.meter.done.append(outcome)
            self.state.flops += outcome.flops
            if self.spikes.is_spike(loss):
                self._report("loss spike", loss, update, outcome)
        else:
            reason = self._report("not finite, left out", loss, update, outcome)
            scaler = self.learner.scaler  # whose scale may only be too high still
            self.state.bad_updates += not (scaler.is_enabled() and scaler.get_scale() > 1)
            if self.state.bad_updates >= self.config.max_bad_updates:
                raise NmtError(
                    f"update {number}: {self.state.bad_updates} times in a row the loss or the "
                    f"gradient was not finite; last: {reason}. The weights are as after update "
                    f"{number - 1}; lower the learning rate, set optimizer.max_grad_norm=1, or use "
                    "dtype=float32 or bfloat16"
                )
        return outcome

    def _report(self, event: str, loss: float, update: Update, outcome: Outcome) -> str:
        """Log an event with the pairs of its batches, of all ranks; return their description."""
        lengths, number = self.learner.lengths, self.state.update + 1
        sums = zip(update.batches, outcome.batch_losses.tolist(), strict=False)
        here = [(rows, loss_sum / int(lengths[rows, 1].sum())) for rows, loss_sum in sums]
        reason = describe_batches([batch for part in gather(here) for batch in part])
        self.progress.note(f"update {number}: {event}: loss {loss:.4g}; {reason}")
        self.log.write({"update": number, "event": event, "batch": reason})
        return reason

    def after_update(self, outcome: Outcome) -> None:
        """Log, save and validate, each when it is due."""
        self.progress.update()
        if self.is_due(self.config.log_every_updates):
            self._log_figures(outcome)
        validates = self.is_due(self.config.validate_every_updates)
        if validates or self.is_due(self.config.checkpoint_every_updates):
            self.save()  # before validation, so that its failure loses nothing
        if validates and (not self.is_stopped or self.is_complete()):
            self.validate()  # after a signal, whose sender may not wait, the next start does it

    def _log_figures(self, outcome: Outcome) -> None:
        record = {
            "update": self.state.update,
            "epoch": self.state.epoch,
            **self.meter.record(self.flops_per_second),
            "model_flops": self.state.flops,
            "learning_rate": learning_rate(self.state.update, self.config),
            "gradient_norm": outcome.gradient_norm,
            "memory_bytes": costs.peak_memory_bytes(self.learner.device),
        }
        self.log.write(record)
        self.progress.show(
            f"loss {record['loss']:.3f}, lr {record['learning_rate']:.2e}, "
            f"tok/s {record['tokens_per_second']:.0f}"
        )
        self.meter = Meter()

    def validate(self) -> None:
        """Score the model on the validation set, log it, and mark the best checkpoint."""
        start_seconds = time.perf_counter()
        record = self.setup.validation(self.learner.best_model)
        record["validation_seconds"] = time.perf_counter() - start_seconds
        self.log.write({"update": self.state.update, **record})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.items())
        self.progress.note(f"update {self.state.update}: {figures}")
        self.state.validated = self.state.update
        metric = self.config.best_metric
        badness = record[f"valid_{metric.value}"] * (-1 if metric is BestMetric.bleu else 1)
        if self.state.best_metric not in ("", metric.value):
            self.state.best = []  # of another measure
        self.state.best_metric = metric.value
        is_best = not self.state.best or badness < self.state.best[0][0]
        counts = self.state.update > max(self.setup.samplers)  # in the last stage
        self.state.bad_validations = self.state.bad_validations + 1 if counts and not is_best else 0
        ranked = sorted([*self.state.best, [badness, self.state.update]])
        self.state.best = ranked[: max(self.config.keep_best, 1)]
        if self.saver is not None:
            self.saver.mark_best([update for _, update in self.state.best])
        self.meter.start_seconds += time.perf_counter() - start_seconds  # not of training

    def save(self) -> None:
        """Begin to write a checkpoint."""
        self.saved_position = self.state.position
        learner, keeps = self.learner, self.saver is not None
        weights, state = learner.weights(), learner.state_dict()
        if learner.sharded is not None:  # by all ranks
            weights = learner.sharded.gather(weights, keeps=keeps)
            state = learner.sharded.gather(state, keeps=keeps)
        if self.saver is None:
            return
        tokenizer, meta = self.setup.tokenizer, self.setup.meta
        info = ModelInfo(
            model=self.config.model,
            search=self.config.search,
            vocab_size=tokenizer.tgt.vocab_size,
            src_lang=meta.src_lang,
            tgt_lang=meta.tgt_lang,
            tokenizer_sha256=tokenizer.sha256,
            updates=self.state.update,
            src_vocab_size=tokenizer.src_vocab_size,
            directions=list(dict.fromkeys(meta.directions.values())),
        )
        training = {
            "state": asdict(self.state),
            "learner": state,
            "world_size": self.setup.world.size,
            "num_threads": torch.get_num_threads(),
            "fingerprint": self.setup.fingerprint,
        }
        best = [at for _, at in self.state.best]
        self.saver.save(weights, info, tokenizer, training=training, best=best)

    def finish(self) -> None:
        """Wait until the newest checkpoint is on disk; write one first after a signal."""
        if self.is_stopped and self.saved_position != self.state.position:
            self.save()
        if self.saver is not None:
            self.saver.finish()
        from_main(None)  # nobody leaves before it is written
        if self.is_stopped and not self.is_complete():
            by = self.stop[0].name if self.stop else "a signal to another rank"
            saved = f"after update {self.state.update}, which is saved; the same command goes on"
            raise StoppedError(f"stopped by {by} {saved}")
