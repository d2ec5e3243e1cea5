"""Translates exported folders with Hugging Face transformers; run by the tests, without nmt.

Reads a list of {folder, lines, targets, options}. Writes for each the ids of the lines, the logits
for the target ids as decoder input, what `generate` gives with each of the options (ids and score
of every hypothesis), and the text of the first. Before that it runs the Python of the first
folder's README.
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

import torch  # noqa: E402
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()


def generate(model, batch, options):
    """Return ids and scores of what `generate` finds."""
    out = model.generate(**batch, **options, return_dict_in_generate=True, output_scores=True)
    scores = getattr(out, "sequences_scores", None)
    scores = [] if scores is None else scores.tolist()
    return {"ids": out.sequences.tolist(), "scores": scores}


@torch.inference_mode()
def run(task):
    """Load the folder of a task and use it in every way."""
    tokenizer = AutoTokenizer.from_pretrained(task["folder"])
    model, info = AutoModelForSeq2SeqLM.from_pretrained(task["folder"], output_loading_info=True)
    batch = tokenizer(task["lines"], return_tensors="pt", padding=True)
    logits = model(**batch, decoder_input_ids=torch.tensor(task["targets"])).logits
    found = [generate(model, batch, options) for options in task["options"]]
    return {
        "kind": type(model).__name__,
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "input_ids": [tokenizer(line).input_ids for line in task["lines"]],
        "logits": logits.tolist(),
        "found": found,
        "texts": tokenizer.batch_decode(found[0]["ids"], skip_special_tokens=True),
    }


tasks = json.load(sys.stdin)
os.chdir(tasks[0]["folder"])
with contextlib.redirect_stdout(sys.stderr):
    exec(re.search("```python\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL)[1])
json.dump([run(task) for task in tasks], sys.stdout)
