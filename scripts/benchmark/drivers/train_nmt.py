"""Trains with nmt, update by update as nmt-train does."""

from __future__ import annotations

import torch
from nmt_options import apply_options, model_config
from turns import Steps, Turns

from nmt import __version__
from nmt.config import DType, TrainConfig, resolve_path
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast import packing
from nmt.runtime.distributed import World
from nmt.runtime.prefetch import prefetch
from nmt.training.batches import BatchMaker
from nmt.training.build import build_model
from nmt.training.costs import peak_memory_bytes, synchronize
from nmt.training.learner import Learner


def main() -> None:
    """Make the sampler's updates; without `update_tokens`, the updates have one batch."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    dtype = apply_options(job)
    options = job["options"]
    if options.pop("pad_attention", False):  # as in versions of torch without flash attention
        packing.find_flash_attention = lambda device: None
    config = TrainConfig(
        data_dir=job["data_dir"],
        model=model_config(job["model"]),
        max_tokens=job["batch_tokens"],
        tokens_per_update=job["update_tokens"] or job["batch_tokens"],
        label_smoothing=job["label_smoothing"],
        device=job["device"],
        dtype=DType(dtype),
        **options,
    )
    folder = resolve_path(config.data_dir)
    data = ParallelData(folder, "train")
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    torch.manual_seed(config.seed)
    model = build_model(config, tokenizer, World(), device)
    learner = Learner(model, config, BatchMaker(config, data, tokenizer, device), World(), device)
    sampler = TokenBatchSampler(
        data.lengths, config.max_tokens, tokens_per_update=config.tokens_per_update, seed=1
    )
    steps = Steps(turns, nmt=__version__, torch=torch.__version__)
    epoch = 0
    while True:
        updates = sampler.plan_epoch(epoch)
        if not job["update_tokens"]:
            updates = [update for update in updates if len(update.batches) == 1]
        updates_and_batches = (
            (update, learner.batch_maker.make_batches(update)) for update in updates
        )
        for update, batches in prefetch(updates_and_batches):
            result = learner.update(update, batches, job["learning_rate"], is_stop_requested=False)
            synchronize(device)
            steps.done(
                src_tokens=update.num_src_tokens,
                tgt_tokens=update.num_tokens,
                positions=result.num_positions,
                peak_bytes=peak_memory_bytes(device),
            )
        epoch += 1


main()
