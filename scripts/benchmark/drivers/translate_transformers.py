"""Translates with `generate` of Hugging Face transformers, from text to text."""

from __future__ import annotations

import sentencepiece
import torch
import transformers
from transformers import MarianMTModel
from transformers_batches import EOS, PAD, pad
from turns import Turns, fastest, peak_bytes

_BATCH_SIZES = {"cpu": [32, 64, 128], "cuda": [128, 256, 512]}
_EXTRA_TOKENS = 50  # above the length of the source, as in nmt


def main() -> None:
    """Translate all lines in each turn, in batches of similar length, of the fastest size."""
    turns = Turns()
    job = turns.job
    device = job["device"]
    torch.set_num_threads(job["threads"])
    folder = job["folders"][job["options"]["format"]]
    dtype = getattr(torch, job["dtype"])
    model = MarianMTModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    model = model.to(device).eval()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=folder + "/tokenizer.model")
    search = {
        "num_beams": job["beam_size"],
        "length_penalty": job["length_exponent"],
        "max_length": None,
        "bad_words_ids": None,
        "early_stopping": True,  # at `num_beams` finished hypotheses, as the other engines
    }
    fixed_length = job["fixed_length"]
    if fixed_length:
        search["min_new_tokens"] = fixed_length - 1

    @torch.inference_mode()
    def translate(lines: list[str], batch_size: int) -> dict[str, int]:
        rows = [[*ids, EOS] for ids in tokenizer.encode(lines)]
        rows.sort(key=len, reverse=True)
        num_tokens = 0
        for start in range(0, len(rows), batch_size):
            src = pad(rows[start : start + batch_size]).to(device)  # (B, S)
            output = model.generate(
                input_ids=src,
                attention_mask=(src != PAD).long(),
                max_new_tokens=fixed_length or src.size(1) + _EXTRA_TOKENS,
                **search,
            )  # (B, 1 + T), with BOS
            for ids in output[:, 1:].tolist():
                length = ids.index(EOS) if EOS in ids else len(ids)
                num_tokens += min(length + 1, len(ids))
                tokenizer.decode(ids[:length])
        memory = peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
        return {"sentences": len(rows), "tgt_tokens": num_tokens, "peak_bytes": memory}

    warmup_lines = job["lines"][: job["warmup_lines"]]
    translate(warmup_lines[:8], 8)
    batch_size = fastest(
        _BATCH_SIZES[device], lambda choice: translate(warmup_lines, choice), device
    )
    turns.ready(transformers=transformers.__version__, torch=torch.__version__, batch=batch_size)
    while True:
        turns.end_translation(lambda lines: translate(lines, batch_size))


main()
