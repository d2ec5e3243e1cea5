"""The training loop: updates, validation, checkpoints, and going on where an interrupted run
stopped.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt import checkpoint
from nmt.config import TrainConfig
from nmt.data.batch import Batch, make_batch
from nmt.data.batching import Rows, TokenBatchSampler, padding_share
from nmt.data.binary import open_split
from nmt.data.prepare import read_meta
from nmt.data.tokenizer import Tokenizer
from nmt.distributed import (
    check_single_process,
    find_device,
    find_dtype,
    set_num_threads,
)
from nmt.errors import ModelError, NmtError
from nmt.files import replace_file, replace_link
from nmt.model.transformer import Transformer, num_parameters
from nmt.options import BestMetric, resolve
from nmt.training import state as saved
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.metrics import Meter, MetricsLog, Progress
from nmt.training.optimizer import clip_gradient, make_optimizer, step
from nmt.training.schedule import learning_rate
from nmt.training.validation import check_bleu, validation_bleu, validation_loss

log = logging.getLogger(__name__)


class Trainer:
    """One run: everything that `train` needs, made from a config."""

    def __init__(self, config: TrainConfig) -> None:
        check_single_process()
        self.config = config
        self.data_dir, self.run_dir = resolve(config.data_dir), resolve(config.run_dir)
        self.device = find_device(config.device)
        self.dtype = find_dtype(config.dtype, self.device)
        set_num_threads(config.num_threads)
        self.meta = read_meta(self.data_dir)
        self.tokenizer = Tokenizer.load(self.data_dir / "tokenizer.model")
        self.data = open_split(self.data_dir, "train")
        self.valid_data = open_split(self.data_dir, "valid")
        if config.valid_bleu:
            check_bleu(self.data_dir, self.meta["tgt_lang"])  # now, not hours later
        self.sampler = TokenBatchSampler(
            self.data.lengths(),
            config.max_tokens,
            tokens_per_update=config.tokens_per_update,
            seed=config.seed,
        )
        saved.seed_everything(config.seed)
        self.model = Transformer(config.model, self.tokenizer.vocab_size).to(self.device)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.state = saved.TrainerState()
        self.meter = Meter()

    def train(self, config_yaml: str) -> None:
        """Train to `max_updates` or until patience ends; `config_yaml` is saved with the run."""
        self._start_or_resume(config_yaml)
        self._describe()
        self.metrics = MetricsLog(self.run_dir, update=self.state.update)
        self.progress = Progress(update=self.state.update, max_updates=self.config.max_updates)
        try:
            is_due = self.state.update > 0 and self._is_due(self.config.validate_every_updates)
            if is_due or self.metrics.forgot_validation:
                self._validate()
            while self.state.update < self.config.max_updates and not self._is_patience_over():
                self._train_epoch()
        finally:
            self.progress.close()
            self.metrics.close()

    def _train_epoch(self) -> None:
        updates = self.sampler.updates(self.state.epoch)
        for batches in updates[self.state.update_in_epoch :]:
            self._update(batches)
            self.state.update += 1
            self.state.update_in_epoch += 1
            if self.state.update_in_epoch == len(updates):
                self.state.epoch, self.state.update_in_epoch = self.state.epoch + 1, 0
            self._after_update()
            if self.state.update >= self.config.max_updates or self._is_patience_over():
                return

    def _update(self, batches: list[Rows]) -> None:
        """Change the weights once: gradients of all batches summed, divided once by their target
        tokens.
        """
        self.model.train()
        self.gradient_norm = 0.0
        num_tokens = sum(int(self.sampler.lengths[rows, 1].sum()) for rows in batches)
        loss_sum = nll_sum = 0.0
        for rows in batches:
            batch = make_batch([self.data[int(i)] for i in rows], self.tokenizer).to(self.device)
            loss, nll = self._loss(batch)
            (loss / num_tokens).backward()  # type: ignore[no-untyped-call]
            loss_sum, nll_sum = loss_sum + loss.item(), nll_sum + nll.item()
            positions = batch.src.numel() + batch.tgt_in.numel()
            self.meter.add(
                loss.item(), nll.item(), (batch.num_tokens, batch.num_src_tokens, positions)
            )
        norm = clip_gradient(self.model, self.config.optimizer.max_grad_norm).item()
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise NmtError(
                f"update {self.state.update + 1}: loss {loss_sum / num_tokens:.4g} or gradient "
                f"norm {norm:.4g} is not finite; the weights are as after the update before. Lower "
                "optimizer.learning_rate_scale or set optimizer.max_grad_norm=1"
            )
        self.gradient_norm = norm
        step(self.optimizer, self._learning_rate(self.state.update + 1))

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            hidden = self.model(batch.src, batch.src_lengths, batch.tgt_in)
            loss_sum, nll_sum, _ = smoothed_cross_entropy(
                hidden,
                self.model.embedding.weight,
                batch.tgt_out,
                smoothing=self.config.label_smoothing,
                pad_id=self.tokenizer.pad_id,
            )
        return loss_sum, nll_sum

    def _after_update(self) -> None:
        self.progress.advance()
        if self._is_due(self.config.log_every_updates):
            self._log()
        validates = self._is_due(self.config.validate_every_updates)
        if validates or self._is_due(self.config.checkpoint_every_updates):
            self._save()  # before validation, so that its failure loses nothing
        if validates:
            self._validate()

    def _is_due(self, every_updates: int) -> bool:
        is_last = self.state.update == self.config.max_updates
        return is_last or self.state.update % every_updates == 0

    def _is_patience_over(self) -> bool:
        return 0 < self.config.patience <= self.state.bad_validations

    def _log(self) -> None:
        record = {
            "update": self.state.update,
            "epoch": self.state.epoch,
            **self.meter.record(),
            "learning_rate": self._learning_rate(self.state.update),
            "gradient_norm": self.gradient_norm,
        }
        self.metrics.write(record)
        self.progress.show(record)
        self.meter = Meter()

    def _validate(self) -> None:
        start_seconds = time.perf_counter()
        record = validation_loss(
            self.model, self.valid_data, self.tokenizer, self.config.max_tokens
        )
        if self.config.valid_bleu:
            search = replace(self.config.search, beam_size=self.config.valid_beam_size)
            lang = self.meta["tgt_lang"]
            record |= validation_bleu(self.model, self.tokenizer, self.data_dir, lang, search)
        record["validation_seconds"] = time.perf_counter() - start_seconds
        self.metrics.write({"update": self.state.update, **record})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.items())
        self.progress.note(f"update {self.state.update}: {figures}")
        self._rank(record[f"valid_{self.config.best_metric.value}"])
        self.meter.pause(time.perf_counter() - start_seconds)

    def _rank(self, score: float) -> None:
        badness = -score if self.config.best_metric is BestMetric.bleu else score
        is_best = not self.state.best or badness < self.state.best[0][0]
        self.state.bad_validations = 0 if is_best else self.state.bad_validations + 1
        ranked = sorted([*self.state.best, (badness, self.state.update)])
        self.state.best = ranked[: max(self.config.keep_best, 1)]
        best = checkpoint.checkpoint_dir(self.run_dir, self.state.best[0][1])
        replace_link(self.run_dir / "checkpoints/best", best.name)
        self._remove_old()

    def _save(self) -> None:
        folder = checkpoint.checkpoint_dir(self.run_dir, self.state.update)
        checkpoint.save_model(
            folder,
            self.model.state_dict(),
            self._info(),
            self.tokenizer,
            extra=lambda place: saved.save_state(
                place, self.state, self.optimizer, saved.fingerprint(self.config, self.meta)
            ),
        )
        replace_link(self.run_dir / "checkpoints/latest", folder.name)
        self._remove_old()

    def _remove_old(self) -> None:
        best = {checkpoint.checkpoint_dir(self.run_dir, update) for _, update in self.state.best}
        for folder in checkpoint.list_checkpoints(self.run_dir)[: -self.config.keep_last]:
            if folder not in best:
                shutil.rmtree(folder)

    def _start_or_resume(self, config_yaml: str) -> None:
        folders = checkpoint.list_checkpoints(self.run_dir)
        for folder in reversed(folders):
            try:
                self._resume(folder)
                break
            except ModelError as error:
                log.warning("%s", error)
        else:
            if folders:
                raise ModelError(
                    f"no checkpoint in {self.run_dir} can be read; choose another run_dir"
                )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with replace_file(self.run_dir / "config.yaml") as path:
            path.write_text(config_yaml, encoding="utf-8", newline="\n")

    def _resume(self, folder: Path) -> None:
        content = saved.load_state(folder)
        now = saved.fingerprint(self.config, self.meta)
        saved.check_fingerprint(folder, content["fingerprint"], now)
        self.model.load_state_dict(checkpoint.load_weights(folder))
        self.state = saved.restore(content, self.optimizer)
        log.info("go on after update %d, from %s", self.state.update, folder)

    def _describe(self) -> None:
        config, updates = self.config, self.sampler.updates(self.state.epoch)
        batches = [rows for update in updates for rows in update]
        warmup = config.optimizer.warmup_steps
        log.info(
            "%d pairs; %d updates an epoch of %d batches, %d target tokens; %.1f %% padding",
            len(self.data),
            len(updates),
            round(len(batches) / len(updates)),
            self.sampler.lengths[:, 1].sum() / len(updates),
            100 * padding_share(self.sampler.lengths, batches),
        )
        log.info(
            "%d parameters, vocabulary %d, %s, %s; learning rate %.3e at its peak, update %d",
            num_parameters(self.model),
            self.tokenizer.vocab_size,
            self.device,
            str(self.dtype).removeprefix("torch."),
            self._learning_rate(warmup),
            warmup,
        )

    def _learning_rate(self, update: int) -> float:
        return learning_rate(update, self.config)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _info(self) -> checkpoint.ModelInfo:
        return checkpoint.ModelInfo(
            model=self.config.model,
            search=self.config.search,
            vocab_size=self.tokenizer.vocab_size,
            src_lang=self.meta["src_lang"],
            tgt_lang=self.meta["tgt_lang"],
            tokenizer_sha256=self.tokenizer.sha256,
            updates=self.state.update,
        )
