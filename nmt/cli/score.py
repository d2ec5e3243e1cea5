"""Run `nmt-score`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nmt.cli.streams import find_output, open_output
from nmt.cli.translate import load_translator
from nmt.config import Engine, OutputFormat, ScoreConfig, ScoreMeasure
from nmt.data.languages import Tags, encode_sources
from nmt.data.text import compress, pair_lines, read_input
from nmt.data.word_alignment import link_words
from nmt.runtime.distributed import set_num_threads
from nmt.runtime.files import replace_file
from nmt.search.hypotheses import Hypothesis
from nmt.translate.contrast import OtherLines
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
    scorer = _WindowScorer(translator, config)
    first_line = 0
    while True:
        window = list(islice(pairs, config.window_lines))
        if not window:
            break
        sources = [source for source, _ in window]
        targets = [target for _, target in window]
        yield from scorer.score(sources, targets, first_line)
        first_line += len(window)


class _WindowScorer:
    """Scores the pairs of a text, window by window.

    Raises a `ConfigError` if the model or the reverse model does not support the settings.
    """

    def __init__(self, translator: Translator, config: ScoreConfig) -> None:
        self._translator = translator
        self._config = config
        self._search = translator.search_config(**config.search_changes())
        translator.backend.check(self._search, scoring=True)
        self._tags = translator.choose_tags(**config.language_options)
        self._reverse_model = None
        if config.reverse_model is not None:
            languages = translator.find_directions(self._tags)
            self._reverse_model = ReverseModel(config.reverse_model, languages, config.device)
        self._other_sources = OtherLines(config.contrast_lines, "sources")
        self._other_targets = OtherLines(config.contrast_lines, "targets")

    def score(
        self, sources: list[str], targets: list[str], first_line: int
    ) -> list[dict[str, Any]]:
        """Score the pairs of a window, and return their JSON records.

        `first_line` is the number of lines before the window, for error messages.
        """
        hypotheses = self._score_targets(sources, targets, first_line)
        records = []
        for source, hypothesis in zip(sources, hypotheses, strict=True):
            record = _to_record(source, hypothesis, self._translator, self._tags)
            if self._config.measure is ScoreMeasure.alignment and "alignment" in record:
                # replaces the source position of each target token by a text such as "0-0 1-2"
                record["alignment"] = _link_words(record, self._translator, self._tags)
            records.append(record)
        if self._reverse_model is not None:
            reverse_hypotheses = self._reverse_model.score(sources, targets, first_line=first_line)
            for record, reverse_hypothesis in zip(records, reverse_hypotheses, strict=True):
                record |= _measure_both_directions(record["per_token"], reverse_hypothesis)
        if self._config.measure is ScoreMeasure.contrast:
            self._add_contrast(records, sources, targets, first_line)
        return records

    def _score_targets(
        self, sources: Sequence[str], targets: Sequence[str], first_line: int
    ) -> list[Hypothesis]:
        """Score the targets of a window with the model, given the sources."""
        return self._translator.score_hypotheses(
            sources,
            targets,
            self._search,
            first_line=first_line,
            max_tokens=self._config.max_tokens,
            **self._config.language_options,
        )

    def _add_contrast(
        self,
        records: Sequence[dict[str, Any]],
        sources: Sequence[str],
        targets: Sequence[str],
        first_line: int,
    ) -> None:
        """Add `contrast` to each record.

        Without a reverse model, the contrast is log P(target|source) per token, minus the mean of
        log P(target|other source) per token over other sources of the text. With a reverse model,
        it is the mean of this difference and the reverse one: log P(source|target) per token, minus
        the mean of log P(source|other target) per token.
        """
        other_scores = []
        for other_sources in self._other_sources.choose(sources):
            other_scores.append(self._score_targets(other_sources, targets, first_line))
        scores = [record["per_token"] for record in records]
        contrasts = _subtract_mean(scores, other_scores)
        if self._reverse_model is not None:
            other_scores = []
            for other_targets in self._other_targets.choose(targets):
                other_scores.append(
                    self._reverse_model.score(sources, other_targets, first_line=first_line)
                )
            reverse_scores = [record["reverse_per_token"] for record in records]
            reverse_contrasts = _subtract_mean(reverse_scores, other_scores)
            contrasts = (contrasts + reverse_contrasts) / 2
        for record, contrast in zip(records, contrasts.tolist(), strict=True):
            record["contrast"] = contrast


def _subtract_mean(
    scores: Sequence[float], other_scores: Sequence[Sequence[Hypothesis]]
) -> npt.NDArray[np.float64]:
    """Return the score of each pair minus the mean of its scores with other lines (N,).

    Args:
        scores: log-probabilities per token of N pairs.
        other_scores: for each choice of other lines, the hypotheses of the N pairs.
    """
    other_per_token = []  # (number of choices, N)
    for hypotheses in other_scores:
        other_per_token.append([_log_prob_per_token(hypothesis) for hypothesis in hypotheses])
    means = np.mean(other_per_token, axis=0)  # (N,)
    differences: npt.NDArray[np.float64] = np.array(scores) - means
    return differences


def _measure_both_directions(per_token: float, reverse_hypothesis: Hypothesis) -> dict[str, float]:
    """Return the measures of a pair that need the reverse model.

    `per_token` is log P(target|source) per token. `dual` is exp(-(|Ha - Hb| + (Ha + Hb) / 2)) for
    the cross-entropies Ha and Hb of both models, in nats per token, as in Junczys-Dowmunt (2018).
    """
    entropy = -per_token
    reverse_entropy = -_log_prob_per_token(reverse_hypothesis)
    difference = abs(entropy - reverse_entropy)
    mean_entropy = (entropy + reverse_entropy) / 2
    return {
        "reverse_log_prob": reverse_hypothesis.log_prob,
        "reverse_per_token": _log_prob_per_token(reverse_hypothesis),
        "dual": math.exp(-(difference + mean_entropy)),
    }


def _log_prob_per_token(hypothesis: Hypothesis) -> float:
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
        record["tokens"][num_tgt_tags:],  # `tokens` has no EOS
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
        "per_token": _log_prob_per_token(hypothesis),
        "score": hypothesis.score,
        "tokens": tokenizers.tgt.pieces(hypothesis.tokens[:-1]),  # without EOS
        "token_log_probs": hypothesis.token_log_probs,
    }
    if hypothesis.alignment is not None:
        [ids] = encode_sources(tokenizers.src, [source], tags)
        record["source_tokens"] = tokenizers.src.pieces([*ids, tokenizers.src.eos_id])
        record["alignment"] = hypothesis.alignment[: len(record["tokens"])]  # without EOS
    return record
