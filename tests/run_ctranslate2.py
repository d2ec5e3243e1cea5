"""Translates exported folders with CTranslate2 and SentencePiece; run by the tests, without nmt.

Reads a list of {folder, lines, options}, writes for each a list of {pieces, scores, text}. Before
that it runs the Python of the first folder's README.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path

sys.modules["nmt"] = None  # importing it is an error

import ctranslate2  # noqa: E402
import sentencepiece  # noqa: E402


def run(task):
    """Translate the lines of one task."""
    translator = ctranslate2.Translator(task["folder"], intra_threads=1)
    folder = Path(task["folder"])
    is_joint = (folder / "tokenizer.model").exists()
    names = ["tokenizer.model"] * 2 if is_joint else ["tokenizer.src.model", "tokenizer.tgt.model"]
    files = [str(folder / name) for name in names]
    source, target = (sentencepiece.SentencePieceProcessor(model_file=file) for file in files)
    pieces = [source.encode(line, out_type=str) for line in task["lines"]]
    options = {"max_input_length": 0, "return_scores": True, **task["options"]}
    results = translator.translate_batch(pieces, **options)
    return [
        {"pieces": r.hypotheses, "scores": r.scores, "text": target.decode(r.hypotheses[0])}
        for r in results
    ]


tasks = json.load(sys.stdin)
os.chdir(tasks[0]["folder"])
with contextlib.redirect_stdout(sys.stderr):
    exec(re.search("```python\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL)[1])
json.dump([run(task) for task in tasks], sys.stdout)
