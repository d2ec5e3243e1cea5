"""The training loop: updates, validation, checkpoints, and going on where an interrupted run
stopped.

Every rank runs the same lines, and what they decide upon is the same on all of them, so that they
leave the loop together. Rank 0 alone writes and speaks.
"""

from __future__ import annotations

import itertools
import logging
import time
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import torch

from nmt import checkpoint
from nmt.config import BestMetric, TrainConfig, resolve
from nmt.data.batch import batch_cost
from nmt.data.batching import TokenBatchSampler, Update
from nmt.data.binary import open_split, read_meta
from nmt.data.mixing import make_mix
from nmt.data.tokenizer import load_tokenizers
from nmt.distributed import World, from_main, gather, set_num_threads
from nmt.errors import StoppedError
from nmt.training import state as saved
from nmt.training.describe import describe
from nmt.training.dry_run import make_plan, measure_pace, report
from nmt.training.flops import synchronize
from nmt.training.guard import BatchLoss, SpikeDetector, describe_batches, stop_after
from nmt.training.learner import Learner, Outcome
from nmt.training.memory import peak_memory_bytes
from nmt.training.metrics import Meter, Reporter
from nmt.training.run_folder import locked, save_config
from nmt.training.saver import Saver
from nmt.training.schedule import learning_rate
from nmt.training.signals import StopRequest, listen
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


