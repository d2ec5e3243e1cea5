"""Build the objects of a training run: data, samplers, model and learner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nmt.config import TrainConfig, resolve_path
from nmt.data.augment import TextAugmenter
from nmt.data.batching import TokenBatchSampler
from nmt.data.binary import DataInfo, ParallelData, read_meta
from nmt.data.languages import target_tags
from nmt.data.lemmas import Lemmas, read_lemmas
from nmt.data.mixing import make_mix
from nmt.data.noise import TokenNoise
from nmt.data.tokenizer import Tokenizers, load_tokenizers
from nmt.data.word_alignment import WordAligner
from nmt.errors import ConfigError, DataError
from nmt.model.fast import FastTransformer, accelerate
from nmt.model.transformer import Transformer
from nmt.runtime.distributed import World, set_num_threads
from nmt.training.adapters import set_trainable_parameters
from nmt.training.batches import BatchMaker
from nmt.training.learner import Learner
from nmt.training.preflight import check_model_fits
from nmt.training.run_folder import make_fingerprint
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The objects of a run on one rank.

    They are built from the config and the data only. The state of a checkpoint is loaded later.
    """

    config: TrainConfig
    world: World
    run_dir: Path
    data_info: DataInfo
    tokenizers: Tokenizers
    validation: Validation
    samplers: dict[int, TokenBatchSampler]
    """The sampler of each stage, keyed by the number of updates before the stage."""
    augmenters: dict[int, TextAugmenter | None]
    """The augmentation of each stage, with the same keys; None for a stage without augmentation."""
    fingerprint: dict[str, Any]  # data and settings, to compare with a checkpoint's
    learner: Learner

    def sampler_at(self, num_updates: int) -> TokenBatchSampler:
        """Return the sampler for the next update, after `num_updates` are done."""
        return self.samplers[self._stage_start(num_updates)]

    def augmenter_at(self, num_updates: int) -> TextAugmenter | None:
        """Return the augmentation for the next update, after `num_updates` are done."""
        return self.augmenters[self._stage_start(num_updates)]

    def _stage_start(self, num_updates: int) -> int:
        """Return the key of the stage that the update after `num_updates` belongs to."""
        return max(start for start in self.samplers if start <= num_updates)

    @property
    def last_stage_start(self) -> int:
        """The number of updates before the last stage; 0 without stages."""
        return max(self.samplers.keys())


def build_run(config: TrainConfig, world: World, device: torch.device) -> Run:
    """Build the objects of a run. Sets the number of threads and seeds torch.

    Raises an `NmtError` if the config does not fit the data or the device.
    """
    set_num_threads(config.num_threads)
    data_dir = resolve_path(config.data_dir)
    data_info = read_meta(data_dir)
    tags = target_tags(data_info.directions.values())
    tokenizers = load_tokenizers(data_dir, data_info.tokenizer_sha256, tags)
    vocab_sizes = (tokenizers.src.vocab_size, tokenizers.tgt.vocab_size)
    if data_info.vocab_sizes != vocab_sizes:
        raise DataError(
            f"{data_dir}/meta.json has vocabularies of {data_info.vocab_sizes} pieces, the "
            f"tokenizer of {vocab_sizes}; run nmt-preprocess again"
        )
    if config.bidirectional:
        _check_bidirectional(data_info, tokenizers)
    # read before the alignment of words is learned, so that a wrong file is reported at once
    lemmas = None if config.lemmas is None else read_lemmas(config.lemmas)
    data = ParallelData(data_dir, "train", bidirectional=config.bidirectional)
    validation = Validation(data_dir, tokenizers, config, world)
    samplers = make_samplers(config, data_info, data, world)
    # With max_tokens=auto, the number is not known yet (None), and the run will be built again.
    if world.is_main and config.max_tokens is not None:
        _warn_of_short_run(config, last_stage_start=max(samplers.keys()))
    torch.manual_seed(config.seed)  # seeds the initial weights
    noise = None
    if config.noise.is_enabled:
        noise = TokenNoise(config.noise, config.seed, tokenizers, data_info.directions.values())
    aligner = None
    lacks_alignment = config.guided_alignment > 0 and not data.is_aligned
    if config.has_hints or lacks_alignment:
        log.info("learning the alignment of words")
        aligner = WordAligner(data, src_vocab_size=vocab_sizes[0], tgt_vocab_size=vocab_sizes[1])
    batch_maker = BatchMaker(config, data, tokenizers, device, noise, aligner)
    model = build_model(config, tokenizers, world, device)
    learner = Learner(model, config, batch_maker, world, device)
    fingerprint = make_fingerprint(config, data_info, samplers)
    # Not the setting, which may be auto, but the dtype itself. So a run that is resumed with
    # another dtype, on another machine, logs the change.
    fingerprint["dtype"] = learner.dtype_name
    return Run(
        config=config,
        world=world,
        run_dir=resolve_path(config.run_dir),
        data_info=data_info,
        tokenizers=tokenizers,
        validation=validation,
        samplers=samplers,
        augmenters=make_augmenters(config, data_info, tokenizers, aligner, lemmas),
        fingerprint=fingerprint,
        learner=learner,
    )


