"""Translates with nmt from text to text, by its Python interface: a native or an exported model."""

from __future__ import annotations

import gc

import torch
from nmt_options import apply_options
from turns import Turns, peak_bytes

from nmt import Translator, __version__
from nmt.translate.options import LineOptions
from nmt.translate.windows import WindowReader


def main() -> None:
    """Translate all lines in each turn, with nmt's own batches and defaults but no loop guard."""
    turns = Turns()
    job = turns.job
    device = job["device"]
    torch.set_num_threads(job["threads"])
    dtype = apply_options(job)
    model_format = job["options"]["format"]
    is_native = model_format == "native"
    translator = Translator.load(
        job["folders"][model_format],
        device=device,
        dtype=dtype if is_native else "float32",
        backend=job["options"].get("backend", "native" if is_native else "ctranslate2"),
        num_threads=job["threads"],
    )
    search = {"beam_size": job["beam_size"], "loop_guard": False}  # no other toolkit has one
    fixed_length = job["fixed_length"]
    if fixed_length:  # `min_length` does not count EOS
        search |= {"min_length": fixed_length - 1, "max_length_a": 0.0}
        search["max_length_b"] = fixed_length
    config = translator.search_config(**search)

    def translate(lines: list[str]) -> dict[str, int]:
        options = LineOptions(with_scores=False)
        num_sentences = num_tokens = 0
        for _, results in translator.translate_windows(WindowReader(lines), config, options):
            for result in results:
                translation = result.translations[0]
                num_sentences += 1
                num_tokens += len(translation.tokens) + translation.finished
        memory = peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
        return {"sentences": num_sentences, "tgt_tokens": num_tokens, "peak_bytes": memory}

    def translate_alone(lines: list[str]) -> dict[str, int]:
        return {"sentences": len(translator.translate(lines, config))}

    gc.freeze()  # exclude imported objects from garbage collection, as nmt-translate does
    translate(job["lines"][: job["warmup_lines"]])
    turns.ready(nmt=__version__, torch=torch.__version__)
    while True:
        turns.end_translation(translate_alone if job.get("one_by_one") else translate)


main()