class Trainer:
    """One rank of one run: everything that `train` needs, made from a config."""

    def __init__(self, config: TrainConfig, world: World, device: torch.device) -> None:
        self.config, self.world = config, world
        self.run_dir = resolve(config.run_dir)
        set_num_threads(config.num_threads)
        data_dir = resolve(config.data_dir)
        self.meta = read_meta(data_dir)
        self.tokenizer = load_tokenizers(data_dir, self.meta["tokenizer_sha256"])
        data = open_split(data_dir, "train")
        self.validation = Validation(data_dir, self.tokenizer, self.meta["tgt_lang"], config, world)
        temperature = config.mix_temperature or self.meta.get("temperature", 1.0)
        self.sampler = TokenBatchSampler(
            data.lengths(),
            config.max_tokens,
            tokens_per_update=config.tokens_per_update,
            seed=config.seed,
            mix=make_mix(data.corpora, config.mix, temperature),
            rank=world.rank,
            world_size=world.size,
        )
        saved.seed_everything(config.seed)
        self.learner = Learner(config, data, self.tokenizer, world, device)
        self.state = saved.TrainerState()
        self.meter, self.spikes = Meter(), SpikeDetector()
        self.stop, self.is_stopped = StopRequest(), False

    def train(self, config_yaml: str) -> None:
        """Train to `max_updates` or until patience ends; `config_yaml` is saved with the run.

        Raises `StoppedError` when a signal ended it before; it is saved then.
        """
        with ExitStack() as stack:
            self.stop = stack.enter_context(listen())
            if self.world.is_main:
                stack.enter_context(
                    locked(self.run_dir, timeout_seconds=self.config.timeout_seconds)
                )
            self._start(config_yaml)
            self._open(stack)
            if self._lacks_validation():
                self._validate()
            while not self._is_over():
                self._train_epoch()
            self._finish()

    def dry_run(self) -> str:
        """Try the largest batches and make some updates; return what a run would take, in lines.

        Nothing is read from the run folder, or written to it.
        """
        self.learner.connect()
        updates = self.sampler.updates(0)
        peak_bytes = self._try_largest(updates.pool_of(0))

        def make(update: Update) -> float:
            outcome = self.learner.update(update, self._learning_rate(1), is_stop_asked=False)
            synchronize(self.learner.device)
            return outcome.flops

        pace = measure_pace(make, updates)
        peak_bytes = max(peak_bytes, peak_memory_bytes(self.learner.device))
        of_what = "the process" if self.learner.device.type == "cpu" else "tensors"
        text = report(
            make_plan(updates, self.sampler.lengths),
            pace,
            num_updates=self.config.max_updates,
            memory=f"{peak_bytes / 1e9:.2f} GB of {of_what} on each device, at the peak",
            flops_per_second=self.learner.measure_rate(),
            now=datetime.now(),
        )
        self.learner.disconnect()
        return text

    def _train_epoch(self) -> None:
        updates = self.sampler.updates(self.state.epoch)
        rest = updates[self.state.update_in_epoch :]
        for update, following in itertools.zip_longest(rest, rest[1:]):
            is_done = self._update(update, following)
            self.state.update_in_epoch += 1
            if self.state.update_in_epoch == len(updates):
                self.state.epoch, self.state.update_in_epoch = self.state.epoch + 1, 0
            if is_done:
                self.state.update += 1
                self._after_update()
            if self._is_over():
                return

    def _update(self, update: Update, following: Update | None) -> bool:
        """Let the learner change the weights; say whether it did."""
        saved.seed_update(self.config.seed, self.state, self.world.rank)
        outcome = self.learner.update(
            update,
            self._learning_rate(self.state.update + 1),
            is_stop_asked=bool(self.stop),
            following=following,
        )
        self.is_stopped, self.gradient_norm = outcome.is_stop_asked, outcome.gradient_norm
        if outcome.is_finite:
            self.state.bad_updates = 0
            self.meter.add(outcome, update)
        self._guard(update, outcome)
        return outcome.is_finite

    def _guard(self, update: Update, outcome: Outcome) -> None:
        """Report a bad update and an outlier, with their sentences; end the run at too many."""
        loss = outcome.loss_sum / update.num_tokens
        is_spike = outcome.is_finite and self.spikes.is_spike(loss)
        if outcome.is_finite and not is_spike:
            return
        sums = zip(update.batches, outcome.batch_losses.tolist(), strict=False)
        here = [BatchLoss(r, s / int(self.sampler.lengths[r, 1].sum())) for r, s in sums]
        reason = describe_batches([batch for part in gather(here) for batch in part])
        what = "loss spike" if is_spike else "not finite, left out"
        number = self.state.update + 1
        self.reporter.note(f"update {number}: {what}: loss {loss:.4g}; {reason}")
        self.reporter.write({"update": number, "event": what, "batch": reason})
        if not outcome.is_finite and not self.learner.precision.can_lower_scale:
            self.state.bad_updates += 1
            stop_after(self.state.bad_updates, self.config.max_bad_updates, number, reason)

    def _after_update(self) -> None:
        self.reporter.advance()
        if self._is_due(self.config.log_every_updates):
            self._log()
        validates = self._is_due(self.config.validate_every_updates)
        if validates or self._is_due(self.config.checkpoint_every_updates):
            self._save()  # before validation, so that its failure loses nothing
        if validates and (not self.is_stopped or self._is_complete()):
            self._validate()  # after a signal, whose sender may not wait, the next start does it

    def _is_due(self, every_updates: int) -> bool:
        is_last = self.state.update == self.config.max_updates
        return is_last or self.state.update % every_updates == 0

    def _is_complete(self) -> bool:
        no_patience = 0 < self.config.patience <= self.state.bad_validations
        return no_patience or self.state.update >= self.config.max_updates

    def _is_over(self) -> bool:
        return self.is_stopped or self._is_complete()

    def _log(self) -> None:
        record = {
            "update": self.state.update,
            "epoch": self.state.epoch,
            **self.meter.record(flops_per_second=self.flops_per_second),
            "learning_rate": self._learning_rate(self.state.update),
            "gradient_norm": self.gradient_norm,
            "memory_bytes": peak_memory_bytes(self.learner.device),
        }
        self.reporter.write(record)
        self.reporter.show(record)
        self.meter = Meter()

    def _validate(self) -> None:
        start_seconds = time.perf_counter()
        with self.learner.averaged():
            record = self.validation(self.learner.model)
        record["validation_seconds"] = time.perf_counter() - start_seconds
        self.reporter.write({"update": self.state.update, **record})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.items())
        self.reporter.note(f"update {self.state.update}: {figures}")
        self.state.validated = self.state.update
        self._rank(record[f"valid_{self.config.best_metric.value}"])
        self.meter.pause(time.perf_counter() - start_seconds)

    def _rank(self, score: float) -> None:
        badness = -score if self.config.best_metric is BestMetric.bleu else score
        is_best = not self.state.best or badness < self.state.best[0][0]
        self.state.bad_validations = 0 if is_best else self.state.bad_validations + 1
        ranked = sorted([*self.state.best, (badness, self.state.update)])
        self.state.best = ranked[: max(self.config.keep_best, 1)]
        if self.saver is not None:
            self.saver.mark_best([update for _, update in self.state.best])

    def _save(self) -> None:
        self.saved_place = self.state.place
        if self.saver is not None:
            self.saver.save(
                self.state.update,
                self.learner.weights(),
                self._info(),
                self.tokenizer,
                training={
                    "state": saved.pack_state(self.state),
                    "learner": self.learner.state_dict(),
                    "world_size": self.world.size,
                    "fingerprint": self._fingerprint(),
                },
                best=[update for _, update in self.state.best],
            )

    def _start(self, config_yaml: str) -> None:
        """Go on from the newest checkpoint, or begin; rank 0 alone needs the run folder."""
        found = saved.load_newest(self.run_dir) if self.world.is_main else None
        if found is not None:
            saved.check_fingerprint(found["folder"], found["fingerprint"], self._fingerprint())
        found = from_main(found)
        if found is not None:
            self.state = saved.unpack_state(found["state"])
            self.learner.load_state_dict(found["learner"], found["weights"])
            self._say_where_it_goes_on(found)
        elif self.config.init_from is not None:
            source = saved.weights_to_begin_with(self.config, self.tokenizer)
            self.learner.model.load_state_dict(source)
        if self.world.is_main:
            save_config(self.run_dir, config_yaml)

    def _say_where_it_goes_on(self, found: dict[str, Any]) -> None:
        log.info("go on after update %d, from %s", self.state.update, found["folder"])
        before = found.get("world_size", 1)
        if before != self.world.size:
            log.info(
                "%d processes before, %d now: no pair is repeated or left out, but dropout and "
                "rounding differ from a run that kept their number",
                before,
                self.world.size,
            )

    def _open(self, stack: ExitStack) -> None:
        """Make what is needed from the first update on."""
        self.learner.connect()
        stack.callback(self.learner.disconnect)
        if self._is_complete():
            log.info("the run was over after %d updates; raise max_updates", self.state.update)
        else:
            updates = self.sampler.updates(self.state.epoch)
            planned = updates.pool_of(self.state.update_in_epoch)
            describe(self.config, self.learner, updates, planned, self.world)
            log.info("an epoch draws %s", self.sampler.mix)
            peak_bytes = self._try_largest(planned)
            log.info("the largest batches fit: %.2f GB at the peak", peak_bytes / 1e9)
        self.saved_place = self.state.place
        self.flops_per_second = self.learner.measure_rate()
        self.reporter = Reporter(
            self.run_dir,
            self.state,
            max_updates=self.config.max_updates,
            is_main=self.world.is_main,
        )
        stack.callback(self.reporter.close)
        self.saver = (
            Saver(self.run_dir, update=self.state.update, keep_last=self.config.keep_last)
            if self.world.is_main
            else None
        )

    def _try_largest(self, updates: list[Update]) -> int:
        """Try batches of the largest cost that this rank has, whose batches may be parts."""
        costs = [batch_cost(self.sampler.lengths[r]) for u in updates for r in u.batches]
        # the parts of other epochs are cut elsewhere
        most = max(self.sampler.longest, int(1.1 * max(costs, default=0)))
        rows = self.sampler.rows_to_try()
        return self.learner.try_largest(rows, min(self.sampler.max_tokens, most))

    def _lacks_validation(self) -> bool:
        """Say whether the newest checkpoint was saved, but not validated any more."""
        if self.state.update == self.state.validated:
            return False
        is_due = self._is_due(self.config.validate_every_updates)
        return from_main(is_due or self.reporter.forgot_validation)

    def _finish(self) -> None:
        """Wait until the newest checkpoint is on disk; make one first after a signal."""
        if self.is_stopped and self.saved_place != self.state.place:
            self._save()
        if self.saver is not None:
            self.saver.finish()
        from_main(None)  # nobody leaves before it is written
        if self.is_stopped and not self._is_complete():
            name = self.stop.signal.name if self.stop.signal else "a signal to another rank"
            raise StoppedError(
                f"stopped by {name} after update {self.state.update}, which is saved; the same "
                "command goes on"
            )

    def _fingerprint(self) -> dict[str, Any]:
        return saved.fingerprint(self.config, self.meta, self.sampler.mix)

    def _learning_rate(self, update: int) -> float:
        return learning_rate(update, self.config)

    def _info(self) -> checkpoint.ModelInfo:
        return checkpoint.ModelInfo(
            model=self.config.model,
            search=self.config.search,
            vocab_size=self.tokenizer.tgt.vocab_size,
            src_lang=self.meta["src_lang"],
            tgt_lang=self.meta["tgt_lang"],
            tokenizer_sha256=self.tokenizer.sha256,
            updates=self.state.update,
            src_vocab_size=self.tokenizer.src_vocab_size,
        )
