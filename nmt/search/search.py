"""Search with a `Stepper`: greedy, sampling and beam search, as specified in docs/search.md.

The result of a sentence depends neither on its neighbors in the batch nor on the device.
"""

# B sentences, K hypotheses per sentence (1 if greedy), V vocab
# R live hypotheses, sorted by sentence

from __future__ import annotations

import math
from dataclasses import replace

import torch

from nmt.config import SearchConfig
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.top import most_likely_tokens
from nmt.model.fast.transfer import fetch
from nmt.search.beam import BeamSearch
from nmt.search.constraints import ForbiddenTokens
from nmt.search.diverse import DiverseSearch
from nmt.search.glossary import word_starts
from nmt.search.hypotheses import Hypothesis, check_finite
from nmt.search.protect import lacks_protected
from nmt.search.request import SearchRequest
from nmt.search.sampling import Sampler, make_sampling_keys
from nmt.search.single import can_search_single, search_single
from nmt.search.state import SearchState
from nmt.search.stepper import Stepper
from nmt.search.term_search import TermSearch, find_terms


@torch.inference_mode()
def search(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence, best first; with beam size 1, search greedily.

    With sampling, return `beam_size` samples per sentence in the order drawn. Raises a
    `ConfigError` for a prefix with control symbols, and a `ModelError` for a model whose output is
    not finite.
    """
    request.check_prefixes(tokenizer)
    if request.config.alternatives:
        return _search_alternatives(stepper, request, tokenizer)
    if request.config.protect:
        return _search_protected(stepper, request, tokenizer)
    if can_search_single(request, stepper.device):
        return [search_single(stepper, request, tokenizer)]
    if request.config.sampling:
        return _sample(stepper, request, tokenizer)
    if request.config.beam_size == 1:
        return _extend_one_by_one(SearchState(stepper, request, tokenizer), None)
    return _search_with_beam(stepper, request, tokenizer)


def _search_with_beam(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Return the results of beam search for each sentence."""
    beam_search = _start_beam_search(stepper, request, tokenizer)
    while beam_search.num_live:
        beam_search.step()
    return [beam_search.result(i) for i in range(len(request.sources))]


def _search_protected(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Search without `protect`; then search some sentences again with `protect`.

    These are the sentences whose best translation lacks a protected text, such as a placeholder.
    The second search requires the protected texts, as terms of a glossary are required.
    """
    plain_request = replace(request, config=replace(request.config, protect=False))
    results = search(stepper, plain_request, tokenizer)
    lacking = []
    for i, hypotheses in enumerate(results):
        source = request.decode_source(i, tokenizer)
        if hypotheses and lacks_protected(source, tokenizer.tgt.decode(hypotheses[0].tokens)):
            lacking.append(i)
    if lacking:
        with_terms = _search_with_beam(stepper, request.select(lacking), tokenizer)
        for i, hypotheses in zip(lacking, with_terms, strict=True):
            results[i] = hypotheses
    return results


def _start_beam_search(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> BeamSearch:
    """Return the kind of beam search that the settings choose, before its first step."""
    if request.config.has_terms:
        return TermSearch(
            stepper,
            request,
            tokenizer,
            terms=find_terms(request, tokenizer),
            starts_word=word_starts(tokenizer.tgt),
        )
    if request.config.beam_groups > 1:
        return DiverseSearch(stepper, request, tokenizer)
    return BeamSearch(stepper, request, tokenizer)


def _search_alternatives(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Return several translations of each sentence, which differ in the token after the prefix.

    There are `num_results` of them, for the most probable tokens except EOS, the most probable one
    first. Each is the best translation with its token.
    """
    config = replace(request.config, alternatives=0)
    # a beam search of one step, without the settings that only concern complete translations
    first_token_config = replace(
        config,
        beam_size=request.num_results,
        beam_groups=1,
        diversity_penalty=SearchConfig.diversity_penalty,
        glossary=[],
        protect=False,
        coverage_penalty=0.0,
        alignment=False,
        min_length=0,
        max_length_a=0.0,
        max_length_b=1,  # a prefix is allowed to be longer, and gets one more token
    )
    first_token_request = replace(
        request,
        config=first_token_config,
        n_best=None,
        constraints=[*request.constraints, ForbiddenTokens([tokenizer.tgt.eos_id])],
    )
    first_tokens = search(stepper, first_token_request, tokenizer)
    sentences = [i for i, hypotheses in enumerate(first_tokens) for _ in hypotheses]
    prefixes = [hypothesis.tokens for hypotheses in first_tokens for hypothesis in hypotheses]
    expanded_request = replace(
        request.select(sentences), config=config, prefixes=prefixes, n_best=1
    )
    results: list[list[Hypothesis]] = [[] for _ in request.sources]
    expanded = search(stepper, expanded_request, tokenizer)
    for sentence, [hypothesis] in zip(sentences, expanded, strict=True):
        results[sentence].append(hypothesis)
    return results


def _sample(
    stepper: Stepper, request: SearchRequest, tokenizer: Tokenizers
) -> list[list[Hypothesis]]:
    """Return `beam_size` samples of each sentence."""
    num_samples = request.config.beam_size
    sampling_keys = request.sampling_keys
    if sampling_keys is None:
        sampling_keys = make_sampling_keys(request.sources)
    sources = [[*source, tokenizer.src.eos_id] for source in request.sources]
    sampler = Sampler(sources, sampling_keys, request.config)
    state = SearchState(stepper, request, tokenizer)
    if num_samples > 1:
        parents = torch.arange(len(sources)).repeat_interleave(num_samples)  # (B * K,)
        state.replace_beam(state.beam.select(parents), parents)  # K rows for each sentence
    return _extend_one_by_one(state, sampler)


def _extend_one_by_one(state: SearchState, sampler: Sampler | None) -> list[list[Hypothesis]]:
    """Extend each hypothesis of `state` by one token per step until it is complete.

    `sampler` draws the tokens. Without it, the most probable token is chosen, and the lowest id
    among equals. Returns the hypotheses of each sentence in the order of their rows.
    """
    eos_id = state.tokenizer.tgt.eos_id
    num_sentences = len(state.limits)
    num_samples = len(state.beam) // num_sentences  # K
    # for each sentence, the complete samples by their number
    complete: list[dict[int, Hypothesis]] = [{} for _ in range(num_sentences)]
    while len(state.beam):
        log_probs = state.next_log_probs()  # (R, V)
        beam = state.beam
        tokens = (
            sampler.draw(log_probs, beam.sentences) if sampler else most_likely_tokens(log_probs)
        )
        token_log_probs = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (R,)
        beam = beam.append(tokens, token_log_probs, beam.total_log_probs + token_log_probs)
        state.beam = beam
        is_at_limit = state.limits[beam.sentences] == beam.length  # (R,)
        is_complete = (fetch(tokens)[0] == eos_id) | is_at_limit  # (R,)
        if is_complete.any():
            complete_rows = is_complete.nonzero().squeeze(1)
            hypotheses = state.to_hypotheses(beam.select(complete_rows))
            for row, (sentence, hypothesis) in zip(complete_rows.tolist(), hypotheses, strict=True):
                # A complete sample stays in the beam, and is extended further, until all K samples
                # of its sentence are complete; keep the hypothesis of its first EOS. The rows of a
                # sentence are removed together, so `row % K` is the number of the sample.
                complete[sentence].setdefault(row % num_samples, hypothesis)
            _drop_complete_sentences(state, complete, num_samples)
    results = [[samples[number] for number in range(num_samples)] for samples in complete]
    for hypotheses_of_sentence in results:
        check_finite(hypotheses_of_sentence)
    if not state.request.needs_log_probs:
        results = [[_without_scores(h) for h in hypotheses] for hypotheses in results]
    return results


def _without_scores(hypothesis: Hypothesis) -> Hypothesis:
    """Return a hypothesis without scores, which were computed from logits without a softmax."""
    return replace(hypothesis, log_prob=math.nan, score=math.nan, token_log_probs=[])


def _drop_complete_sentences(
    state: SearchState, complete: list[dict[int, Hypothesis]], num_samples: int
) -> None:
    """Remove the sentences whose samples are all complete from the beam."""
    sentences = state.beam.sentences
    is_live = torch.tensor([len(complete[i]) < num_samples for i in sentences.tolist()])  # (R,)
    if not is_live.all():
        rows = is_live.nonzero().squeeze(1)
        state.replace_beam(state.beam.select(rows), rows)
