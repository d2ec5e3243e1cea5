"""Sampling of tokens, reproducible for each sentence."""

# V vocab; R live hypotheses, `beam_size` samples per sentence

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nmt.config import SearchConfig
from nmt.model.fast.top import NEG_INF
from nmt.model.fast.transfer import to_device


class Sampler:
    """Draws the next token of every hypothesis.

    Each sample has its own random generator. Its seed consists of the seed of the settings, the key
    of the sentence, the number of the sample and the source ids.
    """

    def __init__(
        self, sources: Sequence[Sequence[int]], keys: Sequence[int], config: SearchConfig
    ) -> None:
        """`sources` are source ids with EOS.

        Equal sources with different `keys` get different samples.
        """
        self.config = config
        self.generators: list[list[np.random.Generator]] = []
        for source, key in zip(sources, keys, strict=True):
            seeds = [[config.seed, key, sample, *source] for sample in range(config.beam_size)]
            self.generators.append([np.random.default_rng(seed) for seed in seeds])

    def draw(self, log_probs: Tensor, sentences: Tensor) -> Tensor:
        """Draw a token for each hypothesis from its log-probabilities (R, V); return ids (R,).

        `sentences` (R,) has the index of the sentence of each hypothesis.
        """
        noise = np.empty(log_probs.shape, dtype=np.float32)  # (R, V)
        for row, sentence in enumerate(sentences.tolist()):
            # a sentence has `beam_size` rows until all of its samples are complete
            generator = self.generators[sentence][row % self.config.beam_size]
            # Minus the logarithm of an exponential variate is a Gumbel variate. The variate is
            # float64: in float32, it might be 0, and the logarithm infinite.
            noise[row] = -np.log(generator.standard_exponential(log_probs.size(1)))
        # The maximum of logits plus Gumbel noise is a sample of their softmax (Gumbel, 1954). It is
        # less sensitive to rounding of the logits than a search in cumulative probabilities.
        gumbel = to_device(torch.from_numpy(noise), log_probs.device)
        return (truncate(log_probs, self.config) + gumbel).argmax(dim=1)


def truncate(log_probs: Tensor, config: SearchConfig) -> Tensor:
    """Return the logits to sample from (R, V), with minus infinity for excluded tokens.

    Divides by the temperature and keeps the `top_k` most probable tokens (Fan et al., 2018).
    Renormalizes, then keeps the smallest set of most probable tokens whose total probability
    reaches `top_p` (Holtzman et al., 2020). Tokens that tie with the last one are kept too.
    Renormalizes again, then keeps tokens whose probability is at least `epsilon` (Hewitt et al.,
    2022) and at least `min_p` times the highest probability (Nguyen et al., 2024). The most
    probable token is always kept.
    """
    logits = log_probs / config.temperature  # (R, V)
    if 0 < config.top_k < logits.size(1):
        min_logit = logits.topk(config.top_k).values[:, -1:]  # (R, 1)
        logits = logits.masked_fill(logits < min_logit, NEG_INF)
    if config.top_p < 1:
        ranked = logits.sort(dim=1, descending=True).values  # (R, V)
        probs = ranked.softmax(dim=1)  # (R, V)
        probs_before = probs.cumsum(dim=1) - probs  # (R, V), total of the more probable tokens
        is_excluded = probs_before >= config.top_p
        min_logit = ranked.masked_fill(is_excluded, float("inf")).amin(dim=1)  # (R,)
        min_logit = min_logit.unsqueeze(1)  # (R, 1)
        logits = logits.masked_fill(logits < min_logit, NEG_INF)
    if config.min_p or config.epsilon:
        probs = logits.softmax(dim=1)  # (R, V)
        highest = probs.amax(dim=1, keepdim=True)  # (R, 1)
        min_prob = (config.min_p * highest).clamp(min=config.epsilon)  # (R, 1)
        min_prob = min_prob.minimum(highest)  # keeps the most probable token
        logits = logits.masked_fill(probs < min_prob, NEG_INF)
    return logits


def make_sampling_keys(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the sampling key of each row of ids: the number of equal rows before it.

    With these keys, equal sentences get different samples, and the samples of all other sentences
    do not depend on the order of the sentences.
    """
    counters: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
    return [next(counters[tuple(row)]) for row in rows]
