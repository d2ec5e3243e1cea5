"""Trains with fairseq: its task, its batches (--max-tokens), its Trainer."""

from __future__ import annotations

import warnings
from argparse import Namespace

import fairseq
import torch
from fairseq import options, tasks
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from fairseq_options import model_options
from turns import Steps, Turns


def main() -> None:
    """Make one step a batch, without clipping, validation or checkpoints."""
    warnings.simplefilter("ignore")
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    config = convert_namespace_to_omegaconf(make_options(job))
    task = tasks.setup_task(config.task)
    task.load_dataset("train")
    model = task.build_model(config.model)
    trainer = Trainer(config, task, model, task.build_criterion(config.criterion))
    pad = task.source_dictionary.pad()
    steps = Steps(turns, fairseq=fairseq.__version__, torch=torch.__version__)
    epoch = 1
    while True:
        batches = trainer.get_train_iterator(epoch=epoch).next_epoch_itr(shuffle=True)
        trainer.begin_epoch(epoch)
        for samples in iterators.GroupedIterator(batches, 1):
            trainer.train_step(samples)
            src = samples[0]["net_input"]["src_tokens"]  # (B, S)
            tgt = samples[0]["target"]  # (B, T)
            steps.done(
                src_tokens=int((src != pad).sum()),
                tgt_tokens=int((tgt != pad).sum()),
                positions=src.numel() + tgt.numel(),
            )
        epoch += 1


def make_options(job: dict) -> Namespace:
    """Return fairseq's options for the model, the data and the optimizer."""
    model = job["model"]
    words = f"""{job["pieces_dir"]} --dataset-impl raw --source-lang src --target-lang tgt
        --task translation --cpu --seed 1 --num-workers 0 --no-save --disable-validation
        --no-progress-bar --required-batch-size-multiple 1
        --max-tokens {job["batch_tokens"]}
        --arch transformer --share-all-embeddings --dropout {model["dropout"]}
        --criterion label_smoothed_cross_entropy --label-smoothing {job["label_smoothing"]}
        --optimizer adam --adam-betas (0.9,0.98) --adam-eps 1e-9 --lr {job["learning_rate"]}
        --lr-scheduler fixed --log-interval 1000000""".split()
    words += model_options(model)
    return options.parse_args_and_arch(options.get_training_parser(), words)


main()
