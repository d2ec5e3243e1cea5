"""Translates with CTranslate2, called directly from text to text."""

from __future__ import annotations

import ctranslate2
import sentencepiece
from turns import Turns, fastest

_BATCHES = {
    "cpu": [("examples", 32), ("examples", 64), ("examples", 128), ("tokens", 1024)],
    "cuda": [("examples", 128), ("examples", 512), ("tokens", 8192), ("tokens", 16384)],
}
_EXTRA_TOKENS = 50  # above the longest source; nmt limits each sentence by its own length


def main() -> None:
    """Translate all lines in each turn, with the batches that were fastest in the warm-up.

    Several workers of one thread are faster than one worker of several threads.
    """
    turns = Turns()
    job = turns.job
    folder = job["folders"][job["options"]["format"]]
    engine = ctranslate2.Translator(
        folder, device=job["device"], inter_threads=job["threads"], intra_threads=1
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=folder + "/tokenizer.model")
    fixed_length = job["fixed_length"]
    if fixed_length:
        bounds = {"min_decoding_length": fixed_length - 1, "max_decoding_length": fixed_length}
    else:
        longest = max(len(ids) for ids in tokenizer.encode(job["lines"]))
        bounds = {"max_decoding_length": longest + _EXTRA_TOKENS}

    def translate(lines: list[str], batch: tuple[str, int]) -> dict[str, int]:
        batch_type, batch_size = batch
        results = engine.translate_batch(
            tokenizer.encode(lines, out_type=str),
            batch_type=batch_type,
            max_batch_size=batch_size,
            beam_size=job["beam_size"],
            length_penalty=job["length_exponent"],
            return_end_token=True,
            **bounds,
        )
        translations = [result.hypotheses[0] for result in results]
        tokenizer.decode(translations)
        num_tokens = sum(len(pieces) for pieces in translations)
        return {"sentences": len(translations), "tgt_tokens": num_tokens}

    warmup_lines = job["lines"][: job["warmup_lines"]]
    choices = _BATCHES[job["device"]]
    translate(warmup_lines, choices[0])
    batch = fastest(choices, lambda choice: translate(warmup_lines, choice), job["device"])
    turns.ready(ctranslate2=ctranslate2.__version__, batch=f"{batch[1]} {batch[0]}")
    while True:
        turns.end_translation(lambda lines: translate(lines, batch))


main()
