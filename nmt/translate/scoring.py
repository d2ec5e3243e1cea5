"""Scores of given translations by one forward pass (teacher forcing), equal to those of search."""

# B sentences, T target, S source; EOS is part of both lengths

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nmt.config import SearchConfig
from nmt.data.batch import bucket, pad
from nmt.search.hypotheses import ControlIds, Hypothesis, Live, SearchTask
from nmt.search.stepper import Stepper

Ids = Sequence[int]


def score_pairs(
    stepper: Stepper,
    rows: Sequence[Ids],
    targets: Sequence[Ids],
    config: SearchConfig,
    ids: ControlIds,
    *,
    max_tokens: int = 4096,
) -> list[Hypothesis]:
    """Return each target, EOS added, as search with `config` would report it.

    Args:
        stepper: the model, or an ensemble.
        rows: source ids without EOS.
        targets: target ids without BOS and EOS.
        config: how scores are normalized, and whether alignment is wanted.
        ids: control symbols of the tokenizer.
        max_tokens: bound on one batch: rows * longest side.
    """
    if not rows:
        return []
    found: dict[int, Hypothesis] = {}
    pairs = zip(rows, targets, strict=True)
    lengths = np.array([(len(s) + 1, len(t) + 1) for s, t in pairs], dtype=np.int32)
    for batch in bucket(lengths, max(max_tokens, int(lengths.max())), np.arange(len(lengths))):
        some = ([rows[i] for i in batch], [targets[i] for i in batch])
        found |= zip(batch.tolist(), _score_batch(stepper, *some, config, ids), strict=True)
    return [found[i] for i in range(len(rows))]


def _score_batch(
    stepper: Stepper, rows: list[Ids], targets: list[Ids], config: SearchConfig, ids: ControlIds
) -> list[Hypothesis]:
    src_ids = ids.src or ids
    src = pad(rows, pad_id=src_ids.pad, eos=src_ids.eos)  # (B, S)
    src_lengths = torch.tensor([len(row) + 1 for row in rows])  # (B,)
    tgt_in = pad(targets, pad_id=ids.pad, bos=ids.bos)  # (B, T)
    tgt_out = pad(targets, pad_id=ids.pad, eos=ids.eos)  # (B, T)
    lengths = [len(target) + 1 for target in targets]
    task = SearchTask(src, src_lengths, config, ids, (), lengths, 1, keys=[])
    scored = stepper.score(src, src_lengths, tgt_in, tgt_out, attention=task.needs_attention)
    results = []
    for i, length in enumerate(lengths):
        log_probs = scored.log_probs[i : i + 1, :length].cpu()  # (1, T)
        live = Live(torch.tensor([i]), log_probs.sum(dim=1), tgt_out[i : i + 1, :length], log_probs)
        if scored.attention is not None:
            weights = scored.attention[i : i + 1, :length].cpu()  # (1, T, S)
            live = replace(live, aligned=weights.argmax(dim=2), attended=weights.sum(dim=1))
        results += [hypothesis for _, hypothesis in task.close(live)]
    return results
