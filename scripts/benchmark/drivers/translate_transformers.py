"""Translates with `generate` of Hugging Face transformers, from text to text."""

from __future__ import annotations

import sentencepiece
import torch
import transformers
from transformers import MarianMTModel
from turns import Turns, fastest, peak_bytes

PAD, BOS, EOS = 0, 2, 3
_BATCHES = {"cpu": [32, 64, 128], "cuda": [128, 256, 512]}
_MORE_TOKENS = 50  # than the source has, at most, as in nmt


def main() -> None:
    """Translate all lines in each turn, in batches of similar length whose size was fastest."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    folder = job["folders"][job["options"]["folder"]]
    dtype = getattr(torch, job["dtype"])
    model = MarianMTModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    model = model.to(job["device"]).eval()
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=folder + "/tokenizer.model")
    search = {
        "num_beams": job["beam_size"],
        "length_penalty": job["length_exponent"],
        "max_length": None,
        "bad_words_ids": None,
        "early_stopping": True,  # when as many are finished as the beam is wide, like the others
    }
    length = job["fixed_length"]
    if length:
        search["min_new_tokens"] = length - 1

    @torch.inference_mode()
    def translate(lines: list[str], batch_size: int) -> dict[str, int]:
        rows = [[*ids, EOS] for ids in tokenizer.encode(lines)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(rows), batch_size):
            some = order[start : start + batch_size]
            src = pad([rows[i] for i in some]).to(job["device"])
            bound = {"max_new_tokens": length or src.size(1) + _MORE_TOKENS}
            mask = (src != PAD).long()
            out = model.generate(input_ids=src, attention_mask=mask, **search, **bound)
            for i, ids in zip(some, out[:, 1:].tolist(), strict=True):
                found[i] = ids[: ids.index(EOS) + 1] if EOS in ids else ids
        tokenizer.decode([[i for i in ids if i != EOS] for ids in found])
        return {"sentences": len(found), "tgt_tokens": sum(map(len, found)), **memory(job)}

    some = job["lines"][: job["warmup_lines"]]
    translate(some[:8], 8)
    size = fastest(_BATCHES[job["device"]], lambda size: translate(some, size), job["device"])
    turns.ready(transformers=transformers.__version__, torch=torch.__version__, batch=size)
    while True:
        turns.end(**translate(job["lines"], size))


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Stack rows to (rows, longest)."""
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def memory(job: dict) -> dict[str, int]:
    """Return the most memory so far, of tensors on a GPU."""
    is_cpu = job["device"] == "cpu"
    return {"peak_bytes": peak_bytes() if is_cpu else torch.cuda.max_memory_allocated()}


main()
