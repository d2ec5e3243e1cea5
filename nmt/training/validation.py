"""The validation loss, and BLEU by decoding the validation set: the same numbers for any number of
ranks, since neither batches nor exact sums depend on it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nmt.config import TrainConfig
from nmt.data.batch import bucket
from nmt.data.binary import HeldOutText, ParallelData, read_held_out
from nmt.data.tokenizer import Tokenizers
from nmt.evaluate import bleu, bleu_metric, tokenizer_for, warn_of_script
from nmt.model.fast import FastTransformer
from nmt.runtime.distributed import World, gather
from nmt.search.stepper import ModelStepper
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.microbatches import make_batch
from nmt.translate.translator import Translator

_LINES_A_BATCH = 256  # decoded together by one rank


class Validation:
    """Scores a model on the validation set of a data folder.

    Raises an `NmtError` at once when a file, or BLEU's tokenizer for a language, is missing.
    """

    def __init__(
        self, data_dir: Path, tokenizer: Tokenizers, config: TrainConfig, world: World
    ) -> None:
        self.tokenizer, self.config, self.world = tokenizer, config, world
        self.data = ParallelData(data_dir, "valid")
        self.texts = read_held_out(data_dir, "valid") if config.valid_bleu else []
        for text in self.texts:
            tokenize = tokenizer_for(text.direction.tgt_lang)
            bleu_metric(tokenize)  # an error now, not at the first validation
            warn_of_script(text.targets, tokenize)

    def __call__(self, model: FastTransformer) -> dict[str, Any]:
        """Return the figures by their names in `metrics.jsonl`, on every rank."""
        return self.loss(model) | (self.bleu(model) if self.config.valid_bleu else {})

    @torch.inference_mode()
    def loss(self, model: FastTransformer) -> dict[str, Any]:
        """Return nats a target token without smoothing and the perplexity, in float32."""
        device = model.embedding.weight.device
        model.eval()
        lengths = self.data.lengths
        most = max(self.config.max_tokens, int(lengths.max()))
        batches = bucket(lengths, most, np.arange(len(lengths)))
        sums = []
        for rows in batches[self.world.rank :: self.world.size]:
            pairs = [self.data[int(i)] for i in rows]
            batch = make_batch(pairs, self.tokenizer, source_eos=model.config.source_eos).to(device)
            hidden = model(batch.src, batch.sources, batch.tgt_in, batch.targets)  # (M, D)
            output, bias = model.output_matrix, model.output_bias
            _, nll = smoothed_cross_entropy(hidden, output, batch.tgt_out, smoothing=0.0, bias=bias)
            sums.append(nll)
        # fsum rounds once, so the order in which ranks hold the batches does not matter
        here = torch.stack(sums).tolist() if sums else []  # waits once for the device
        loss = math.fsum(x for part in gather(here) for x in part) / int(lengths[:, 1].sum())
        return {"valid_loss": loss, "valid_perplexity": math.exp(min(loss, 700.0))}

    def bleu(self, model: FastTransformer) -> dict[str, Any]:
        """Translate `valid.src` and score it against `valid.tgt`; both are raw text. Of several
        corpora, each is scored by itself, and `valid_bleu` is the mean.
        """
        search = replace(self.config.search, beam_size=self.config.valid_beam_size)
        translator = Translator(ModelStepper(model), self.tokenizer, search)
        record, num_exact = {}, 0
        for text in self.texts:
            hypotheses = self._translate(translator, text)
            num_exact += sum(h == r for h, r in zip(hypotheses, text.targets, strict=True))
            tokenize = tokenizer_for(text.direction.tgt_lang)
            score = bleu(hypotheses, [text.targets], tokenize=tokenize)
            record[f"valid_bleu_{text.corpus}"] = score
        mean = math.fsum(record.values()) / len(record)
        exact_match = num_exact / sum(len(text.targets) for text in self.texts)
        by_corpus = record if len(record) > 1 else {}
        return {"valid_bleu": mean, "valid_exact_match": exact_match, **by_corpus}

    def _translate(self, translator: Translator, text: HeldOutText) -> list[str]:
        """Translate the sources of a corpus, on every rank a part of them."""
        order = sorted(range(len(text.sources)), key=lambda i: len(text.sources[i]))
        batches = [order[i : i + _LINES_A_BATCH] for i in range(0, len(order), _LINES_A_BATCH)]
        pair = text.direction
        tags: dict[str, Any] = {"src_tag": pair.src_tag, "tgt_tag": pair.tgt_tag}
        found: dict[int, str] = {}
        for batch in batches[self.world.rank :: self.world.size]:
            lines = translator.translate([text.sources[i] for i in batch], **tags)
            found.update(zip(batch, lines, strict=True))
        everything = {i: line for part in gather(found) for i, line in part.items()}
        return [everything[i] for i in range(len(text.sources))]
