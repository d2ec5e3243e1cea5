"""The start of a run: restore its state, log the plan of its updates, and check the memory."""

from __future__ import annotations

import logging
import os
from itertools import chain

import torch

from nmt.data.batch import padding_share
from nmt.errors import ModelError
from nmt.model.transformer import count_parameters
from nmt.runtime.distributed import broadcast_from_main
from nmt.training.build import Run
from nmt.training.checkpoints import Checkpoint, TrainerState, load_newest
from nmt.training.initial_weights import load_initial_weights
from nmt.training.preflight import try_largest_batches
from nmt.training.run_folder import check_fingerprint
from nmt.training.schedule import peak_learning_rate

log = logging.getLogger(__name__)
_MANY_EPOCHS = 200  # small models of small corpora still improve after 60


def resume_or_start(run: Run) -> TrainerState:
    """Restore the newest checkpoint of the run and return its state.

    Without checkpoints, load the weights of `init_from`, if it is set, and return a new state.
    """
    checkpoint = None
    if run.world.is_main:
        checkpoint = load_newest(run.run_dir)
        if checkpoint is not None:
            check_fingerprint(checkpoint.folder, checkpoint.fingerprint, run.fingerprint)
    checkpoint = broadcast_from_main(checkpoint)
    if checkpoint is None:
        if run.config.init_from is not None:
            random_weights = run.learner.model.state_dict()
            weights = load_initial_weights(run.config, run.tokenizers, random_weights)
            run.learner.set_initial_weights(weights)
        return TrainerState()
    run.learner.load_state_dict(checkpoint.learner, checkpoint.weights)
    _restore_num_threads(run, checkpoint)
    log.info("resuming after update %d from %s", checkpoint.state.num_updates, checkpoint.folder)
    if checkpoint.world_size != run.world.size:
        log.info(
            "resuming with %d processes instead of %d: the data order is unchanged, but results "
            "are not bit-identical",
            run.world.size,
            checkpoint.world_size,
        )
    return checkpoint.state


def _restore_num_threads(run: Run, checkpoint: Checkpoint) -> None:
    """Use the number of threads of the checkpoint, for bit-identical results.

    If the user has set a number, it stays.
    """
    is_set_by_user = run.config.num_threads or "OMP_NUM_THREADS" in os.environ
    is_possible = 1 <= checkpoint.num_threads <= (os.cpu_count() or 1)
    if run.world.size == 1 and is_possible and not is_set_by_user:
        torch.set_num_threads(checkpoint.num_threads)


def log_plan(run: Run, state: TrainerState) -> None:
    """Log the sizes of an epoch, of an update and of the model.

    Raises `ModelError` if `state` is at a position that its epoch does not have.
    """
    sampler = run.sampler_at(state.num_updates)
    epoch_plan = sampler.plan_epoch(state.epoch)
    if state.epoch_position >= len(epoch_plan):
        raise ModelError(
            f"the newest checkpoint in {run.run_dir} is damaged: it was saved after update "
            f"{state.epoch_position} of an epoch of {len(epoch_plan)}; remove it to resume another"
        )
    update_plans = epoch_plan.pool_of(state.epoch_position)
    rank_batches = list(chain.from_iterable(plan.batches for plan in update_plans))
    update_tokens = sum(plan.num_tokens for plan in update_plans) / len(update_plans)
    batch_tokens = 1.0  # if this rank has no batch in these updates
    if rank_batches:
        rank_tokens = sum(int(sampler.lengths[rows, 1].sum()) for rows in rank_batches)
        batch_tokens = rank_tokens / len(rank_batches)
    num_ranks = run.world.size
    batches_per_rank = update_tokens / batch_tokens / num_ranks
    process_word = "processes" if num_ranks > 1 else "process"
    vocabulary = str(run.tokenizers.tgt.vocab_size)
    if run.tokenizers.src_vocab_size is not None:
        vocabulary = f"{run.tokenizers.src_vocab_size} of the source and {vocabulary} of the target"
    lines = [
        f"{epoch_plan.num_pairs} pairs; {len(epoch_plan)} updates an epoch; "
        f"{100 * padding_share(sampler.lengths, rank_batches):.1f} % padding",
        f"{update_tokens:.0f} target tokens an update = {batch_tokens:.0f} a batch x "
        f"{batches_per_rank:.1f} batches x {num_ranks} {process_word}",
        f"{count_parameters(run.learner.model)} parameters, vocabulary {vocabulary}, "
        f"{run.learner.device}, {run.learner.dtype_name}; learning rate "
        f"{peak_learning_rate(run.config):.3e} at its peak, update "
        f"{run.config.optimizer.warmup_steps}",
        f"an epoch draws {sampler.mix}",
    ]
    num_epochs = run.config.max_updates / len(epoch_plan)
    if num_epochs > _MANY_EPOCHS and not run.config.patience:
        lines.append(
            f"max_updates={run.config.max_updates} is {num_epochs:.0f} epochs; with patience=5, "
            "the run ends once the model no longer improves on the validation set"
        )
    for line in lines:
        log.info(line)


def check_memory(run: Run, state: TrainerState) -> None:
    """Run the largest batches and log the peak memory.

    Raises `ConfigError` if they need more memory than there is.
    """
    epoch_plan = run.sampler_at(state.num_updates).plan_epoch(state.epoch)
    update_plans = epoch_plan.pool_of(state.epoch_position)
    peak_bytes = try_largest_batches(run.learner, run.samplers.values(), update_plans)
    log.info("the largest batches fit: %.2f GB at the peak", peak_bytes / 1e9)
