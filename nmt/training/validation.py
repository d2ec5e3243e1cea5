"""Validation: the loss, and BLEU by decoding the validation set.

The figures are the same for any number of ranks: batches do not depend on it, and sums are exact.
"""

# M target tokens, D d_model

from __future__ import annotations

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
from nmt.evaluate import bleu, bleu_metric, tokenizer_for, warn_of_script
from nmt.model.fast import FastTransformer
from nmt.runtime.distributed import World, gather
from nmt.search.stepper import ModelStepper
from nmt.training.batches import make_batch
from nmt.training.loss import smoothed_cross_entropy
from nmt.translate.translator import Translator

_BATCH_LINES = 256  # translated together by one rank


class Validation:
    """Scores a model on the validation set of a data folder.

    Raises an `NmtError` when it is made if a file, or BLEU's tokenizer for a language, is missing.
    """

    def __init__(
        self, data_dir: Path, tokenizer: Tokenizers, config: TrainConfig, world: World
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.world = world
        self.data = ParallelData(data_dir, "valid")
        self.texts = read_held_out(data_dir, "valid") if config.valid_bleu else []
        for text in self.texts:
            tokenize = tokenizer_for(text.direction.tgt_lang)
            bleu_metric(tokenize)  # fails now instead of at the first validation
            warn_of_script(text.targets, tokenize)

    def __call__(self, model: FastTransformer) -> dict[str, Any]:
        """Return the figures by their names in `metrics.jsonl`, on every rank."""
        figures = self.loss(model)
        if self.config.valid_bleu:
            figures |= self.bleu(model)
        return figures

    @torch.inference_mode()
    def loss(self, model: FastTransformer) -> dict[str, Any]:
        """Return nats per target token without smoothing, and perplexity, in float32."""
        device = model.embedding.weight.device
        model.eval()
        lengths = self.data.lengths
        max_tokens = max(self.config.max_tokens, int(lengths.max()))
        batches = bucket_by_length(lengths, max_tokens, np.arange(len(lengths)))
        nll_sums = []
        for rows in batches[self.world.rank :: self.world.size]:
            pairs = [self.data[int(row)] for row in rows]
            batch = make_batch(pairs, self.tokenizer, source_eos=model.config.source_eos).to(device)
            hidden = model(batch.src, batch.src_packing, batch.tgt_in, batch.tgt_packing)  # (M, D)
            _, nll_sum = smoothed_cross_entropy(
                hidden, model.output_matrix, batch.tgt_out, smoothing=0.0, bias=model.output_bias
            )
            nll_sums.append(nll_sum)
        # fsum rounds once, so the order of the batches over the ranks does not matter
        rank_sums = torch.stack(nll_sums).tolist() if nll_sums else []  # waits once for the device
        total = math.fsum(value for values in gather(rank_sums) for value in values)
        loss = total / int(lengths[:, 1].sum())
        return {"valid_loss": loss, "valid_perplexity": math.exp(min(loss, 700.0))}

    def bleu(self, model: FastTransformer) -> dict[str, Any]:
        """Translate the validation set and score it against its raw text.

        With several corpora, each is scored separately, and `valid_bleu` is the mean.
        """
        search = replace(self.config.search, beam_size=self.config.valid_beam_size)
        translator = Translator(ModelStepper(model), self.tokenizer, search)
        scores = {}
        num_exact = 0
        num_lines = 0
        for text in self.texts:
            translations = self._translate(translator, text)
            pairs = zip(translations, text.targets, strict=True)
            num_exact += sum(translation == target for translation, target in pairs)
            num_lines += len(text.targets)
            tokenize = tokenizer_for(text.direction.tgt_lang)
            score = bleu(translations, [text.targets], tokenize=tokenize)
            scores[f"valid_bleu_{text.corpus}"] = score
        figures = {
            "valid_bleu": math.fsum(scores.values()) / len(scores),
            "valid_exact_match": num_exact / num_lines,
        }
        return figures | scores if len(scores) > 1 else figures

    def _translate(self, translator: Translator, text: HeldOutText) -> list[str]:
        """Translate the sources of a corpus, whose batches the ranks share."""
        order = sorted(range(len(text.sources)), key=lambda i: len(text.sources[i]))
        starts = range(0, len(order), _BATCH_LINES)
        direction = text.direction
        translations: dict[int, str] = {}  # by line
        for start in starts[self.world.rank :: self.world.size]:
            batch = order[start : start + _BATCH_LINES]
            outputs = translator.translate(
                [text.sources[line] for line in batch],
                src_tag=direction.src_tag,
                tgt_tag=direction.tgt_tag,
            )
            translations.update(zip(batch, outputs, strict=True))
        for rank_translations in gather(translations):
            translations |= rank_translations
        return [translations[line] for line in range(len(text.sources))]
