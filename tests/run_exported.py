"""Translates exported folders with the library LIBRARY; run by the tests, without nmt.

`run_exported.py LIBRARY` reads a list of tasks {folder, lines, options, targets} from stdin. It
writes the translations of all lines with each of the options, with scores and text; for
transformers also the ids of the lines, the logits for `targets` as decoder input, and all attention
of the first line. Before that it runs the Python of the first folder's README.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

sys.modules["nmt"] = None  # importing it is an error
warnings.simplefilter("ignore")


def run_ctranslate2(task):
    """Translate the lines of one task with each of its options."""
    import ctranslate2
    import sentencepiece

    translator = ctranslate2.Translator(task["folder"], intra_threads=1)
    files = sorted(map(str, Path(task["folder"]).glob("tokenizer*.model")))  # joint; source, target
    source = sentencepiece.SentencePieceProcessor(model_file=files[0])
    target = sentencepiece.SentencePieceProcessor(model_file=files[-1])
    pieces = [source.encode(line, out_type=str) for line in task["lines"]]
    translations = []
    for options in task["options"]:
        options = {"max_input_length": 0, "return_scores": True, **options}
        results = translator.translate_batch(pieces, **options)
        rows = [(r.hypotheses[0], r.scores[0]) for r in results]
        translations.append([{"pieces": p, "score": s, "text": target.decode(p)} for p, s in rows])
    scored = translator.score_batch(pieces, pieces, max_input_length=0)
    return {"translations": translations, "log_probs": [result.log_probs for result in scored]}


def run_transformers(task):
    """Translate the lines of one task with each of its options, and note how the model loads."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(task["folder"])
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        task["folder"], output_loading_info=True, attn_implementation="eager"
    )
    batch = tokenizer(task["lines"], return_tensors="pt", padding=True)
    translations = []
    with torch.inference_mode():
        targets = torch.tensor(task["targets"])
        outputs = model(**batch, decoder_input_ids=targets, output_attentions=True)
        attentions = {
            kind: [layer[0].tolist() for layer in outputs[f"{kind}_attentions"]]
            for kind in ("encoder", "decoder", "cross")
        }
        for options in task["options"]:
            out = model.generate(
                **batch, **options, return_dict_in_generate=True, output_scores=True
            )
            scores = out.get("sequences_scores", torch.full((len(out.sequences),), torch.nan))
            texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
            rows = zip(out.sequences.tolist(), scores.tolist(), texts, strict=True)
            translations.append(
                [{"ids": row[1:], "score": s, "text": text} for row, s, text in rows]
            )
    return {
        "kind": type(model).__name__,
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "input_ids": [tokenizer(line).input_ids for line in task["lines"]],
        "logits": outputs.logits.tolist(),
        "attentions": attentions,
        "translations": translations,
    }


def run_onnx(task):
    """Translate the lines of one task greedily, in one batch, to the length of its options."""
    import numpy as np
    import onnxruntime
    import sentencepiece

    folder = Path(task["folder"])
    encoder = onnxruntime.InferenceSession(folder / "encoder.onnx")
    decoder = onnxruntime.InferenceSession(folder / "decoder.onnx")
    source, target = (sorted(map(str, folder.glob("tokenizer*.model"))) * 2)[:2]
    source = sentencepiece.SentencePieceProcessor(model_file=source)
    target = sentencepiece.SentencePieceProcessor(model_file=target)
    rows = [[*source.encode(line), *task["end"]] for line in task["lines"]]
    width = max(map(len, rows))
    mask = np.array([[i < max(len(row), 1) for i in range(width)] for row in rows])
    ids = np.array([row + [source.pad_id()] * (width - len(row)) for row in rows])
    keys, values = encoder.run(None, {"source": ids, "source_mask": mask})
    inputs = {"source_mask": mask, "source_keys": keys, "source_values": values}
    inputs |= {"past_keys": keys[:, :, :, :0], "past_values": values[:, :, :, :0]}
    inputs["tokens"] = np.full(len(rows), target.bos_id())
    tokens = []
    log_probs = []
    margins = []
    for _ in range(task["limit"]):
        names = ["log_probs", "keys", "values"]
        step, inputs["past_keys"], inputs["past_values"] = decoder.run(names, inputs)
        inputs["tokens"] = step.argmax(axis=1)
        two_best = np.sort(step, axis=1)[:, -2:]
        tokens.append(inputs["tokens"].tolist())
        log_probs.append(two_best[:, 1].tolist())
        margins.append((two_best[:, 1] - two_best[:, 0]).tolist())
    return {"tokens": tokens, "log_probs": log_probs, "margins": margins}


if sys.argv[1] == "onnx":
    sys.modules["torch"] = None  # importing it is an error, too
tasks = json.load(sys.stdin)
os.chdir(tasks[0]["folder"])
with contextlib.redirect_stdout(sys.stderr):
    exec(re.search("```python\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL)[1])
runs = {"ctranslate2": run_ctranslate2, "huggingface": run_transformers, "onnx": run_onnx}
run = runs[sys.argv[1]]
json.dump([run(task) for task in tasks], sys.stdout)