def _check_bidirectional(data_info: DataInfo, tokenizers: Tokenizers) -> None:
    """Raise a `ConfigError` unless source and target ids of a pair can be exchanged."""
    if tokenizers.src_vocab_size is not None:
        raise ConfigError(
            "bidirectional=true needs one vocabulary for both languages; preprocess with "
            "tokenizer.separate=false"
        )
    if data_info.directions or tokenizers.src.prefix_ids or tokenizers.tgt.prefix_ids:
        raise ConfigError(
            "bidirectional=true does not work with tags before sources or targets, such as <2de> "
            "or <bt>; give both directions as corpora of nmt-preprocess, or leave out the tags"
        )


def make_samplers(
    config: TrainConfig, data_info: DataInfo, data: ParallelData, world: World
) -> dict[int, TokenBatchSampler]:
    """Return the sampler of each stage, keyed by the number of updates before the stage.

    Training starts with the corpus weights of `config.mix`. `stage.mix` replaces the weights that
    it names.
    """
    temperature = config.mix_temperature or data_info.temperature
    weights_by_start = {0: config.mix}
    stages = sorted(config.stages.values(), key=lambda stage: stage.start)
    for stage in stages:
        weights_by_start[stage.start] = config.mix | stage.mix
    samplers = {}
    for start, corpus_weights in weights_by_start.items():
        samplers[start] = TokenBatchSampler(
            data.lengths,
            config.max_tokens,
            tokens_per_update=config.tokens_per_update,
            seed=config.seed,
            mix=make_mix(data.corpora, corpus_weights, temperature),
            rank=world.rank,
            world_size=world.size,
        )
    return samplers


def make_augmenters(
    config: TrainConfig,
    data_info: DataInfo,
    tokenizers: Tokenizers,
    aligner: WordAligner | None,
    lemmas: Lemmas | None,
) -> dict[int, TextAugmenter | None]:
    """Return the augmentation of each stage, keyed by the number of updates before the stage."""
    stage_settings = {0: config.augment}
    for stage in config.stages.values():
        stage_settings[stage.start] = config.augment_at(stage)
    augmenters: dict[int, TextAugmenter | None] = {}
    for start, settings in stage_settings.items():
        augmenters[start] = None
        if settings.is_enabled:
            augmenters[start] = TextAugmenter(
                settings,
                config.seed,
                tokenizers,
                data_info.directions.values(),
                max_length=data_info.max_length,
                aligner=aligner,
                lemmas=lemmas,
            )
    return augmenters


def build_model(
    config: TrainConfig, tokenizers: Tokenizers, world: World, device: torch.device
) -> FastTransformer:
    """Build the model with random weights; add adapters and freeze parameters as configured.

    Raises a `ConfigError`, before allocating memory, if the model is too large for `device`.
    """
    build_transformer = partial(
        Transformer,
        config.model,
        tokenizers.tgt.vocab_size,
        src_vocab_size=tokenizers.src_vocab_size,
    )
    # The check uses a model on the meta device, which takes no memory. `fork_rng` restores the
    # random state of the CPU, so that the check does not change the initial weights.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        check_model_fits(build_transformer(), config, device, world.size)
    model = build_transformer(activation_checkpointing=config.activation_checkpointing)
    fast_model = accelerate(model.to(device))  # the same model, with faster layers
    set_trainable_parameters(fast_model, config)
    return fast_model


def _warn_of_short_run(config: TrainConfig, last_stage_start: int) -> None:
    """Warn if the run is too short to begin its last stage or to finish warm-up."""
    if last_stage_start >= config.max_updates:
        log.warning(
            "the last stage begins after update %d, but the run ends after max_updates=%d",
            last_stage_start,
            config.max_updates,
        )
    warmup_steps = config.optimizer.warmup_steps
    if warmup_steps >= config.max_updates:
        log.warning(
            "optimizer.warmup_steps=%d: the learning rate still rises after max_updates=%d",
            warmup_steps,
            config.max_updates,
        )
