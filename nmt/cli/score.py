"""Run `nmt-score`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from nmt.cli.streams import find_output, open_output
from nmt.cli.translate import load_translator
from nmt.config import Engine, OutputFormat, ScoreConfig, ScoreMeasure
from nmt.data.languages import Tags, encode_sources
from nmt.data.text import compress, pair_lines, read_input
from nmt.data.word_alignment import link_words
from nmt.runtime.distributed import set_num_threads
from nmt.runtime.files import replace_file
from nmt.search.hypotheses import Hypothesis
from nmt.translate.reverse_model import ReverseModel
from nmt.translate.translator import Translator


def score(config: ScoreConfig) -> None:
    """Score the pairs of `src` and `tgt`, and write one line for each pair to `output`.

    A stream is flushed after each line. A file appears under its name when it is complete.
    """
    src = str(config.src)  # `ScoreConfig` requires `src` and `tgt`
    tgt = str(config.tgt)
    output_file = find_output(config.output, [src, tgt])
    set_num_threads(config.num_threads)
    if config.backend is Engine.auto:  # CTranslate2's quantized weights would change the scores
        config = replace(config, backend=Engine.native, quantization=None)
    translator = load_translator(config, config.device)
    src_name = "stdin" if src == "-" else src
    tgt_name = "stdin" if tgt == "-" else tgt
    pairs = pair_lines(read_input(src), read_input(tgt), names=(src_name, tgt_name))
    with contextlib.ExitStack() as stack:
        if output_file is None:
            stream = open_output(config.output, stack)
        else:
            temporary = stack.enter_context(replace_file(output_file))
            file = stack.enter_context(temporary.open("wb"))
            stream = stack.enter_context(compress(file, output_file.suffix))
        for index, record in enumerate(_score_pairs(pairs, translator, config)):
            if config.format is OutputFormat.text:
                line = str(record.get(config.measure.value, ""))
            else:
                line = json.dumps({"index": index, **record}, ensure_ascii=False)
            stream.write(line.encode("utf-8") + b"\n")
            if output_file is None:
                stream.flush()


def _score_pairs(
    pairs: Iterator[tuple[str, str]], translator: Translator, config: ScoreConfig
) -> Iterator[dict[str, Any]]:
    """Score pairs in windows of `window_lines`, and yield the JSON record of each pair."""
    search = translator.search_config(**config.search_changes())
    translator.backend.check(search, scoring=True)
    tags = translator.choose_tags(**config.language_options)
    reverse_model = None
    if config.reverse_model is not None:
        languages = translator.find_languages(tags)
        reverse_model = ReverseModel(config.reverse_model, languages, config.device)
    first_line = 0
    while True:
        window = list(islice(pairs, config.window_lines))
        if not window:
            break
        sources = [source for source, _ in window]
        targets = [target for _, target in window]
        hypotheses = translator.score_hypotheses(
            sources,
            targets,
            search,
            first_line=first_line,
            max_tokens=config.max_tokens,
            **config.language_options,
        )
        reverse_hypotheses: Sequence[Hypothesis | None] = [None] * len(window)
        if reverse_model is not None:
            reverse_hypotheses = reverse_model.score(sources, targets, first_line=first_line)
        first_line += len(window)
        for source, hypothesis, reverse_hypothesis in zip(
            sources, hypotheses, reverse_hypotheses, strict=True
        ):
            record = _to_record(source, hypothesis, translator, tags)
            if reverse_hypothesis is not None:
                record |= _measure_both_directions(hypothesis, reverse_hypothesis)
            if config.measure is ScoreMeasure.alignment and "alignment" in record:
                # replaces the source position of each target token by a text such as "0-0 1-2"
                record["alignment"] = _link_words(record, translator, tags)
            yield record


def _measure_both_directions(
    hypothesis: Hypothesis, reverse_hypothesis: Hypothesis
) -> dict[str, float]:
    """Return the measures of a pair that need the reverse model.

    `dual` is exp(-(|Ha - Hb| + (Ha + Hb) / 2)) for the cross-entropies Ha and Hb of both models,
    in nats per token, as in Junczys-Dowmunt (2018).
    """
    entropy = -_per_token(hypothesis)
    reverse_entropy = -_per_token(reverse_hypothesis)
    difference = abs(entropy - reverse_entropy)
    mean_entropy = (entropy + reverse_entropy) / 2
    return {
        "reverse_log_prob": reverse_hypothesis.log_prob,
        "reverse_per_token": _per_token(reverse_hypothesis),
        "dual": math.exp(-(difference + mean_entropy)),
    }


def _per_token(hypothesis: Hypothesis) -> float:
    """Return the log-probability per token, EOS included; 0 for two empty lines."""
    return hypothesis.log_prob / max(len(hypothesis.tokens), 1)


def _link_words(record: dict[str, Any], translator: Translator, tags: Tags) -> str:
    """Return the links of the words of a pair, without its tags, such as "0-0 1-2"."""
    num_src_tags = len(translator.tokenizer.src.encode(tags.src))
    num_tgt_tags = len(translator.tokenizer.tgt.encode(tags.tgt))
    positions = []  # for each target token, the source position after the tags
    for position in record["alignment"][num_tgt_tags:]:
        positions.append(max(0, position - num_src_tags))  # 0 for tokens aligned to a tag
    links = link_words(
        record["source_tokens"][num_src_tags:-1],  # without tags and EOS
        record["tokens"][num_tgt_tags:],
        positions,
    )
    return " ".join(f"{src_word}-{tgt_word}" for src_word, tgt_word in links)


def _to_record(
    source: str, hypothesis: Hypothesis, translator: Translator, tags: Tags
) -> dict[str, Any]:
    """Return the JSON record of a pair: its measures, tokens and, if requested, alignment."""
    tokenizers = translator.tokenizer
    record: dict[str, Any] = {
        "log_prob": hypothesis.log_prob,
        "per_token": _per_token(hypothesis),
        "score": hypothesis.score,
        "tokens": tokenizers.tgt.pieces(hypothesis.tokens[:-1]),  # without EOS
        "token_log_probs": hypothesis.token_log_probs,
    }
    if hypothesis.alignment is not None:
        [ids] = encode_sources(tokenizers.src, [source], tags)
        record["source_tokens"] = tokenizers.src.pieces([*ids, tokenizers.src.eos_id])
        record["alignment"] = hypothesis.alignment[: len(record["tokens"])]  # without EOS
    return record
