"""A training run: set up, resume, update, validate, save.

Every rank runs the same lines and makes the same decisions, so that all leave the loop together.
Only rank 0 reads and writes the run folder, and logs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from signal import Signals
from typing import Any

import torch

from nmt.checkpoint import ModelInfo
from nmt.config import BestMetric, TrainConfig
from nmt.data.batch import padding_share
from nmt.data.batching import Update
from nmt.errors import ModelError, NmtError, StoppedError
from nmt.model.transformer import num_parameters
from nmt.runtime.distributed import World, from_main, gather
from nmt.runtime.prefetch import prefetch
from nmt.runtime.progress import Progress
from nmt.training.batches import Batch
from nmt.training.build import Run, build_run
from nmt.training.checkpoints import (
    BestCheckpoint,
    Checkpoint,
    Saver,
    TrainerState,
    load_newest,
    seed_update,
)
from nmt.training.checks import SpikeDetector, describe_batches, stop_signals
from nmt.training.costs import peak_memory_bytes
from nmt.training.initial_weights import load_initial_weights
from nmt.training.learner import UpdateResult
from nmt.training.metrics import Meter, RunLog
from nmt.training.preflight import try_largest_batches
from nmt.training.run_folder import check_fingerprint, lock_run_dir, run_dir_errors, save_config
from nmt.training.schedule import learning_rate, peak_learning_rate

log = logging.getLogger(__name__)


def train(config: TrainConfig, config_yaml: str, world: World, device: torch.device) -> int:
    """Train until `max_updates` or until patience ends; return the number of updates.

    A run folder with checkpoints is resumed; `config_yaml` is saved in it. Raises `StoppedError`
    when a signal ended the run early, after saving it.
    """
    run = build_run(config, world, device)
    with ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        if world.is_main:
            lock = lock_run_dir(run.run_dir, timeout_seconds=config.timeout_seconds)
            stack.enter_context(lock)
        state = load_run(run)
        if world.is_main:
            with run_dir_errors(run.run_dir):
                save_config(run.run_dir, config_yaml)
        stack.enter_context(run.learner.connected())
        trainer = Trainer(run, state, signals)
        stack.callback(trainer.log.close)
        stack.enter_context(trainer.progress)
        was_complete = trainer.is_complete()
        trainer.repeat_lost_validation()
        while not (trainer.is_stopped or trainer.is_complete()):
            trainer.train_epoch()
        trainer.finish()
        if not was_complete:
            log.info("the run ends: %s", trainer.end_reason())
    return state.num_updates


# --- set up


def load_run(run: Run) -> TrainerState:
    """Load the newest checkpoint, or else the weights of `init_from`; return the state."""
    checkpoint = None
    if run.world.is_main:
        checkpoint = load_newest(run.run_dir)
        if checkpoint is not None:
            check_fingerprint(checkpoint.folder, checkpoint.fingerprint, run.fingerprint)
    checkpoint = from_main(checkpoint)
    if checkpoint is None:
        if run.config.init_from is not None:
            fresh = run.learner.model.state_dict()
            run.learner.start_from(load_initial_weights(run.config, run.tokenizers, fresh))
        return TrainerState()
    run.learner.load_state_dict(checkpoint.learner, checkpoint.weights)
    _restore_threads(run, checkpoint)
    log.info("resuming after update %d from %s", checkpoint.state.num_updates, checkpoint.folder)
    if checkpoint.world_size != run.world.size:
        log.info(
            "resuming with %d processes instead of %d: the data order is unchanged, but results "
            "are not bit-identical",
            run.world.size,
            checkpoint.world_size,
        )
    return checkpoint.state


def _restore_threads(run: Run, checkpoint: Checkpoint) -> None:
    """Use the checkpoint's number of threads, on which the bits of results depend."""
    is_chosen = run.config.num_threads or "OMP_NUM_THREADS" in os.environ
    is_possible = 1 <= checkpoint.num_threads <= (os.cpu_count() or 1)
    if run.world.size == 1 and is_possible and not is_chosen:
        torch.set_num_threads(checkpoint.num_threads)


