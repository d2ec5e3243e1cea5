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
from nmt.model.fast.transfer import to_cpu
from nmt.search.beam import BeamSearch
from nmt.search.constraints import ForbiddenTokens
from nmt.search.diverse import DiverseSearch
from nmt.search.glossary import mark_word_ends
from nmt.search.hypotheses import Hypothesis, check_finite
from nmt.search.protect import encode_protected, find_missing
from nmt.search.request import SearchRequest
from nmt.search.sampling import Sampler, make_sampling_keys
from nmt.search.single import can_search_one_sentence, search_one_sentence
from nmt.search.state import SearchState
from nmt.search.stepper import Stepper
from nmt.search.term_search import TermSearch, find_terms


@torch.inference_mode()
def search(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence, best first.

    With sampling, returns `beam_size` samples per sentence in the order in which they are drawn.
    Raises a `ConfigError` for a prefix with control symbols, and a `ModelError` for a model whose
    output is not finite.
    """
    request.check_prefixes(tokenizers)
    if request.config.alternatives:
        return _search_alternatives(stepper, request, tokenizers)
    if request.config.protect:
        return _search_protected(stepper, request, tokenizers)
    if can_search_one_sentence(request, stepper.device):
        return [search_one_sentence(stepper, request, tokenizers)]
    if request.config.sampling:
        return _sample(stepper, request, tokenizers)
    if request.config.beam_size == 1:
        return _extend_one_by_one(SearchState(stepper, request, tokenizers), None)
    return _search_with_beam(stepper, request, tokenizers)


def _search_with_beam(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[list[Hypothesis]]:
    """Return the results of beam search for each sentence."""
    beam_search = _start_beam_search(stepper, request, tokenizers)
    while beam_search.num_live:
        beam_search.step()
    return [beam_search.result(i) for i in range(len(request.sources))]


def _search_protected(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[list[Hypothesis]]:
    """Search without `protect`, then search again the sentences that lack a protected text.

    The second search requires the protected texts, such as placeholders, like terms of a glossary.
    It does not require texts that the target tokenizer cannot encode. A sentence that lacks only
    such texts is not searched again.
    """
    plain_request = replace(request, config=replace(request.config, protect=False))
    results = search(stepper, plain_request, tokenizers)
    indices = []  # sentences whose best translation lacks a protected text that can be encoded
    for i, hypotheses in enumerate(results):
        if not hypotheses:
            continue
        source = request.decode_source(i, tokenizers)
        translation = tokenizers.tgt.decode(hypotheses[0].tokens)
        missing = find_missing(source, translation)
        if any(encode_protected(text, tokenizers.tgt) for text in missing):
            indices.append(i)
    if indices:
        second_results = _search_with_beam(stepper, request.select(indices), tokenizers)
        for i, hypotheses in zip(indices, second_results, strict=True):
            results[i] = hypotheses
    return results


def _start_beam_search(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> BeamSearch:
    """Return the beam search that the settings choose, before its first step."""
    if request.config.has_terms:
        return TermSearch(
            stepper,
            request,
            tokenizers,
            terms=find_terms(request, tokenizers),
            ends_previous_word=mark_word_ends(tokenizers.tgt),
        )
    if request.config.beam_groups > 1:
        return DiverseSearch(stepper, request, tokenizers)
    return BeamSearch(stepper, request, tokenizers)


def _search_alternatives(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[list[Hypothesis]]:
    """Return translations of each sentence that differ in the first token after the prefix.

    For each of the `num_results` most probable tokens except EOS, returns the best translation with
    this token. The translation with the most probable token comes first.
    """
    config = replace(request.config, alternatives=0)
    # a beam search of one step, without settings that are for complete translations
    first_token_config = replace(
        config,
        beam_size=request.num_results,
        beam_groups=1,
        diversity_penalty=SearchConfig.diversity_penalty,  # the default, as without groups
        glossary=[],
        protect=False,
        coverage_penalty=0.0,
        alignment=False,
        min_length=0,
        max_length_a=0.0,
        max_length_b=1,  # one token after the prefix, see `SearchRequest.length_limits`
    )
    first_token_request = replace(
        request,
        config=first_token_config,
        n_best=None,
        constraints=[*request.constraints, ForbiddenTokens([tokenizers.tgt.eos_id])],
    )
    sentences = []  # the sentence of each prefix
    prefixes = []
    for i, hypotheses in enumerate(search(stepper, first_token_request, tokenizers)):
        for hypothesis in hypotheses:
            sentences.append(i)
            prefixes.append(hypothesis.tokens)
    expanded_request = replace(
        request.select(sentences), config=config, prefixes=prefixes, n_best=1
    )
    results: list[list[Hypothesis]] = [[] for _ in request.sources]
    expanded = search(stepper, expanded_request, tokenizers)
    for sentence, [hypothesis] in zip(sentences, expanded, strict=True):  # one each: `n_best` is 1
        results[sentence].append(hypothesis)
    return results


def _sample(
    stepper: Stepper, request: SearchRequest, tokenizers: Tokenizers
) -> list[list[Hypothesis]]:
    """Return `beam_size` samples of each sentence."""
    num_samples = request.config.beam_size
    sampling_keys = request.sampling_keys
    if sampling_keys is None:
        sampling_keys = make_sampling_keys(request.sources)
    sources = [[*source, tokenizers.src.eos_id] for source in request.sources]
    sampler = Sampler(sources, sampling_keys, request.config)
    state = SearchState(stepper, request, tokenizers)
    if num_samples > 1:
        parents = torch.arange(len(sources)).repeat_interleave(num_samples)  # (B * K,)
        state.replace_beam(state.beam.select(parents), parents)  # K rows for each sentence
    return _extend_one_by_one(state, sampler)


def _extend_one_by_one(state: SearchState, sampler: Sampler | None) -> list[list[Hypothesis]]:
    """Extend each hypothesis of `state` by one token per step until it is complete.

    `sampler` draws the tokens. Without a sampler, the most probable token is chosen, and the lowest
    id if several tokens have the same probability. Returns the hypotheses of each sentence in the
    order of their rows.
    """
    eos_id = state.tokenizers.tgt.eos_id
    num_sentences = len(state.limits)
    num_samples = len(state.beam) // num_sentences  # K
    # for each sentence, the complete samples, keyed by their number
    complete: list[dict[int, Hypothesis]] = [{} for _ in range(num_sentences)]
    while len(state.beam):
        log_probs = state.next_log_probs()  # (R, V)
        beam = state.beam
        if sampler is None:
            tokens = most_likely_tokens(log_probs)  # (R,)
        else:
            tokens = sampler.draw(log_probs, beam.sentences)  # (R,)
        token_log_probs = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (R,)
        beam = beam.append(tokens, token_log_probs, beam.total_log_probs + token_log_probs)
        state.beam = beam
        is_at_limit = state.limits[beam.sentences] == beam.length  # (R,), on the CPU
        [tokens_on_cpu] = to_cpu(tokens)
        is_complete = (tokens_on_cpu == eos_id) | is_at_limit  # (R,)
        if is_complete.any():
            complete_rows = is_complete.nonzero().squeeze(1)
            hypotheses_of_rows = state.to_hypotheses(beam.select(complete_rows))
            for row, (sentence, hypothesis) in zip(
                complete_rows.tolist(), hypotheses_of_rows, strict=True
            ):
                # A sentence keeps its K rows, in order, until all of its samples are complete. So
                # `row % K` is the number of a sample.
                sample_number = row % num_samples
                # A complete row is extended further, as long as its sentence is in the beam. Only
                # its first complete hypothesis counts.
                complete[sentence].setdefault(sample_number, hypothesis)
            _drop_complete_sentences(state, complete, num_samples)
    results = []
    for samples in complete:
        hypotheses = [samples[number] for number in range(num_samples)]
        check_finite(hypotheses)
        if not state.request.needs_log_probs:
            hypotheses = [_without_scores(hypothesis) for hypothesis in hypotheses]
        results.append(hypotheses)
    return results


def _without_scores(hypothesis: Hypothesis) -> Hypothesis:
    """Return a hypothesis without its scores.

    If a request needs no log-probabilities, its scores are sums of logits without a softmax.
    """
    return replace(hypothesis, log_prob=math.nan, score=math.nan, token_log_probs=[])


def _drop_complete_sentences(
    state: SearchState, complete: list[dict[int, Hypothesis]], num_samples: int
) -> None:
    """Remove the rows of sentences whose samples are all complete from the beam."""
    sentences = state.beam.sentences.tolist()
    is_live = torch.tensor([len(complete[i]) < num_samples for i in sentences])  # (R,)
    if not is_live.all():
        rows = is_live.nonzero().squeeze(1)
        state.replace_beam(state.beam.select(rows), rows)
