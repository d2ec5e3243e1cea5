"""Tiny models to export: trained for a second until they are sure, or random."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny import (
    WORDS,
    hidden_states,
    tiny_config,
    tiny_model,
    tokenizer_config,
    train_sentencepiece,
)

from nmt.checkpoint import ModelInfo, save_model
from nmt.config import ExportConfig, ExportFormat, PreprocessConfig, Quantization, SearchConfig
from nmt.data.batch import pad
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.export.export_model import export_model
from nmt.model.fast import accelerate
from nmt.model.transformer import Transformer
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import SearchRequest
from nmt.translate.engines.native import load_models

LIMIT = 20  # tokens of a translation


def short_sentences(count: int) -> list[str]:
    """Draw sentences as `trained_model` has learned them."""
    draw = random.Random(7)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(count)]


HOSTILE = [
    "</s>",
    "the </s> house",
    "<s> </s> <pad> <unk> ▁",
    "<pad>",
    "a<unk>b",
    "<0x41> <0x0A>",
    " the   small  ",
    "\u2028 tab\t nul\x00 😀 \u200d ﬁ Ａ",
    "⁇",
]
"""Text that tests every tokenizer: it must not become control symbols."""


def save(folder: Path, model: Transformer, tokenizer: Tokenizers) -> Path:
    """Write `model` as a model folder."""
    info = ModelInfo(
        model=model.config,
        search=SearchConfig(),
        vocab_size=tokenizer.tgt.vocab_size,
        src_lang="xx",
        tgt_lang="yy",
        tokenizer_sha256=tokenizer.sha256,
        updates=1,
        src_vocab_size=tokenizer.src_vocab_size,
    )
    save_model(folder, model.state_dict(), info, tokenizer)
    return folder


def random_model(folder: Path, tokenizer: Tokenizers, seed: int = 3, **changes: Any) -> Path:
    """Write a model folder with random weights, biases and norms."""
    sizes = {"vocab_size": tokenizer.tgt.vocab_size, "src_vocab_size": tokenizer.src_vocab_size}
    return save(folder, tiny_model(seed, **{"sharpness": 2.0, **sizes, **changes}), tokenizer)


def trained_model(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """Write a model that has mostly learned to copy sentences of up to three words.

    It is trained in float64, which gives the same weights on every CPU.
    """
    torch.manual_seed(2)
    model = accelerate(Transformer(tiny_config(**changes), tokenizer.vocab_size)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.008, betas=(0.9, 0.98), fused=True)
    draw = random.Random(1)
    pad_id = tokenizer.pad_id
    for _ in range(200):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(32)]
        rows = tokenizer.encode_batch(lines)
        src = pad(rows, pad_id=pad_id, eos=tokenizer.eos_id)
        tgt_in = pad(rows, pad_id=pad_id, bos=tokenizer.bos_id)
        hidden = hidden_states(model, src, torch.tensor([len(row) + 1 for row in rows]), tgt_in)
        logits = model.logits(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, src.flatten(), label_smoothing=0.1, ignore_index=pad_id)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(folder, model.float().eval(), tokenizer)


def prefer_padding(folder: Path, trained: Path, tokenizer: Tokenizer) -> Path:
    """Write the model `trained`, changed so that it prefers PAD and BOS to a word."""
    model = load_models([trained], device="cpu").backend.stepper.model
    with torch.no_grad():
        word = model.embedding.weight[tokenizer.encode("the")[0]]
        model.embedding.weight[[tokenizer.pad_id, tokenizer.bos_id]] = 1.2 * word
    return save(folder, model, tokenizer)


def exported(folder: Path, name: ExportFormat, **changes: Any) -> Path:
    """Export a model to a folder next to it, and return that folder."""
    quantization = changes.get("quantization", Quantization.float32)
    output = folder.with_name(f"{folder.name}-{name.value}-{quantization.value}")
    export_model(folder, output, ExportConfig(format=name, **changes))
    return output


def native(folder: Path, lines: list[str], config: SearchConfig) -> list[list[Hypothesis]]:
    """Search with our own engine, to at most LIMIT tokens."""
    loaded = load_models([folder], device="cpu")
    rows = loaded.tokenizer.src.encode_batch(lines)
    limited = replace(config, max_length_a=0, max_length_b=LIMIT)
    return loaded.backend.search(SearchRequest(rows, limited))


def without_nmt(library: ExportFormat, tasks: list[dict[str, Any]]) -> Any:
    """Run the tasks of run_exported.py in a process that cannot import nmt."""
    script = str(Path(__file__).parent / "run_exported.py")
    command = [sys.executable, "-I", script, library.value]
    pipes = {"input": json.dumps(tasks), "capture_output": True, "text": True}
    result = subprocess.run(command, check=False, **pipes)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def foreign_models(folder: Path, **names: str) -> PreprocessConfig:
    """Train a source model with SentencePiece's default ids, and a target model with the ids of
    T5, which has no BOS.
    """
    t5_ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sides: dict[str, dict[str, Any]] = {
        "src": {"vocab_size": 70},
        "tgt": {"vocab_size": 330, "byte_fallback": True, **t5_ids, **names},
    }
    for side, options in sides.items():
        (folder / f"{side}.model").write_bytes(train_sentencepiece(**options))
    files = {"model": str(folder / "src.model"), "tgt_model": str(folder / "tgt.model")}
    return PreprocessConfig(tokenizer=tokenizer_config(separate=True, **files))
