"""Build the parts of a run from its config: data, samplers, model and learner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nmt.config import NoiseConfig, TrainConfig, resolve
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import DataInfo, ParallelData, read_meta
from nmt.data.languages import target_tags
from nmt.data.mixing import make_mix
from nmt.data.noise import TokenNoise
from nmt.data.tokenizer import Tokenizers, load_tokenizers
from nmt.errors import DataError
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.transformer import Transformer
from nmt.runtime.distributed import World, set_num_threads
from nmt.training.adapters import choose_parameters
from nmt.training.batches import BatchMaker
from nmt.training.learner import Learner
from nmt.training.preflight import check_model_fits
from nmt.training.run_folder import make_fingerprint
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a run on one rank. Nothing of it comes from the run folder."""

    config: TrainConfig
    world: World
    run_dir: Path
    meta: DataInfo
    tokenizer: Tokenizers
    validation: Validation
    samplers: dict[int, TokenBatchSampler]  # by the number of updates after which a stage begins
    fingerprint: dict[str, Any]  # data and settings that a resumed run is compared with
    learner: Learner

    def sampler_at(self, num_updates: int) -> TokenBatchSampler:
        """Return the sampler of the stage after `num_updates`."""
        return self.samplers[max(start for start in self.samplers if start <= num_updates)]

    @property
    def last_stage_start(self) -> int:
        """The number of updates after which the last stage begins; 0 without stages."""
        return max(self.samplers)


def build_run(config: TrainConfig, world: World, device: torch.device) -> Run:
    """Build the parts of a run; raise an `NmtError` if the config does not fit data or device."""
    set_num_threads(config.num_threads)
    data_dir = resolve(config.data_dir)
    meta = read_meta(data_dir)
    tags = target_tags(meta.directions.values())
    tokenizer = load_tokenizers(data_dir, meta.tokenizer_sha256, tags)
    vocab_sizes = (tokenizer.src.vocab_size, tokenizer.tgt.vocab_size)
    if meta.vocab_sizes != vocab_sizes:
        raise DataError(
            f"{data_dir}/meta.json has vocabularies of {meta.vocab_sizes} pieces, the tokenizer of "
            f"{vocab_sizes}; run nmt-preprocess again"
        )
    data = ParallelData(data_dir, "train")
    validation = Validation(data_dir, tokenizer, config, world)
    samplers = make_samplers(config, meta, data, world)
    if world.is_main:
        _warn_of_short_run(config, max(samplers))
    torch.manual_seed(config.seed)
    noise = None
    if config.noise != NoiseConfig():
        noise = TokenNoise(config.noise, config.seed, tokenizer, meta.directions.values())
    batch_maker = BatchMaker(config, data, tokenizer, device, noise)
    model = make_model(config, tokenizer, world, device)
    return Run(
        config=config,
        world=world,
        run_dir=resolve(config.run_dir),
        meta=meta,
        tokenizer=tokenizer,
        validation=validation,
        samplers=samplers,
        fingerprint=make_fingerprint(config, meta, samplers),
        learner=Learner(model, config, batch_maker, world, device),
    )


def make_samplers(
    config: TrainConfig, meta: DataInfo, data: ParallelData, world: World
) -> dict[int, TokenBatchSampler]:
    """Make the sampler of each stage, by the number of updates after which it begins."""
    temperature = config.mix_temperature or meta.temperature
    changes = {0: dict[str, float]()}
    for stage in sorted(config.stages.values(), key=lambda stage: stage.start):
        changes[stage.start] = stage.mix
    samplers = {}
    for start, change in changes.items():
        samplers[start] = TokenBatchSampler(
            data.lengths,
            config.max_tokens,
            tokens_per_update=config.tokens_per_update,
            seed=config.seed,
            mix=make_mix(data.corpora, config.mix | change, temperature),
            rank=world.rank,
            world_size=world.size,
        )
    return samplers


def make_model(
    config: TrainConfig, tokenizer: Tokenizers, world: World, device: torch.device
) -> FastTransformer:
    """Make the model with random weights and choose its trained parameters.

    Raises a `ConfigError` before allocating memory if the model cannot fit on `device`.
    """
    make = partial(
        Transformer,
        config.model,
        tokenizer.tgt.vocab_size,
        src_vocab_size=tokenizer.src_vocab_size,
    )
    # on the meta device the model takes no memory and draws no random numbers
    with torch.device("meta"), torch.random.fork_rng([]):
        check_model_fits(make(), config, device, world.size)
    model = make(activation_checkpointing=config.activation_checkpointing)
    accelerated = accelerate(model.to(device))
    choose_parameters(accelerated, config)
    return accelerated


def _warn_of_short_run(config: TrainConfig, last_stage_start: int) -> None:
    if last_stage_start >= config.max_updates:
        message = "the last stage begins after update %d, but the run ends after max_updates=%d"
        log.warning(message, last_stage_start, config.max_updates)
    warmup_steps = config.optimizer.warmup_steps
    if warmup_steps >= config.max_updates:
        message = "optimizer.warmup_steps=%d: the learning rate still rises after max_updates=%d"
        log.warning(message, warmup_steps, config.max_updates)
