"""Translates with CTranslate2, called directly from text to text."""

from __future__ import annotations

import ctranslate2
import sentencepiece
from turns import Turns, fastest

_BATCHES = {
    "cpu": [("examples", 32), ("examples", 64), ("examples", 128), ("tokens", 1024)],
    "cuda": [("examples", 128), ("examples", 512), ("tokens", 8192), ("tokens", 16384)],
}
_MORE_TOKENS = 50  # than the longest source has, at most; nmt bounds each sentence by its own


def main() -> None:
    """Translate all lines in each turn, with the batches that were fastest while warming up.

    So many workers of one thread each beat one worker of as many threads.
    """
    turns = Turns()
    job = turns.job
    folder = job["folders"][job["options"]["folder"]]
    engine = ctranslate2.Translator(
        folder, device=job["device"], inter_threads=job["threads"], intra_threads=1
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=folder + "/tokenizer.model")
    longest = max(map(len, tokenizer.encode(job["lines"])))
    bounds = {"max_decoding_length": longest + _MORE_TOKENS}
    length = job["fixed_length"]
    if length:
        bounds = {"min_decoding_length": length - 1, "max_decoding_length": length}

    def translate(lines: list[str], batch: tuple[str, int]) -> dict[str, int]:
        results = engine.translate_batch(
            tokenizer.encode(lines, out_type=str),
            batch_type=batch[0],
            max_batch_size=batch[1],
            beam_size=job["beam_size"],
            length_penalty=job["length_exponent"],
            return_end_token=True,
            **bounds,
        )
        best = [result.hypotheses[0] for result in results]
        tokenizer.decode(best)
        return {"sentences": len(best), "tgt_tokens": sum(map(len, best))}

    some = job["lines"][: job["warmup_lines"]]
    choices = _BATCHES[job["device"]]
    translate(some, choices[0])
    batch = fastest(choices, lambda batch: translate(some, batch), job["device"])
    turns.ready(ctranslate2=ctranslate2.__version__, batch=f"{batch[1]} {batch[0]}")
    while True:
        turns.end(**translate(job["lines"], batch))


main()
