"""The models of Marian, written again in numpy from the formulas of Marian's source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

OUTPUT = "none"  # Marian's name of the output matrix among the multipliers of activations
Arrays = dict[str, Any]


class NumpyMarian:
    """A Marian model with post-norm, one embedding and ReLU, in numpy.

    Its decoder has SSRUs if the file has their weights, else self-attention. It follows
    `DecoderTransformer`, `SSRU` and `sinusoidalPositionEmbeddings` of Marian's source.
    With `multipliers`, which give for each matrix 127 / the largest activation, matrix
    multiplications are those of int8. Without `has_target_positions`, every target token has the
    position 0, as in slimt 0.1.0.
    """

    def __init__(
        self,
        arrays: Arrays,
        num_heads: int,
        *,
        multipliers: dict[str, float] | None = None,
        has_target_positions: bool = True,
    ) -> None:
        self.arrays = {name: array.astype("f8") for name, array in arrays.items()}
        self.num_heads = num_heads
        self.multipliers = multipliers
        self.has_target_positions = has_target_positions
        self.largest: dict[str, float] = defaultdict(float)  # activations of each matrix
        if multipliers is not None:  # embeddings are stored in int8 too
            self.arrays["Wemb"] = np.multiply(*quantize(self.arrays["Wemb"]))

    def depth(self, stack: str) -> int:
        return sum(name.startswith(stack) and name.endswith("_ffn_W1") for name in self.arrays)

    def multiply(self, name: str, x: Any) -> Any:
        """Return x W of the matrix `name`, and record the largest activation."""
        weight = self.arrays["Wemb"].T if name == OUTPUT else self.arrays[name]
        self.largest[name] = max(self.largest[name], float(np.abs(x).max()))
        if self.multipliers is None:
            return x @ weight
        multiplier = self.multipliers[name]
        integers, scale = quantize(weight)
        rounded = np.clip(np.round(x * multiplier), -127, 127)
        return rounded @ integers * (scale / multiplier)

    def norm(self, name: str, x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        scale = self.arrays[f"{name}_ln_scale"]
        return centered / deviation * scale + self.arrays[f"{name}_ln_bias"]

    def heads(self, name: str, key: str, x: Any) -> Any:
        """Return the queries, keys or values of all heads (H, T, d)."""
        projected = self.multiply(f"{name}_W{key}", x) + self.arrays[f"{name}_b{key}"]
        return projected.reshape(len(x), self.num_heads, -1).transpose(1, 0, 2)

    def attend(self, name: str, x: Any, memory: Any, *, is_causal: bool = False) -> Any:
        """Return LayerNorm(x + Attention(x, memory)) for x (T, D) and memory (S, D)."""
        q = self.heads(name, "q", x)
        k = self.heads(name, "k", memory)
        v = self.heads(name, "v", memory)
        logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        if is_causal:
            is_later = np.triu(np.ones((len(x), len(x)), dtype=bool), k=1)
            logits = np.where(is_later, -np.inf, logits)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        joined = (weights @ v).transpose(1, 0, 2).reshape(x.shape)
        output = self.multiply(f"{name}_Wo", joined) + self.arrays[f"{name}_bo"]
        return self.norm(f"{name}_Wo", x + output)

    def feed_forward(self, name: str, x: Any) -> Any:
        inner = self.multiply(f"{name}_ffn_W1", x) + self.arrays[f"{name}_ffn_b1"]
        output = self.multiply(f"{name}_ffn_W2", np.maximum(inner, 0))
        return self.norm(f"{name}_ffn_ffn", x + output + self.arrays[f"{name}_ffn_b2"])

    def recur(self, name: str, x: Any) -> Any:
        """Return LayerNorm(x + SSRU(x)) for x (T, D)."""
        logits = self.multiply(f"{name}_rnn_Wf", x) + self.arrays[f"{name}_rnn_bf"]
        gates = 1 / (1 + np.exp(-logits))
        candidates = self.multiply(f"{name}_rnn_W", x)
        cell = np.zeros(x.shape[1])
        outputs = []
        for gate, candidate in zip(gates, candidates, strict=True):
            cell = gate * cell + (1 - gate) * candidate
            outputs.append(np.maximum(cell, 0))
        return self.norm(f"{name}_rnn_ffn", x + np.stack(outputs))

    def add_positions(self, embeddings: Any, positions: Any) -> Any:
        num_timescales = embeddings.shape[1] // 2
        increment = np.log(10000.0) / (num_timescales - 1)
        angles = positions[:, None] * np.exp(np.arange(num_timescales) * -increment)
        signal = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return embeddings * np.sqrt(embeddings.shape[1]) + signal

    def encode(self, src: Sequence[int]) -> Any:
        """Return the memory (S, D) of source ids, which end with EOS."""
        x = self.add_positions(self.arrays["Wemb"][list(src)], np.arange(len(src)))
        for layer in range(1, self.depth("encoder") + 1):
            x = self.attend(f"encoder_l{layer}_self", x, x)
            x = self.feed_forward(f"encoder_l{layer}", x)
        return x

    def logits(self, memory: Any, tgt: Sequence[int]) -> Any:
        """Return the logits (T + 1, V) after each of the target ids, and before the first."""
        table = self.arrays["Wemb"]
        inputs = np.concatenate([np.zeros((1, table.shape[1])), table[list(tgt)]])
        positions = np.arange(len(inputs)) * self.has_target_positions
        x = self.add_positions(inputs, positions)
        for layer in range(1, self.depth("decoder") + 1):
            if f"decoder_l{layer}_rnn_W" in self.arrays:
                x = self.recur(f"decoder_l{layer}", x)
            else:
                x = self.attend(f"decoder_l{layer}_self", x, x, is_causal=True)
            x = self.attend(f"decoder_l{layer}_context", x, memory)
            x = self.feed_forward(f"decoder_l{layer}", x)
        return self.multiply(OUTPUT, x) + self.arrays["decoder_ff_logit_out_b"]

    def log_probs(self, src: Sequence[int], tgt: Sequence[int]) -> list[float]:
        """Return the log-probability of each target id, EOS included."""
        logits = self.logits(self.encode(src), tgt[:-1])
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return [float(row[token]) for row, token in zip(log_probs, tgt, strict=True)]

    def translate(self, src: Sequence[int], *, eos: int, candidates: list[int]) -> list[int]:
        """Find the best of the candidates in each step, as slimt does."""
        memory = self.encode(src)
        tgt: list[int] = []
        while len(tgt) < len(src) and (not tgt or tgt[-1] != eos):
            row = self.logits(memory, tgt)[-1, candidates]
            tgt.append(candidates[int(row.argmax())])
        return tgt


def quantize(weight: Any) -> tuple[Any, float]:
    """Return the integers of a matrix in int8, and the number that they are multiplied by."""
    largest = float(np.abs(weight).max())
    return np.round(weight * (127 / largest)), largest / 127
