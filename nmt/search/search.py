"""Search with a `Stepper`: greedy, sampling and beam search, as specified in docs/search.md.

The result of a sentence depends neither on its neighbors in the batch nor on the device.
"""

# B sentences, K hypotheses per sentence (1 if greedy), V vocab; rows, the live hypotheses, sorted
# by sentence

from __future__ import annotations

import torch

from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.top import likeliest
from nmt.model.fast.transfer import fetch
from nmt.search.beam import BeamSearch
from nmt.search.hypotheses import Hypothesis, check_finite
from nmt.search.request import SearchRequest
from nmt.search.sampling import Sampler, count_repeats
from nmt.search.state import SearchState
from nmt.search.stepper import Stepper


@torch.inference_mode()
def search(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each row, best first; with beam size 1, search greedily.

    With sampling, return `beam_size` samples per row in the order drawn. Raises a `ConfigError` for
    a prefix with control symbols, and a `ModelError` for a model whose output is not finite.
    """
    request.check_prefixes(tokenizer)
    if request.config.beam_size == 1 or request.config.sampling:
        return _search_greedily(stepper, request, tokenizer)
    beam_search = BeamSearch(stepper, request, tokenizer)
    while beam_search.num_live:
        beam_search.step()
    return [beam_search.result(i) for i in range(len(request.rows))]


def _search_greedily(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Extend each hypothesis by its most probable token, the lowest id among equals, until it is
    complete. With sampling, extend K hypotheses per sentence by random tokens instead.
    """
    config = request.config
    eos_id = tokenizer.tgt.eos_id
    state = SearchState(stepper, request, tokenizer)
    sampler = None
    num_samples = 1  # K
    if config.sampling:
        keys = count_repeats(request.rows) if request.keys is None else request.keys
        sampler = Sampler([[*row, tokenizer.src.eos_id] for row in request.rows], keys, config)
        num_samples = config.beam_size
    if num_samples > 1:
        rows = torch.arange(len(request.rows)).repeat_interleave(num_samples)  # (B * K,)
        state.go_on(state.beam.select(rows), rows)
    results: list[dict[int, Hypothesis]] = [{} for _ in request.rows]  # by number of the sample
    while len(state.beam):
        log_probs = state.next_log_probs()  # (rows, V)
        beam = state.beam
        tokens = sampler.draw(log_probs, beam.sentences) if sampler else likeliest(log_probs)
        token_log_probs = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (rows,)
        beam = state.beam = beam.extend(beam.sums + token_log_probs, tokens, token_log_probs)
        is_at_limit = state.limits[beam.sentences] == beam.length  # (rows,)
        is_complete = (fetch(tokens)[0] == eos_id) | is_at_limit  # (rows,)
        if not is_complete.any():
            continue
        complete_rows = is_complete.nonzero().squeeze(1)
        complete = state.complete(beam.select(complete_rows))
        for row, (sentence, hypothesis) in zip(complete_rows.tolist(), complete, strict=True):
            # a sample that was complete before, and went on with the others, is not replaced
            results[sentence].setdefault(row % num_samples, hypothesis)
        is_open = torch.tensor([len(results[i]) < num_samples for i in beam.sentences.tolist()])
        if not is_open.all():
            rows = is_open.nonzero().squeeze(1)
            state.go_on(beam.select(rows), rows)
    samples = [[by_number[number] for number in range(num_samples)] for by_number in results]
    for hypotheses in samples:
        check_finite(hypotheses)
    return samples
