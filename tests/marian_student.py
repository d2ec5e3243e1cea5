"""The student models of Marian, written again in numpy from the formulas of Marian's source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class MarianStudent:
    """A Marian model with SSRUs, post-norm and one embedding, in numpy.

    It follows `DecoderTransformer`, `SSRU` and `sinusoidalPositionEmbeddings` of Marian's source.
    """

    def __init__(self, folder: Path, num_heads: int) -> None:
        self.arrays: dict[str, Any] = dict(np.load(folder / "model.npz"))
        self.num_heads = num_heads
        self.num_layers = {
            stack: sum(name.startswith(stack) and name.endswith("_ffn_W1") for name in self.arrays)
            for stack in ("encoder", "decoder")
        }

    def norm(self, name: str, x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        scale = self.arrays[f"{name}_ln_scale"]
        return centered / deviation * scale + self.arrays[f"{name}_ln_bias"]

    def split_heads(self, x: Any) -> Any:
        return x.reshape(len(x), self.num_heads, -1).transpose(1, 0, 2)

    def attend(self, name: str, x: Any, memory: Any) -> Any:
        """Return LayerNorm(x + Attention(x, memory)) for x (T, D) and memory (S, D)."""
        q = self.split_heads(x @ self.arrays[f"{name}_Wq"] + self.arrays[f"{name}_bq"])
        k = self.split_heads(memory @ self.arrays[f"{name}_Wk"] + self.arrays[f"{name}_bk"])
        v = self.split_heads(memory @ self.arrays[f"{name}_Wv"] + self.arrays[f"{name}_bv"])
        logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads = (weights @ v).transpose(1, 0, 2).reshape(x.shape)
        output = heads @ self.arrays[f"{name}_Wo"] + self.arrays[f"{name}_bo"]
        return self.norm(f"{name}_Wo", x + output)

    def feed_forward(self, name: str, x: Any) -> Any:
        inner = x @ self.arrays[f"{name}_ffn_W1"] + self.arrays[f"{name}_ffn_b1"]
        output = np.maximum(inner, 0) @ self.arrays[f"{name}_ffn_W2"]
        return self.norm(f"{name}_ffn_ffn", x + output + self.arrays[f"{name}_ffn_b2"])

    def recur(self, name: str, x: Any) -> Any:
        gates = 1 / (
            1 + np.exp(-(x @ self.arrays[f"{name}_rnn_Wf"] + self.arrays[f"{name}_rnn_bf"]))
        )
        candidates = x @ self.arrays[f"{name}_rnn_W"]
        cell = np.zeros(x.shape[1])
        outputs = []
        for gate, candidate in zip(gates, candidates, strict=True):
            cell = gate * cell + (1 - gate) * candidate
            outputs.append(np.maximum(cell, 0))
        return self.norm(f"{name}_rnn_ffn", x + np.stack(outputs))

    def add_positions(self, embeddings: Any) -> Any:
        num_timescales = embeddings.shape[1] / 2
        increment = np.log(10000.0) / (num_timescales - 1)
        angles = np.arange(len(embeddings))[:, None] * np.exp(
            np.arange(num_timescales) * -increment
        )
        signal = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return embeddings * np.sqrt(embeddings.shape[1]) + signal

    def log_probs(self, src: list[int], tgt: list[int]) -> list[float]:
        """Return the log-probability of each target id, EOS included."""
        table = self.arrays["Wemb"].astype("f8")
        x = self.add_positions(table[src])
        for layer in range(1, self.num_layers["encoder"] + 1):
            x = self.attend(f"encoder_l{layer}_self", x, x)
            x = self.feed_forward(f"encoder_l{layer}", x)
        memory = x
        inputs = np.concatenate([np.zeros((1, table.shape[1])), table[tgt[:-1]]])
        x = self.add_positions(inputs)
        for layer in range(1, self.num_layers["decoder"] + 1):
            x = self.recur(f"decoder_l{layer}", x)
            x = self.attend(f"decoder_l{layer}_context", x, memory)
            x = self.feed_forward(f"decoder_l{layer}", x)
        logits = x @ table.T + self.arrays["decoder_ff_logit_out_b"]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return [float(row[token]) for row, token in zip(log_probs, tgt, strict=True)]
