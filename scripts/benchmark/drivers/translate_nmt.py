"""Translates with nmt from text to text, by its Python interface: native, or an exported folder."""

from __future__ import annotations

import gc

import torch
from ours import take_kernels
from turns import Turns, peak_bytes

from nmt import Translator, __version__
from nmt.translate.options import LineOptions
from nmt.translate.windows import WindowReader


def main() -> None:
    """Translate all lines in each turn, with nmt's own batches and defaults."""
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    dtype = take_kernels(job)
    is_native = job["options"]["folder"] == "native"
    translator = Translator.load(
        job["folders"][job["options"]["folder"]],
        device=job["device"],
        dtype=dtype if is_native else "float32",
        backend="native" if is_native else "ctranslate2",
        num_threads=job["threads"],
    )
    search = {"beam_size": job["beam_size"]}
    length = job["fixed_length"]
    if length:  # EOS is one of the tokens
        search |= {"min_length": length - 1, "max_length_a": 0.0, "max_length_b": length}
    config = translator.search_config(**search)

    def translate(lines: list[str]) -> dict[str, int]:
        options = LineOptions(with_scores=False)
        translated = translator.translate_windows(WindowReader(lines), config, options)
        best = [line.translations[0] for _, results in translated for line in results]
        tokens = sum(len(translation.tokens) + translation.finished for translation in best)
        return {"sentences": len(best), "tgt_tokens": tokens, "peak_bytes": peak(job["device"])}

    gc.freeze()  # as nmt-translate does with what it has imported
    translate(job["lines"][: job["warmup_lines"]])
    turns.ready(nmt=__version__, torch=torch.__version__)
    while True:
        turns.end(**translate(job["lines"]))


def peak(device: str) -> int:
    """Return the most memory so far, of tensors on a GPU."""
    return peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()


main()