def log_plan(run: Run, state: TrainerState) -> None:
    """Log the updates of an epoch and the model; check that the largest batches fit."""
    sampler = run.sampler_at(state.num_updates)
    num_ranks = run.world.size
    updates = sampler.updates(state.epoch)
    if state.epoch_position >= len(updates):
        raise ModelError(
            f"the newest checkpoint in {run.run_dir} is damaged: it was saved after update "
            f"{state.epoch_position} of an epoch of {len(updates)}; remove it to resume another"
        )
    planned = updates.pool_of(state.epoch_position)
    batches = [rows for plan in planned for rows in plan.batches]
    update_tokens = sum(plan.num_tokens for plan in planned) / len(planned)
    rank_tokens = sum(int(sampler.lengths[rows, 1].sum()) for rows in batches)
    batch_tokens = rank_tokens / len(batches) if batches else 1.0
    vocabulary = str(run.tokenizers.tgt.vocab_size)
    if run.tokenizers.src_vocab_size is not None:
        vocabulary = f"{run.tokenizers.src_vocab_size} of the source and {vocabulary} of the target"
    lines = [
        f"{updates.num_pairs} pairs; {len(updates)} updates an epoch; "
        f"{100 * padding_share(sampler.lengths, batches):.1f} % padding",
        f"{update_tokens:.0f} target tokens an update = {batch_tokens:.0f} a batch x "
        f"{update_tokens / batch_tokens / num_ranks:.1f} batches x {num_ranks} "
        f"process{'es' if num_ranks > 1 else ''}",
        f"{num_parameters(run.learner.model)} parameters, vocabulary {vocabulary}, "
        f"{run.learner.device}, {str(run.learner.dtype).removeprefix('torch.')}; learning rate "
        f"{peak_learning_rate(run.config):.3e} at its peak, update "
        f"{run.config.optimizer.warmup_steps}",
        f"an epoch draws {sampler.mix}",
    ]
    for line in lines:
        log.info(line)
    peak_bytes = try_largest_batches(run.learner, run.samplers.values(), planned)
    log.info("the largest batches fit: %.2f GB at the peak", peak_bytes / 1e9)


