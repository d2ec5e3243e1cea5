"""Validation: the loss and the BLEU score of a model on the validation set.

The metrics do not depend on the number of ranks: batches are the same, and sums are exact.
"""

# M target tokens, D d_model

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.config import TrainConfig
from nmt.data.batch import bucket_by_length
from nmt.data.binary import HeldOutText, ParallelData, read_held_out
from nmt.data.tokenizer import Tokenizers
from nmt.evaluate import bleu, build_bleu_metric, choose_bleu_tokenizer, warn_about_script
from nmt.model.fast import FastTransformer
from nmt.runtime.distributed import World, gather
from nmt.search.stepper import ModelStepper
from nmt.training.batches import make_batch
from nmt.training.loss import smoothed_cross_entropy
from nmt.translate.translator import Translator

_BATCH_LINES = 256  # number of lines that a rank translates together


class Validation:
    """Scores models on the validation set of a data folder."""

    def __init__(
        self, data_dir: Path, tokenizers: Tokenizers, config: TrainConfig, world: World
    ) -> None:
        """Open the validation set.

        Raises an `NmtError` if a file is missing, or if BLEU's tokenizer for a target language is
        not installed.
        """
        self.tokenizers = tokenizers
        self.config = config
        self.world = world
        self.data = ParallelData(data_dir, "valid")
        self.held_out_texts: list[HeldOutText] = []
        if config.valid_bleu:
            self.held_out_texts = read_held_out(data_dir, "valid")
        for held_out in self.held_out_texts:
            bleu_tokenizer = choose_bleu_tokenizer(held_out.direction.tgt_lang)
            build_bleu_metric(bleu_tokenizer)  # raises now rather than at the first validation
            warn_about_script(held_out.targets, bleu_tokenizer)

    def __call__(self, model: FastTransformer) -> dict[str, Any]:
        """Return the metrics by their names in `metrics.jsonl`, on every rank."""
        metrics = self.compute_loss(model)
        if self.config.valid_bleu:
            metrics |= self.compute_bleu(model)
        return metrics

    @torch.inference_mode()
    def compute_loss(self, model: FastTransformer) -> dict[str, Any]:
        """Return the loss without smoothing, in nats per target token, and the perplexity.

        The model runs without autocast, in float32.
        """
        device = model.embedding.weight.device
        model.eval()
        lengths = self.data.lengths
        longest = int(lengths.max())
        max_tokens = max(self.config.max_batch_tokens, longest)  # the longest pair fits in a batch
        batches = bucket_by_length(lengths, max_tokens, np.arange(len(lengths)))
        rank_batches = batches[self.world.rank :: self.world.size]
        nll_sums = []
        for rows in rank_batches:
            pairs = [self.data[int(row)] for row in rows]
            batch = make_batch(pairs, self.tokenizers, source_eos=model.config.source_eos)
            batch = batch.to(device)
            hidden = model(batch.src, batch.src_packing, batch.tgt_in, batch.tgt_packing)  # (M, D)
            _, nll_sum = smoothed_cross_entropy(
                hidden, model.output_matrix, batch.tgt_out, smoothing=0.0, bias=model.output_bias
            )
            nll_sums.append(nll_sum)
        # one conversion of all tensors, so that the host waits only once for the device
        rank_sums = torch.stack(nll_sums).tolist() if nll_sums else []
        # fsum rounds only once, so the total does not depend on the division of batches among ranks
        total_nll = math.fsum(itertools.chain.from_iterable(gather(rank_sums)))
        loss = total_nll / int(lengths[:, 1].sum())
        perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows
        return {"valid_loss": loss, "valid_perplexity": perplexity}

    def compute_bleu(self, model: FastTransformer) -> dict[str, Any]:
        """Translate the validation set; return BLEU and the share of exact matches.

        With several corpora, each gets its own BLEU score too, and `valid_bleu` is the mean.
        """
        search = replace(self.config.search, beam_size=self.config.valid_beam_size)
        translator = Translator(ModelStepper(model), self.tokenizers, search)
        scores = {}  # keyed by corpus
        num_exact = 0
        num_lines = 0
        for held_out in self.held_out_texts:
            translations = self._translate(translator, held_out)
            for translation, target in zip(translations, held_out.targets, strict=True):
                if translation == target:
                    num_exact += 1
            num_lines += len(held_out.targets)
            bleu_tokenizer = choose_bleu_tokenizer(held_out.direction.tgt_lang)
            score = bleu(translations, [held_out.targets], tokenize=bleu_tokenizer)
            scores[held_out.corpus] = score
        metrics = {
            "valid_bleu": math.fsum(scores.values()) / len(scores),
            "valid_exact_match": num_exact / num_lines,
        }
        if len(scores) > 1:
            for corpus, score in scores.items():
                metrics[f"valid_bleu_{corpus}"] = score
        return metrics

    def _translate(self, translator: Translator, held_out: HeldOutText) -> list[str]:
        """Translate the sources of a corpus.

        Each rank translates some of the batches. All ranks return all translations.
        """
        sources = held_out.sources
        line_lengths = [len(source) for source in sources]
        line_order = np.argsort(line_lengths, kind="stable").tolist()  # short lines first
        batch_starts = range(0, len(line_order), _BATCH_LINES)
        rank_starts = batch_starts[self.world.rank :: self.world.size]
        direction = held_out.direction
        translations: dict[int, str] = {}  # keyed by line
        for start in rank_starts:
            lines = line_order[start : start + _BATCH_LINES]
            outputs = translator.translate(
                [sources[line] for line in lines],
                src_tag=direction.src_tag,
                tgt_tag=direction.tgt_tag,
            )
            translations.update(zip(lines, outputs, strict=True))
        for rank_translations in gather(translations):
            translations |= rank_translations
        return [translations[line] for line in range(len(sources))]
