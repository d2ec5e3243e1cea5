"""Compares the native backend, in float32 and (on processors that have it) bfloat16, with
CTranslate2 float32 by processor time: one thread, in turns in one process, the same lines and
settings.

    python scripts/benchmark/native.py RUN test.en --reference test.de
    python scripts/benchmark/native.py RUN test.en --shape 6x512 --lines 96

With `--shape` (layers of each side x width) the weights are random, the tokenizer is that of the
model, and all translations are 24 tokens long. Other work on the machine slows all players, so that
the ratios count, not the seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import sacrebleu
import torch
from machine import facts

from nmt import Translator
from nmt.checkpoint import find_model, load_info, load_tokenizer, save_model
from nmt.config import ExportConfig, ExportFormat, Quantization
from nmt.export.export_model import export_model
from nmt.model.fast.layers import multiplies_bfloat16
from nmt.model.transformer import Transformer

LENGTH = 24  # tokens of each translation by a random model, EOS included
PLAYERS: dict[str, dict[str, Any]] = {
    "ctranslate2 float32": {"backend": "ctranslate2"},
    "nmt float32": {},
}
if multiplies_bfloat16():  # elsewhere it is emulated
    PLAYERS["nmt bfloat16"] = {"dtype": "bfloat16"}


def random_model(trained: Path, shape: str, folder: Path) -> Path:
    """Write a model of `shape` with random weights and the tokenizer of `trained`."""
    layers, width = (int(part) for part in shape.split("x"))
    info = load_info(trained)
    sizes = {"num_encoder_layers": layers, "num_decoder_layers": layers, "d_model": width}
    sizes |= {"d_ff": 4 * width, "num_heads": width // 64}
    info = replace(info, model=replace(info.model, **sizes))
    torch.manual_seed(1)
    weights = Transformer(info.model, info.vocab_size).state_dict()
    save_model(folder, weights, info, load_tokenizer(trained, info))
    return folder


def load(model_dir: Path, shape: str | None) -> dict[str, Translator]:
    """Load the model, or one of `shape`, for all players."""
    with tempfile.TemporaryDirectory() as place:
        folder = find_model(model_dir)
        if shape:
            folder = random_model(folder, shape, Path(place, "model"))
        exported = Path(place, "ctranslate2")
        config = ExportConfig(format=ExportFormat.ctranslate2, quantization=Quantization.float32)
        export_model(folder, exported, config)
        return {
            name: Translator.load(exported if "backend" in how else folder, num_threads=1, **how)
            for name, how in PLAYERS.items()
        }


def measure(
    players: dict[str, Translator], lines: list[str], turns: int, settings: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return the seconds of each turn, and the translations, by player."""
    seconds: dict[str, list[float]] = {name: [] for name in players}
    texts: dict[str, list[str]] = {}
    for player in players.values():  # what is made once is not measured
        player.translate(lines[: len(lines) // 8 + 1], **settings)
    for _ in range(turns):
        for name, player in players.items():
            start_seconds = time.process_time()
            texts[name] = player.translate(lines, **settings)
            seconds[name].append(time.process_time() - start_seconds)
    return seconds, texts


def main() -> None:
    """Measure all players in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("input", type=Path)
    parser.add_argument("--reference", type=Path, help="for BLEU")
    parser.add_argument("--shape", help="of a random model, such as 6x512")
    parser.add_argument("--lines", type=int, help="of the input, spread over it; default all")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    begin = time.perf_counter()
    torch.set_num_threads(1)
    texts = [options.input, *([options.reference] if options.reference else [])]
    sides = [path.read_text(encoding="utf-8").splitlines() for path in texts]
    step = max(1, len(sides[0]) // (options.lines or len(sides[0])))
    lines, *references = (side[::step] for side in sides)
    settings: dict[str, Any] = {}
    if options.shape:
        settings = {"min_length": LENGTH - 1, "max_length_a": 0.0, "max_length_b": LENGTH}
    players = load(options.model_dir, options.shape)
    print(
        "| | CPU s, each turn | speed / CTranslate2 | / nmt float32 | BLEU |\n|---|---|---|---|---|"
    )
    for beam_size in (4, 1):
        seconds, found = measure(
            players, lines, options.turns, {"beam_size": beam_size, **settings}
        )
        middle = {name: median(spent) for name, spent in seconds.items()}
        for name, spent in seconds.items():
            bleu = (
                f"{sacrebleu.corpus_bleu(found[name], references).score:.2f}" if references else ""
            )
            of_peer, of_ours = (middle[peer] / middle[name] for peer in list(PLAYERS)[:2])
            turns = " ".join(f"{one:.2f}" for one in spent)
            print(
                f"| {name}, beam {beam_size} | {turns} | {of_peer:.2f} | {of_ours:.2f} | {bleu} |"
            )
    for name, fact in facts(sys.argv, time.perf_counter() - begin).items():
        print(f"- {name}: {fact}")


if __name__ == "__main__":
    main()
