"""Trains with nmt, by the steps that nmt-train makes of every update."""

from __future__ import annotations

import torch
from ours import model_config, take_kernels
from turns import Steps, Turns

from nmt import __version__
from nmt.config import DType, TrainConfig, resolve
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import ParallelData
from nmt.data.tokenizer import Tokenizer
from nmt.model.fast import packing
from nmt.runtime.distributed import World
from nmt.runtime.prefetch import prefetch
from nmt.training.batches import BatchMaker
from nmt.training.build import make_model
from nmt.training.costs import peak_memory_bytes, synchronize
from nmt.training.learner import Learner


def main() -> None:
    """Make updates in the order of the sampler; of one batch each unless their size is given."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    dtype, options = take_kernels(job), job["options"]
    if options.pop("pads_attention", False):  # as where torch has no attention over any lengths
        packing.find_flash = lambda device: None
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
    folder = resolve(config.data_dir)
    data, tokenizer = ParallelData(folder, "train"), Tokenizer.load(folder / "tokenizer.model")
    torch.manual_seed(config.seed)
    model = make_model(config, tokenizer, World(), device)
    learner = Learner(model, config, BatchMaker(config, data, tokenizer, device), World(), device)
    sampler = TokenBatchSampler(
        data.lengths, config.max_tokens, tokens_per_update=config.tokens_per_update, seed=1
    )
    steps = Steps(turns, nmt=__version__, torch=torch.__version__)
    epoch = 0
    while True:
        updates = [
            update
            for update in sampler.updates(epoch)
            if job["update_tokens"] or len(update.batches) == 1
        ]
        work = ((update, learner.batch_maker.make(update)) for update in updates)
        for update, batches in prefetch(work):
            outcome = learner.update(update, batches, job["learning_rate"], is_stop_requested=False)
            synchronize(device)
            steps.done(
                src_tokens=update.num_src_tokens,
                tgt_tokens=update.num_tokens,
                positions=outcome.num_positions,
                peak_bytes=peak_memory_bytes(device),
            )
        epoch += 1


main()
