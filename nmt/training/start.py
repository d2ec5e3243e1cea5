"""What a run starts from: its parts made from the config, and the newest checkpoint loaded."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from nmt.config import NoiseConfig, TrainConfig, resolve
from nmt.data.batch import batch_cost, padding_share
from nmt.data.batching import TokenBatchSampler, Update
from nmt.data.binary import ParallelData, read_meta
from nmt.data.languages import target_tags
from nmt.data.mixing import make_mix
from nmt.data.noise import TokenNoise
from nmt.data.tokenizer import load_tokenizers
from nmt.model.transformer import num_parameters
from nmt.runtime.distributed import World, from_main, set_num_threads
from nmt.training import checkpoints
from nmt.training.checkpoints import TrainerState
from nmt.training.learner import Learner
from nmt.training.optimizer import peak_learning_rate
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


class Setup:
    """What one rank of a run is made of, from its config; nothing is read from the run folder."""

    def __init__(self, config: TrainConfig, world: World, device: torch.device) -> None:
        self.config, self.world = config, world
        self.run_dir = resolve(config.run_dir)
        set_num_threads(config.num_threads)
        data_dir = resolve(config.data_dir)
        self.meta = read_meta(data_dir)
        tags = target_tags(self.meta.directions.values())
        self.tokenizer = load_tokenizers(data_dir, self.meta.tokenizer_sha256, tags)
        data = ParallelData(data_dir, "train")
        self.validation = Validation(data_dir, self.tokenizer, config, world)
        temperature = config.mix_temperature or self.meta.temperature
        stages = sorted((stage.start, stage.mix) for stage in config.stages.values())
        self.samplers = {  # by the number of updates after which a stage begins
            start: TokenBatchSampler(
                data.lengths,
                config.max_tokens,
                tokens_per_update=config.tokens_per_update,
                seed=config.seed,
                mix=make_mix(data.corpora, config.mix | mix, temperature),
                rank=world.rank,
                world_size=world.size,
            )
            for start, mix in [(0, {}), *stages]
        }
        if (last := max(self.samplers)) >= config.max_updates and world.is_main:
            text = "the last of stages begins after update %d; max_updates=%d ends the run before"
            log.warning(text, last, config.max_updates)
        if (warmup := config.optimizer.warmup_steps) >= config.max_updates and world.is_main:
            text = "optimizer.warmup_steps=%d: the learning rate still rises after max_updates=%d"
            log.warning(text, warmup, config.max_updates)
        mixes = {start: sampler.mix for start, sampler in self.samplers.items()}
        self.fingerprint = checkpoints.fingerprint(config, self.meta, mixes)
        torch.manual_seed(config.seed)
        given = (config.noise, config.seed, self.tokenizer, self.meta.directions.values())
        noise = None if config.noise == NoiseConfig() else TokenNoise(*given)
        self.learner = Learner(config, data, self.tokenizer, world, device, noise)

    def resume(self) -> TrainerState:
        """Load the newest checkpoint or else `init_from`, if any; return the state of the run."""
        found = checkpoints.load_newest(self.run_dir) if self.world.is_main else None
        if found is not None:
            checkpoints.check_fingerprint(found["folder"], found["fingerprint"], self.fingerprint)
        found = from_main(found)
        if found is None:
            if self.config.init_from is not None:
                fresh = self.learner.model.state_dict()
                weights = checkpoints.load_initial_weights(self.config, self.tokenizer, fresh)
                self.learner.start_from(weights)
            return TrainerState()
        state: TrainerState = found["state"]
        self.learner.load_state_dict(found["learner"], found["weights"])
        threads: Any = found.get("num_threads")
        is_chosen = self.config.num_threads or "OMP_NUM_THREADS" in os.environ
        is_own = self.world.size == 1 and not is_chosen
        if is_own and threads in range(1, (os.cpu_count() or 1) + 1):
            torch.set_num_threads(threads)  # the same bits, whatever is busy now
        log.info("go on after update %d, from %s", state.update, found["folder"])
        if (before := found.get("world_size", 1)) != (now := self.world.size):
            text = "%d processes before, %d now: no pair is repeated or left out, but dropout and "
            log.info(text + "rounding differ from a run that kept their number", before, now)
        return state

    def sampler_at(self, update: int) -> TokenBatchSampler:
        """Return what plans the data of the stage that is due after so many updates."""
        return self.samplers[max(start for start in self.samplers if start <= update)]

    def try_largest(self, planned: list[Update]) -> int:
        """Run the largest batches of all stages; return the peak memory in bytes, or raise a
        `ConfigError`.
        """
        # of batches that ranks share, this rank has parts, which other epochs cut elsewhere
        lengths, peaks = self.learner.lengths, []
        costs = [batch_cost(lengths[rows]) for u in planned for rows in u.batches]
        for sampler in self.samplers.values():
            most = min(sampler.max_tokens, max(sampler.longest, int(1.1 * max(costs, default=0))))
            peaks.append(self.learner.try_largest(sampler.rows_to_try(), most))
        return max(peaks)

    def describe(self, state: TrainerState) -> None:
        """Log the plan of an epoch, over the updates that are planned already, and the model; check
        that the largest batches fit.
        """
        sampler = self.sampler_at(state.update)
        updates, lengths = sampler.updates(state.epoch), sampler.lengths
        planned = updates.pool_of(state.update_in_epoch)
        batches = [rows for update in planned for rows in update.batches]
        an_update = sum(update.num_tokens for update in planned) / len(planned)
        a_batch = sum(int(lengths[rows, 1].sum()) for rows in batches) / (len(batches) or 1) or 1.0
        size, warmup_steps = self.world.size, self.config.optimizer.warmup_steps
        src_size, sizes = self.tokenizer.src_vocab_size, str(self.tokenizer.tgt.vocab_size)
        if src_size is not None:
            sizes = f"{src_size} of the source and {sizes} of the target"
        for line in (
            f"{updates.num_pairs} pairs; {len(updates)} updates an epoch; "
            f"{100 * padding_share(lengths, batches):.1f} % padding",
            f"{an_update:.0f} target tokens an update = {a_batch:.0f} a batch x "
            f"{an_update / a_batch / size:.1f} batches x {size} process{'es' if size > 1 else ''}",
            f"{num_parameters(self.learner.model)} parameters, vocabulary {sizes}, "
            f"{self.learner.device}, {str(self.learner.dtype).removeprefix('torch.')}; learning "
            f"rate {peak_learning_rate(self.config):.3e} at its peak, update {warmup_steps}",
            f"an epoch draws {sampler.mix}",
        ):
            log.info(line)
        log.info("the largest batches fit: %.2f GB at the peak", self.try_largest(planned) / 1e9)
