"""The training loop: update the weights, log, save checkpoints and validate.

All ranks run the same code and take the same decisions, so that they leave the loop together. Only
rank 0 logs, and reads and writes the run folder.

A run may have several stages. A stage begins after a given update, and changes how often each
corpus is drawn, or how text is augmented.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from signal import Signals
from typing import Any

import torch

from nmt.checkpoint import ModelInfo
from nmt.config import BestMetric, TrainConfig
from nmt.data.augment import TextAugmenter
from nmt.data.batching import EpochPlan, TokenBatchSampler, UpdatePlan
from nmt.errors import NmtError, StoppedError
from nmt.runtime.distributed import World, broadcast_from_main, gather
from nmt.runtime.prefetch import prefetch
from nmt.runtime.progress import Progress
from nmt.training.batches import Batch
from nmt.training.build import Run, build_run
from nmt.training.checkpoints import (
    BestCheckpoint,
    Saver,
    TrainerState,
    seed_update,
)
from nmt.training.checks import SpikeDetector, describe_batches, stop_signals
from nmt.training.costs import peak_memory_bytes
from nmt.training.learner import UpdateResult
from nmt.training.metrics import Meter, MetricsWriter
from nmt.training.profiling import UpdateProfiler
from nmt.training.run_folder import lock_run_dir, run_dir_errors, save_config
from nmt.training.schedule import learning_rate
from nmt.training.start import check_memory, log_plan, resume_or_start

log = logging.getLogger(__name__)


def train(config: TrainConfig, config_yaml: str, world: World, device: torch.device) -> int:
    """Train until `max_updates` are done or early stopping ends the run; return their number.

    Resumes the run if its folder has checkpoints. Saves `config_yaml` in the folder. Raises
    `StoppedError` if a signal stopped the run, after saving a checkpoint.
    """
    run = build_run(config, world, device)
    with ExitStack() as stack:
        signals = stack.enter_context(stop_signals())
        if world.is_main:
            lock = lock_run_dir(run.run_dir, timeout_seconds=config.timeout_seconds)
            stack.enter_context(lock)
        state = resume_or_start(run)
        if world.is_main:
            with run_dir_errors(run.run_dir):
                save_config(run.run_dir, config_yaml)
        stack.enter_context(run.learner.ranks_connected())  # to exchange gradients
        trainer = Trainer(run, state, signals)
        stack.callback(trainer.metrics_writer.close)
        stack.callback(trainer.profiler.close)
        stack.enter_context(trainer.progress)
        was_complete = trainer.is_complete()  # before any update of this process
        trainer.repeat_lost_validation()
        while not (trainer.is_stopped or trainer.is_complete()):
            trainer.train_epoch()
        trainer.finish()
        if not was_complete:
            log.info("the run ends: %s", trainer.end_reason())
    return state.num_updates


class Trainer:
    """Continues a run from `state` on one rank, and keeps `state` up to date.

    A signal handler adds the signals that this process receives to the list `signals`. When any
    rank has received one, the run stops after the current update.
    """

    def __init__(self, run: Run, state: TrainerState, signals: list[Signals]) -> None:
        self.run = run
        self.config = run.config
        self.learner = run.learner
        self.state = state
        self.signals = signals
        self.is_stopped = False  # whether a signal to any rank stopped the run
        self.saved_position = state.position  # value of `state.position` in the newest checkpoint
        self.meter = Meter()
        self.spike_detector = SpikeDetector()
        if self.is_complete():
            log.info("the run was over: %s", self.end_reason())
        else:
            log_plan(run, state)
            check_memory(run, state)
        self.peak_flops_per_second = self.learner.measure_peak_flops_per_second()
        is_main = run.world.is_main
        self.metrics_writer = MetricsWriter(run.run_dir, state, self.config, is_main=is_main)
        self.progress = Progress(
            "train",
            "updates",
            total=self.config.max_updates,
            done=state.num_updates,
            has_bar=is_main,
        )
        profiled_updates = self.config.profiled_updates if is_main else range(0)
        self.profiler = UpdateProfiler(profiled_updates, run.run_dir / "trace.json")
        self.saver: Saver | None = None  # only rank 0 has one
        if is_main:
            keep_last = self.config.keep_last
            self.saver = Saver(run.run_dir, update=state.num_updates, keep_last=keep_last)

    # --- the end of a run

    def is_complete(self) -> bool:
        """Whether all updates are done, or early stopping (`patience`) ends the run."""
        if self.state.num_updates >= self.config.max_updates:
            return True
        has_early_stopping = self.config.patience > 0
        return has_early_stopping and self.state.bad_validations >= self.config.patience

    def end_reason(self) -> str:
        """Say why a complete run ended, and how to extend it."""
        config = self.config
        state = self.state
        if state.num_updates >= config.max_updates:
            return f"{state.num_updates} updates are done; a larger max_updates goes on"
        return (
            f"{state.bad_validations} validations without a better {config.best_metric.value} "
            f"(patience={config.patience}) after update {state.num_updates}, the best is update "
            f"{state.best[0].update}; to go on, set patience=0 or a larger number"
        )

    def finish(self) -> None:
        """Save if a signal stopped the run; return when the newest checkpoint is on disk.

        Raises `StoppedError` if the signal came before the run was complete.
        """
        if self.is_stopped and self.saved_position != self.state.position:
            self.save()
        if self.saver is not None:
            self.saver.finish()
        broadcast_from_main(None)  # all ranks wait for the write
        if self.is_stopped and not self.is_complete():
            cause = "a signal to another rank"
            if self.signals:
                cause = self.signals[0].name
            raise StoppedError(
                f"stopped by {cause} after update {self.state.num_updates}, which is saved; the "
                "same command goes on"
            )

    # --- updates

    def train_epoch(self) -> None:
        """Make the remaining updates of the epoch, unless a new stage begins or the run ends."""
        state = self.state
        sampler = self.run.sampler_at(state.num_updates)
        epoch_plan = sampler.plan_epoch(state.epoch)
        updates = self._prepare_updates(
            epoch_plan,
            epoch=state.epoch,
            start=state.epoch_position,
            augment=self.run.augmenter_at(state.num_updates),
        )
        # if the loop ends early, wait for the thread, which may still be preparing an update
        for plan, batches in prefetch(updates, join_seconds=60):
            result = self.train_update(plan, batches)
            self._advance(result, sampler, len(epoch_plan))
            if result.is_finite:
                self.after_update(result)
            if self.is_stopped or self.is_complete():
                return
            next_sampler = self.run.sampler_at(state.num_updates)
            if next_sampler is not sampler:
                self.progress.note(f"a stage begins: an epoch draws {next_sampler.mix}")
                return

    def _prepare_updates(
        self, epoch_plan: EpochPlan, *, epoch: int, start: int, augment: TextAugmenter | None
    ) -> Iterator[tuple[UpdatePlan, list[list[Batch]]]]:
        """Yield the updates of an epoch from index `start` on, each with its micro-batches."""
        for index in range(start, len(epoch_plan)):
            plan = epoch_plan[index]
            # A number for each update, from which the random changes of its pairs are drawn. A mix
            # may repeat a pair in an epoch, so the number of the epoch is not enough.
            update_id = (epoch << 32) + index
            yield plan, self.learner.batch_maker.make_batches(plan, update_id, augment)

    def _advance(self, result: UpdateResult, sampler: TokenBatchSampler, epoch_length: int) -> None:
        """Count an update in the state. At the end of an epoch or a stage, begin the next epoch."""
        state = self.state
        if result.is_finite:
            state.num_updates += 1
        state.epoch_position += 1
        is_new_stage = self.run.sampler_at(state.num_updates) is not sampler
        if is_new_stage or state.epoch_position == epoch_length:
            state.epoch += 1
            state.epoch_position = 0

    def train_update(self, plan: UpdatePlan, batches: list[list[Batch]]) -> UpdateResult:
        """Change the weights once; log a result that is not finite or whose loss is a spike.

        Sets `is_stopped` if a signal has reached any rank.
        """
        step = self.state.num_updates + 1
        self.profiler.start_update(step)
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
        if self.spike_detector.is_spike(result.loss):
            self._log_event("loss spike", plan, result)
        return result

    def _count_bad_update(self, plan: UpdatePlan, result: UpdateResult) -> None:
        """Log an update that is not finite; raise an `NmtError` if `max_bad_updates` is reached."""
        description = self._log_event("not finite, left out", plan, result)
        scaler = self.learner.scaler
        # a lower loss scale may make the next update finite
        can_lower_scale = scaler.is_enabled() and scaler.get_scale() > 1
        if not can_lower_scale:
            self.state.bad_updates += 1
        if self.state.bad_updates >= self.config.max_bad_updates:
            step = self.state.num_updates + 1
            raise NmtError(
                f"update {step}: {self.state.bad_updates} times in a row the loss or the gradient "
                f"was not finite; last: {description}. The weights are as after update "
                f"{step - 1}; lower the learning rate, set optimizer.max_grad_norm=1, or use "
                "dtype=float32 or bfloat16"
            )

    def _log_event(self, event: str, plan: UpdatePlan, result: UpdateResult) -> str:
        """Log an event of an update; return a description of the batches that may have caused it.

        All ranks must call it, since it gathers their batches.
        """
        lengths = self.learner.batch_maker.lengths
        rank_losses = []  # the rows of each batch of this rank, and its loss per token
        # Not strict: a rank without batches has a loss, the loss of its filler, but no rows.
        for rows, loss_sum in zip(plan.batches, result.batch_losses.tolist(), strict=False):
            num_tokens = int(lengths[rows, 1].sum())  # of targets
            rank_losses.append((rows, loss_sum / num_tokens))
        all_losses = list(itertools.chain.from_iterable(gather(rank_losses)))
        description = describe_batches(all_losses)
        step = self.state.num_updates + 1
        self.progress.note(f"update {step}: {event}: loss {result.loss:.4g}; {description}")
        self.metrics_writer.write({"update": step, "event": event, "batch": description})
        return description

    def after_update(self, result: UpdateResult) -> None:
        """Log metrics, save a checkpoint and validate, if the config says so for this update."""
        config = self.config
        self.progress.update()
        if self.is_due(config.log_every_updates):
            self._log_metrics(result)
        is_validation_due = self.is_due(config.validate_every_updates)
        if is_validation_due or self.is_due(config.checkpoint_every_updates):
            self.save()  # before validation, so that a failure there loses nothing
        # After a signal, this process may be killed soon. The resumed run validates instead.
        will_stop = self.is_stopped and not self.is_complete()
        if is_validation_due and not will_stop:
            self.validate()

    def is_due(self, every_updates: int) -> bool:
        """Whether the newest update is a multiple of `every_updates`, or the last of the run."""
        is_last = self.state.num_updates == self.config.max_updates
        return is_last or self.state.num_updates % every_updates == 0

    def _log_metrics(self, result: UpdateResult) -> None:
        """Write the metrics since the last call, with the gradient norm of `result`."""
        current_lr = learning_rate(self.state.num_updates, self.config)
        record = {
            "update": self.state.num_updates,
            "epoch": self.state.epoch,
            **self.meter.summarize(self.peak_flops_per_second),
            "model_flops": self.state.flops,
            "learning_rate": current_lr,
            "gradient_norm": result.gradient_norm,
            "memory_bytes": peak_memory_bytes(self.learner.device),
            **self.metrics_writer.clock.read(),
        }
        self.metrics_writer.write(record)
        loss = record["loss"]
        tokens_per_second = record["tokens_per_second"]
        self.progress.show(f"loss {loss:.3f}, lr {current_lr:.2e}, tok/s {tokens_per_second:.0f}")
        self.meter = Meter()

    # --- validation

    def repeat_lost_validation(self) -> None:
        """Validate the newest checkpoint if the run was killed between saving and validating it."""
        if self.state.num_updates == self.state.validated_update:
            return
        is_due = self.is_due(self.config.validate_every_updates)
        # the result of rank 0 counts: only its `metrics_writer` knows whether a validation was lost
        if broadcast_from_main(is_due or self.metrics_writer.lost_validation):
            self.validate()

    def validate(self) -> None:
        """Score the model on the validation set, log the scores, and link the best checkpoint."""
        start_seconds = time.perf_counter()
        metrics = self.run.validation(self.learner.model_to_validate())
        metrics["validation_seconds"] = time.perf_counter() - start_seconds
        run_times = self.metrics_writer.clock.read()
        num_updates = self.state.num_updates
        self.metrics_writer.write({"update": num_updates, **metrics, **run_times})
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.progress.note(f"update {num_updates}: {text}")
        self.state.validated_update = num_updates
        self._add_to_best(metrics)
        if self.saver is not None:
            self.saver.link_best(self._best_updates())
        # move the start of the meter, since the time of validation does not count as training
        self.meter.start_seconds += time.perf_counter() - start_seconds

    def _add_to_best(self, metrics: dict[str, Any]) -> None:
        """Add the checkpoint that was validated to `best`; count validations that are no better."""
        state = self.state
        metric = self.config.best_metric
        badness = metrics[f"valid_{metric.value}"]  # lower is better
        if metric is BestMetric.bleu:
            badness = -badness
        if state.best_metric != metric.value:
            state.best = []
        state.best_metric = metric.value
        is_best = not state.best or badness < state.best[0].badness
        # in the last stage, or in a run without stages
        is_last_stage = state.num_updates > self.run.last_stage_start
        if is_best or not is_last_stage:
            state.bad_validations = 0
        else:
            state.bad_validations += 1
        ranking = [*state.best, BestCheckpoint(badness, state.num_updates)]
        ranking.sort(key=lambda checkpoint: (checkpoint.badness, checkpoint.update))
        state.best = ranking[: self.config.keep_best]

    def _best_updates(self) -> list[int]:
        return [checkpoint.update for checkpoint in self.state.best]

    # --- saving

    def save(self) -> None:
        """Start to write a checkpoint, while training continues."""
        self.saved_position = self.state.position
        learner = self.learner
        weights = learner.weights_to_save()
        learner_state = learner.state_dict()
        if learner.sharded is not None:  # all ranks must gather, but only rank 0 keeps the tensors
            is_main = self.run.world.is_main
            weights = learner.sharded.gather_to_host(weights, should_keep=is_main)
            learner_state = learner.sharded.gather_to_host(learner_state, should_keep=is_main)
        if self.saver is None:
            return
        trainer_content = {
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
            trainer_content=trainer_content,
            best_updates=self._best_updates(),
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
