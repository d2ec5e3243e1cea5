"""The state of a running search: the beam, and the model's state after its hypotheses."""

# B sentences, S source, V vocab; R live hypotheses, sorted by sentence

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nmt.data.batch import pad_source
from nmt.data.tokenizer import Tokenizers
from nmt.model.fast.transfer import to_cpu, to_device
from nmt.search.hypotheses import Beam, Hypothesis, shift_alignment
from nmt.search.request import Ids, SearchRequest
from nmt.search.scoring import coverage_score
from nmt.search.stepper import Stepper


class SearchState:
    """The live hypotheses of a batch (`beam`) and the state of the model that extends them.

    Sentences are numbered in the order in which they are added. All rows of the beam have the same
    number of columns. The tokens of sentence i begin in column `first_columns[i]`, which is above 0
    for a sentence that joined during the search.
    """

    def __init__(
        self,
        stepper: Stepper,
        request: SearchRequest,
        tokenizers: Tokenizers,
        *,
        num_copies: int = 1,
    ) -> None:
        """Encode the sentences with the model of `stepper`.

        With `num_copies` n, each sentence becomes n equal sentences.
        """
        src, src_lengths = pad_source(request.sources, tokenizers)  # (B, S), (B,)
        needs_attention = request.config.needs_attention
        model_state = stepper.start(src, src_lengths, with_attention=needs_attention)
        if num_copies > 1:
            rows = torch.arange(len(src)).repeat_interleave(num_copies)
            model_state = stepper.reorder(model_state, rows)
            request = request.select(rows.tolist())
            src_lengths = src_lengths[rows]
        self.request = request
        self.tokenizers = tokenizers
        self.limits = torch.tensor(request.length_limits())  # (B,), maximum numbers of tokens
        self.first_columns = torch.zeros_like(self.limits)  # (B,)
        source_length = src.size(1) if needs_attention else None
        self.beam = Beam.start(len(src_lengths), stepper.device, source_length=source_length)
        self._stepper = stepper
        self._constraints = request.all_constraints(tokenizers)
        self._num_src_tokens = src_lengths - 1  # (B,), without EOS
        self._model_state = model_state

    def next_log_probs(self) -> Tensor:
        """Return the log-probabilities (R, V) of the next tokens, after applying the constraints.

        Runs the model on the newest token of each hypothesis. Adds the attention of this step to
        `beam` if the settings need attention. Returns logits instead if
        `SearchRequest.needs_log_probs` is False.
        """
        if self.beam.length:
            tokens = self.beam.tokens[:, -1]  # (R,)
        else:
            bos_id = self.tokenizers.tgt.bos_id
            tokens = torch.full((len(self.beam),), bos_id, device=self.beam.tokens.device)
        step = self._stepper.step
        if not self.request.needs_log_probs:
            step = self._stepper.step_unnormalized
        log_probs = step(tokens, self._model_state)  # (R, V)
        if self.request.config.needs_attention:
            attention = self._stepper.attention(self._model_state)  # (R, S)
            self.beam = self.beam.record_attention(attention)
        for constraint in self._constraints:
            log_probs = constraint(log_probs, self.beam)
        return log_probs

    def num_tokens(self, sentences: Tensor, num_columns: int) -> Tensor:
        """Return the number of tokens of `sentences` in the first `num_columns` columns."""
        return num_columns - self.first_columns[sentences]

    def replace_beam(self, beam: Beam, parents: Tensor) -> None:
        """Replace the beam; `parents` (R',) are the old rows that the new hypotheses extend."""
        if len(parents):
            self._model_state = self._stepper.reorder(self._model_state, parents)
        self.beam = beam

    def to_hypotheses(self, beam: Beam) -> list[tuple[int, Hypothesis]]:
        """Return each row of `beam` as a scored hypothesis, with the number of its sentence."""
        coverages = [0.0] * len(beam)
        alignments: list[list[int]] | None = None
        if beam.alignment is None or beam.attention_sums is None:
            tokens, log_probs = to_cpu(beam.tokens, beam.token_log_probs)  # (R, length) each
        else:
            num_src_tokens = self._num_src_tokens[beam.sentences]  # (R,)
            num_src_tokens = to_device(num_src_tokens, beam.tokens.device)
            coverage = coverage_score(beam.attention_sums, num_src_tokens)  # (R,)
            # one `to_cpu`, since each waits for the device
            tokens, log_probs, coverage, alignment = to_cpu(
                beam.tokens, beam.token_log_probs, coverage, beam.alignment
            )
            coverages = coverage.tolist()
            alignments = alignment.tolist()
        token_rows = tokens.tolist()
        log_prob_rows = log_probs.tolist()
        first_columns = self.first_columns[beam.sentences].tolist()
        eos_id = self.tokenizers.tgt.eos_id
        numbered_hypotheses = []
        for row, sentence in enumerate(beam.sentences.tolist()):
            first_column = first_columns[row]
            row_tokens = token_rows[row][first_column:]
            row_alignment = None
            if alignments is not None:
                # `first_column` is 0, since no sentence joins if the settings need attention
                row_alignment = alignments[row]
                if self._stepper.shifts_alignment:
                    num_src = int(self._num_src_tokens[sentence])
                    row_alignment = shift_alignment(row_alignment, row_tokens, eos_id, num_src)
            hypothesis = Hypothesis.from_tokens(
                row_tokens,
                log_prob_rows[row][first_column:],
                self.request.config,
                eos_id=eos_id,
                coverage=coverages[row],
                alignment=row_alignment,
            )
            numbered_hypotheses.append((sentence, hypothesis))
        return numbered_hypotheses

    def join(self, sources: Sequence[Ids]) -> None:
        """Append sentences to the beam, and drop the columns that no hypothesis uses."""
        beam = self.beam
        # the first columns are unused if all sentences that began in them are complete
        num_unused = int(self.first_columns[beam.sentences].min())
        length = beam.length - num_unused
        new_sentences = len(self.limits) + torch.arange(len(sources))  # (B',)
        new_limits = torch.tensor(replace(self.request, sources=sources).length_limits())  # (B',)
        new_first_columns = torch.full_like(new_limits, length)  # (B',)
        self.limits = torch.cat([self.limits, new_limits])
        self.first_columns = torch.cat([self.first_columns - num_unused, new_first_columns])
        shape = (len(sources), length)
        device = beam.tokens.device
        # The next step of the model reads the last column, which is BOS. BOS in earlier columns has
        # no effect on constraints.
        padding = torch.full(shape, self.tokenizers.tgt.bos_id, device=device)  # (B', length)
        zeros = torch.zeros(shape, device=device)  # (B', length)
        new_sums = torch.zeros(len(sources), device=device)  # (B',)
        self.beam = Beam(
            sentences=torch.cat([beam.sentences, new_sentences]),
            total_log_probs=torch.cat([beam.total_log_probs, new_sums]),
            tokens=torch.cat([beam.tokens[:, num_unused:], padding]),
            token_log_probs=torch.cat([beam.token_log_probs[:, num_unused:], zeros]),
        )
        src, src_lengths = pad_source(sources, self.tokenizers)  # (B', S), (B',)
        self._model_state = self._stepper.join(self._model_state, src, src_lengths)
