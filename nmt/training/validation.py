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
from nmt.data.binary import ParallelData
from nmt.data.text import read_lines
from nmt.data.tokenizer import Tokenizers
from nmt.distributed import World, gather
from nmt.errors import DataError
from nmt.evaluate import bleu, bleu_metric, tokenizer_for
from nmt.manifest import verify
from nmt.model.fast import FastTransformer
from nmt.search.stepper import ModelStepper
from nmt.training.loss import smoothed_cross_entropy
from nmt.training.microbatches import make_batch
from nmt.translate.translator import Translator

_LINES_A_BATCH = 256  # decoded together by one rank


class Validation:
    """Scores a model on the validation set of a data folder.

    Raises an `NmtError` at once when a file, or BLEU's tokenizer for `tgt_lang`, is missing.
    """

    def __init__(
        self, data_dir: Path, tokenizer: Tokenizers, tgt_lang: str, config: TrainConfig,
        world: World,
    ) -> None:  # fmt: skip
        self.tokenizer, self.config, self.world = tokenizer, config, world
        self.data = ParallelData(data_dir, "valid")
        self.bleu_tokenizer = tokenizer_for(tgt_lang)
        self.sources: list[str] = []
        self.references: list[str] = []
        if config.valid_bleu:
            bleu_metric(self.bleu_tokenizer)  # an error now, not at the first validation
            verify(data_dir, "valid.src", "valid.tgt")
            self.sources = list(read_lines(data_dir / "valid.src"))
            self.references = list(read_lines(data_dir / "valid.tgt"))
            sizes = len(self.sources), len(self.references)
            if sizes[0] != sizes[1]:
                raise DataError(
                    f"{data_dir}: valid.src has {sizes[0]} lines and valid.tgt {sizes[1]}; "
                    "run nmt-preprocess again"
                )

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
            batch = make_batch([self.data[int(i)] for i in rows], self.tokenizer).to(device)
            hidden = model(batch.src, batch.sources, batch.tgt_in, batch.targets)  # (M, D)
            weight = model.embedding.weight
            _, nll = smoothed_cross_entropy(hidden, weight, batch.tgt_out, smoothing=0.0)
            sums.append(nll.item())
        # fsum rounds once, so the order in which ranks hold the batches does not matter
        loss = math.fsum(x for part in gather(sums) for x in part) / int(lengths[:, 1].sum())
        return {"valid_loss": loss, "valid_perplexity": math.exp(min(loss, 700.0))}

    def bleu(self, model: FastTransformer) -> dict[str, Any]:
        """Translate `valid.src` and score it against `valid.tgt`; both are raw text."""
        search = replace(self.config.search, beam_size=self.config.valid_beam_size)
        translator = Translator(ModelStepper(model), self.tokenizer, search)
        order = sorted(range(len(self.sources)), key=lambda i: len(self.sources[i]))
        batches = [order[i : i + _LINES_A_BATCH] for i in range(0, len(order), _LINES_A_BATCH)]
        found: dict[int, str] = {}
        for batch in batches[self.world.rank :: self.world.size]:
            lines = translator.translate([self.sources[i] for i in batch])
            found.update(zip(batch, lines, strict=True))
        everything = {i: line for part in gather(found) for i, line in part.items()}
        hypotheses = [everything[i] for i in range(len(self.sources))]
        exact = sum(h == r for h, r in zip(hypotheses, self.references, strict=True))
        score = bleu(hypotheses, [self.references], tokenize=self.bleu_tokenizer)
        return {"valid_bleu": score, "valid_exact_match": exact / len(self.references)}