class Trainer:
    """Trains a run on one rank, from a state to the end."""

    def __init__(self, run: Run, state: TrainerState, signals: list[Signals]) -> None:
        """Continue from `state`. `signals` is empty until a signal asks for the run to stop."""
        self.run = run
        self.config = run.config
        self.learner = run.learner
        self.state = state
        self.signals = signals
        self.is_stopped = False
        self.saved_position = state.position
        self.meter = Meter()
        self.spikes = SpikeDetector()
        if self.is_complete():
            log.info("the run was over: %s", self.end_reason())
        else:
            log_plan(run, state)
        self.flops_per_second = self.learner.measure_rate()
        is_main = run.world.is_main
        self.log = RunLog(run.run_dir, state, self.config, is_main=is_main)
        self.progress = Progress(
            "train",
            "updates",
            total=self.config.max_updates,
            done=state.num_updates,
            has_bar=is_main,
        )
        self.saver: Saver | None = None  # on rank 0
        if is_main:
            keep_last = self.config.keep_last
            self.saver = Saver(run.run_dir, update=state.num_updates, keep_last=keep_last)

    # --- the end of a run

    def is_complete(self) -> bool:
        """Whether all updates are done, or patience has run out."""
        is_patience_over = 0 < self.config.patience <= self.state.bad_validations
        return self.state.num_updates >= self.config.max_updates or is_patience_over

    def end_reason(self) -> str:
        """Say why a complete run ended, and how to extend it."""
        config = self.config
        state = self.state
        if state.num_updates >= config.max_updates:
            return f"{state.num_updates} updates are done; a larger max_updates goes on"
        return (
            f"{state.bad_validations} validations without a better {config.best_metric.value} "
            f"(patience={config.patience}) after update {state.num_updates}, the best is update "
            f"{state.best[0].update}; a larger patience, or patience=0, goes on"
        )

    def finish(self) -> None:
        """Save if a signal stopped the run, and wait until the newest checkpoint is on disk."""
        if self.is_stopped and self.saved_position != self.state.position:
            self.save()
        if self.saver is not None:
            self.saver.finish()
        from_main(None)  # all ranks wait for the write
        if self.is_stopped and not self.is_complete():
            cause = self.signals[0].name if self.signals else "a signal to another rank"
            raise StoppedError(
                f"stopped by {cause} after update {self.state.num_updates}, which is saved; the "
                "same command goes on"
            )

    # --- updates

    def train_epoch(self) -> None:
        """Make the remaining updates of an epoch, until another stage begins or the run ends."""
        state = self.state
        epoch = state.epoch
        start = state.epoch_position
        sampler = self.run.sampler_at(state.num_updates)
        updates = sampler.updates(epoch)

        def make_batches() -> Iterator[tuple[Update, list[list[Batch]]]]:
            for i in range(start, len(updates)):
                # numbered by the update, since a mix may repeat a pair in an epoch
                yield updates[i], self.learner.batch_maker.make(updates[i], epoch << 32 | i)

        for plan, batches in prefetch(make_batches(), leave_seconds=60):
            result = self.train_update(plan, batches)
            state.num_updates += result.is_finite
            state.epoch_position += 1
            next_sampler = self.run.sampler_at(state.num_updates)
            is_new_stage = next_sampler is not sampler
            if is_new_stage or state.epoch_position == len(updates):
                state.epoch += 1
                state.epoch_position = 0
            if result.is_finite:
                self.after_update(result)
            if self.is_stopped or self.is_complete():
                return
            if is_new_stage:
                self.progress.note(f"a stage begins: an epoch draws {next_sampler.mix}")
                return

    def train_update(self, plan: Update, batches: list[list[Batch]]) -> UpdateResult:
        """Change the weights once; log a result that is not finite or whose loss is a spike."""
        step = self.state.num_updates + 1
        seed_update(self.config.seed, self.state, self.run.world.rank)
        result = self.learner.update(
            plan,
            batches,
            learning_rate(step, self.config),
            is_stop_requested=bool(self.signals),
        )
        self.is_stopped = result.is_stop_requested
        if not result.is_finite:
            self._count_bad_update(plan, result)
            return result
        self.state.bad_updates = 0
        self.state.flops += result.flops
        self.meter.results.append(result)
        if self.spikes.is_spike(result.loss_sum / result.num_tokens):
            self._log_event("loss spike", plan, result)
        return result

    def _count_bad_update(self, plan: Update, result: UpdateResult) -> None:
        """Log an update that is not finite; raise an `NmtError` if `max_bad_updates` is reached."""
        description = self._log_event("not finite, left out", plan, result)
        scaler = self.learner.scaler
        is_scale_falling = scaler.is_enabled() and scaler.get_scale() > 1  # which may help
        self.state.bad_updates += not is_scale_falling
        if self.state.bad_updates >= self.config.max_bad_updates:
            step = self.state.num_updates + 1
            raise NmtError(
                f"update {step}: {self.state.bad_updates} times in a row the loss or the gradient "
                f"was not finite; last: {description}. The weights are as after update "
                f"{step - 1}; lower the learning rate, set optimizer.max_grad_norm=1, or use "
                "dtype=float32 or bfloat16"
            )

    def _log_event(self, event: str, plan: Update, result: UpdateResult) -> str:
        """Log an event with the pairs of its batches, of all ranks; return their description."""
        lengths = self.learner.batch_maker.lengths
        rank_batches = []
        for rows, loss_sum in zip(plan.batches, result.batch_losses.tolist(), strict=False):
            rank_batches.append((rows, loss_sum / int(lengths[rows, 1].sum())))
        batches = [batch for gathered in gather(rank_batches) for batch in gathered]
        description = describe_batches(batches)
        step = self.state.num_updates + 1
        loss = result.loss_sum / result.num_tokens
        self.progress.note(f"update {step}: {event}: loss {loss:.4g}; {description}")
        self.log.write({"update": step, "event": event, "batch": description})
        return description

    def after_update(self, result: UpdateResult) -> None:
        """Log, save and validate, each when it is due."""
        config = self.config
        self.progress.update()
        if self.is_due(config.log_every_updates):
            self._log_metrics(result)
        is_validation_due = self.is_due(config.validate_every_updates)
        if is_validation_due or self.is_due(config.checkpoint_every_updates):
            self.save()  # before validation, so that a failure there loses nothing
        # after a signal the sender may not wait: the next start validates instead
        if is_validation_due and (not self.is_stopped or self.is_complete()):
            self.validate()

    def is_due(self, every_updates: int) -> bool:
        """Whether an action is due after this update: every `every_updates`, and after the last."""
        is_last = self.state.num_updates == self.config.max_updates
        return is_last or self.state.num_updates % every_updates == 0

    def _log_metrics(self, result: UpdateResult) -> None:
        rate = learning_rate(self.state.num_updates, self.config)
        record = {
            "update": self.state.num_updates,
            "epoch": self.state.epoch,
            **self.meter.record(self.flops_per_second),
            "model_flops": self.state.flops,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "memory_bytes": peak_memory_bytes(self.learner.device),
        }
        self.log.write(record)
        tokens_per_second = record["tokens_per_second"]
        self.progress.show(
            f"loss {record['loss']:.3f}, lr {rate:.2e}, tok/s {tokens_per_second:.0f}"
        )
        self.meter = Meter()

    # --- validation

    def repeat_lost_validation(self) -> None:
        """Validate the newest checkpoint if the run was killed between saving and validating it."""
        if self.state.num_updates == self.state.validated_update:
            return
        is_due = self.is_due(self.config.validate_every_updates)
        if from_main(is_due or self.log.lost_validation):
            self.validate()

    def validate(self) -> None:
        """Score the model on the validation set, log the figures, and mark the best checkpoint."""
        start_seconds = time.perf_counter()
        figures = self.run.validation(self.learner.best_model)
        figures["validation_seconds"] = time.perf_counter() - start_seconds
        num_updates = self.state.num_updates
        self.log.write({"update": num_updates, **figures})
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.progress.note(f"update {num_updates}: {text}")
        self.state.validated_update = num_updates
        self._rank_checkpoint(figures)
        if self.saver is not None:
            self.saver.mark_best(self._best_updates())
        self.meter.start_seconds += time.perf_counter() - start_seconds  # not counted as training

    def _rank_checkpoint(self, figures: dict[str, Any]) -> None:
        """Rank the validated update among the best, and count validations without a better one."""
        state = self.state
        metric = self.config.best_metric
        badness = figures[f"valid_{metric.value}"]
        if metric is BestMetric.bleu:
            badness = -badness
        if state.best_metric != metric.value:
            state.best = []
        state.best_metric = metric.value
        is_best = not state.best or badness < state.best[0].badness
        is_last_stage = state.num_updates > self.run.last_stage_start
        state.bad_validations = state.bad_validations + 1 if is_last_stage and not is_best else 0
        ranked = [*state.best, BestCheckpoint(badness, state.num_updates)]
        ranked.sort(key=lambda checkpoint: (checkpoint.badness, checkpoint.update))
        state.best = ranked[: self.config.keep_best]

    def _best_updates(self) -> list[int]:
        return [checkpoint.update for checkpoint in self.state.best]

    # --- saving

    def save(self) -> None:
        """Start to write a checkpoint."""
        self.saved_position = self.state.position
        learner = self.learner
        weights = learner.weights()
        learner_state = learner.state_dict()
        if learner.sharded is not None:  # all ranks take part
            is_main = self.saver is not None
            weights = learner.sharded.gather(weights, should_keep=is_main)
            learner_state = learner.sharded.gather(learner_state, should_keep=is_main)
        if self.saver is None:
            return
        training = {
            "state": asdict(self.state),
            "learner": learner_state,
            "world_size": self.run.world.size,
            "num_threads": torch.get_num_threads(),
            "fingerprint": self.run.fingerprint,
        }
        self.saver.save(
            weights,
            self._model_info(),
            self.run.tokenizers,
            training=training,
            best=self._best_updates(),
        )

    def _model_info(self) -> ModelInfo:
        tokenizers = self.run.tokenizers
        data_info = self.run.data_info
        return ModelInfo(
            model=self.config.model,
            search=self.config.search,
            vocab_size=tokenizers.tgt.vocab_size,
            src_lang=data_info.src_lang,
            tgt_lang=data_info.tgt_lang,
            tokenizer_sha256=tokenizers.sha256,
            updates=self.state.num_updates,
            src_vocab_size=tokenizers.src_vocab_size,
            directions=list(dict.fromkeys(data_info.directions.values())),
        )
