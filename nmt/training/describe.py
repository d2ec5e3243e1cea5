"""What a run says of itself before the first update."""

from __future__ import annotations

import logging

from nmt.config import TrainConfig
from nmt.data.batch import padding_share
from nmt.data.batching import Update, Updates
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import World
from nmt.model.transformer import num_parameters
from nmt.training.learner import Learner
from nmt.training.schedule import learning_rate

log = logging.getLogger(__name__)


def describe(
    config: TrainConfig, learner: Learner, updates: Updates, planned: list[Update], world: World
) -> None:
    """Log the plan of an epoch, the size of an update as a product, the model and its peak rate.

    Means are those of the updates that are planned already.
    """
    batches = [rows for update in planned for rows in update.batches]
    num_tokens = sum(update.num_tokens for update in planned)
    a_batch = sum(int(learner.lengths[rows, 1].sum()) for rows in batches) / len(batches)
    log.info(
        "%d pairs; %d updates an epoch; %.1f %% padding",
        updates.num_pairs,
        len(updates),
        100 * padding_share(learner.lengths, batches),
    )
    log.info(
        "%.0f target tokens an update = %.0f a batch x %.1f batches x %d %s",
        num_tokens / len(planned),
        a_batch,
        num_tokens / len(planned) / a_batch / world.size,
        world.size,
        "process" if world.size == 1 else "processes",
    )
    warmup = config.optimizer.warmup_steps
    log.info(
        "%d parameters, vocabulary %s, %s, %s; learning rate %.3e at its peak, update %d",
        num_parameters(learner.model),
        _sizes(learner.tokenizer),
        learner.device,
        str(learner.precision.dtype).removeprefix("torch."),
        learning_rate(warmup, config),
        warmup,
    )


def _sizes(tokenizer: Tokenizers) -> str:
    if tokenizer.src_vocab_size is None:
        return str(tokenizer.tgt.vocab_size)
    return f"{tokenizer.src_vocab_size} of the source and {tokenizer.tgt.vocab_size} of the target"
