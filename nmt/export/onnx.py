"""Export to ONNX: `encoder.onnx`, and `decoder.onnx`, which computes one step with a cache.

The encoder returns the keys and values of cross-attention. The decoder reads these, the newest
target token, and the cache, which has the keys and values of earlier target tokens. It returns the
log-probabilities of the next token, the extended cache, and the attention to the source that aligns
words. Batch size and lengths are dynamic. In the first step, the cache has length 0.

A decoder with SSRUs (simpler simple recurrent units) has no keys and values of target tokens. Both
caches, past_keys and past_values, then hold the same states of the SSRU, one for each target token,
divided into heads. So all decoders have caches of the same shapes. A step reads only the newest
state.
"""

# Shapes: B batch, S source length, T cached target tokens, V vocab, D d_model
# L decoder layers, H heads, K heads of keys and values, d dimensions of a head

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig, Quantization
from nmt.data.tokenizer import Tokenizers
from nmt.errors import ModelError, NmtError
from nmt.model.alignment import alignment_layer, mean_alignment
from nmt.model.attention import MultiHeadAttention, attend, repeat_heads
from nmt.model.layers import RmsNorm
from nmt.model.positions import Sinusoidal, TokenPositions
from nmt.model.ssru import Ssru
from nmt.model.transformer import DecoderLayer, Transformer
from nmt.search.constraints import forbidden_ids

OPSET = 18  # version of the ONNX operators
ENCODER = "encoder.onnx"
DECODER = "decoder.onnx"
# Maximum size of the weights: each file is a protobuf message, which must be smaller than 2 GiB.
_MAX_BYTES = 2**31 - 2**24
_DYNAMIC_AXES = {
    "source": {0: "batch", 1: "source_length"},
    "source_mask": {0: "batch", 1: "source_length"},
    "source_keys": {1: "batch", 3: "source_length"},
    "source_values": {1: "batch", 3: "source_length"},
    "tokens": {0: "batch"},
    "past_keys": {1: "batch", 3: "past_length"},
    "past_values": {1: "batch", 3: "past_length"},
    "log_probs": {0: "batch"},
    "keys": {1: "batch", 3: "length"},
    "values": {1: "batch", 3: "length"},
    "source_attention": {0: "batch", 1: "source_length"},
}


class Encoder(nn.Module):
    """The encoder, and the keys and values for the decoder's cross-attention."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values (L, B, K, S, d) of the source ids (B, S).

        `source_mask` (B, S) is False for padding.
        """
        memory = self.model.encode(source, source_mask[:, None, None, :])  # (B, S, D)
        keys = []
        values = []
        for layer in _decoder_layers(self.model):
            _, k, v = layer.cross_attention.project(memory, memory)  # the queries are not used
            keys.append(k)
            values.append(v)
        return torch.stack(keys), torch.stack(values)


class DecoderStep(nn.Module):
    """One step of the decoder. It gives `forbidden` tokens the probability 0."""

    is_forbidden: Tensor

    def __init__(self, model: Transformer, forbidden: list[int]) -> None:
        super().__init__()
        self.model = model
        is_forbidden = torch.zeros(len(model.output_matrix), dtype=torch.bool)  # (V,)
        is_forbidden[forbidden] = True
        self.register_buffer("is_forbidden", is_forbidden)

    def forward(
        self,
        tokens: Tensor,
        source_mask: Tensor,
        source_keys: Tensor,
        source_values: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the log-probabilities (B, V) of the tokens after `tokens`.

        Args:
            tokens: newest target ids (B,), BOS in the first step.
            source_mask: input of the encoder (B, S).
            source_keys: output of the encoder (L, B, K, S, d).
            source_values: output of the encoder (L, B, K, S, d).
            past_keys: cache (L, B, K, T, d), empty (T = 0) in the first step.
            past_values: cache (L, B, K, T, d).

        Returns:
            The log-probabilities, the caches of keys and values (L, B, K, T + 1, d), and the
            weights (B, S) of cross-attention that align words. See `alignment_layer`.
        """
        model = self.model
        num_past = past_keys.size(3)
        # `num_positions`, the upper bound of the positions, would be T + 1. But a positional
        # encoding enlarges its table to this size, which a graph cannot do. `_build_model` has
        # already made the table large enough, so 1 is passed instead.
        positions = TokenPositions(torch.arange(num_past, num_past + 1), num_positions=1)
        # relative positions of the cached tokens and the newest token: -T, ..., -1, 0
        distances = torch.arange(num_past + 1)[None] - num_past  # (1, T + 1)
        source_mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        x = model.embed_target(tokens[:, None], positions)
        keys = []
        values = []
        cross_weights = []
        # Each layer computes the same as `DecoderLayer.forward`. `sublayer_input` normalizes in
        # pre-norm models, and `add_and_norm` in post-norm models.
        for i, layer in enumerate(_decoder_layers(model)):
            x, new_keys, new_values = _apply_first_sublayer(
                layer, x, past_keys[i], past_values[i], positions, distances
            )
            x, weights = _apply_cross_attention(
                layer, x, source_keys[i], source_values[i], source_mask, distances
            )
            y = layer.feed_forward(layer.sublayer_input(layer.feed_forward_norm, x))
            x = layer.add_and_norm(layer.feed_forward_norm, x, y)
            keys.append(new_keys)
            values.append(new_values)
            cross_weights.append(weights)  # (B, H, 1, S)
        hidden = model.decoder_norm(x)[:, 0]  # (B, D)
        bias = torch.zeros(1) if model.output_bias is None else model.output_bias
        # ONNX has an operator for addmm that transposes the matrix, which is often the embedding.
        # With `hidden @ matrix.T`, the file would have a transposed copy of the embedding.
        logits = torch.addmm(bias, hidden, model.output_matrix.T)  # (B, V)
        log_probs = logits.log_softmax(dim=-1).masked_fill(self.is_forbidden, float("-inf"))
        alignment_weights = cross_weights[alignment_layer(len(cross_weights))]
        source_attention = mean_alignment(alignment_weights, model.config)  # (B, 1, S)
        source_attention = source_attention[:, 0]  # (B, S), of the only target token
        return log_probs, torch.stack(keys), torch.stack(values), source_attention


class PlainRmsNorm(nn.Module):
    """`RmsNorm` in basic operators, since ONNX has an operator for it only from opset 23."""

    def __init__(self, norm: RmsNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = 0.0 if norm.eps is None else norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.weight


def _decoder_layers(model: Transformer) -> list[DecoderLayer]:
    """Return the decoder layers with their type, which `nn.ModuleList` does not state."""
    return [cast(DecoderLayer, layer) for layer in model.decoder_layers]


def _apply_first_sublayer(
    layer: DecoderLayer,
    x: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    positions: TokenPositions,
    distances: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the first sub-layer, self-attention or an SSRU, to the newest tokens `x` (B, 1, D).

    Returns the result (B, 1, D) and the extended caches of keys and values (B, K, T + 1, d). An
    SSRU adds its state to both caches.
    """
    if layer.ssru is not None:
        y = layer.sublayer_input(layer.ssru_norm, x)  # (B, 1, D)
        state = _next_state(layer.ssru, y, past_keys)  # (B, H, 1, d)
        keys = torch.cat([past_keys, state], dim=2)
        values = torch.cat([past_values, state], dim=2)
        y = torch.relu(state).transpose(1, 2).flatten(2)  # (B, 1, D)
        return layer.add_and_norm(layer.ssru_norm, x, y), keys, values
    attention = layer.self_attention
    y = layer.sublayer_input(layer.self_attention_norm, x)  # (B, 1, D)
    q, k, v = attention.project(y, y)  # (B, H, 1, d), 2 x (B, K, 1, d)
    q, k = attention.normalize_and_rotate(q, k, positions)
    keys = torch.cat([past_keys, k], dim=2)
    values = torch.cat([past_values, v], dim=2)
    mask = torch.ones(1, dtype=torch.bool)  # no cached token is masked
    y, _ = _attention_output(attention, q, keys, values, mask, distances)
    return layer.add_and_norm(layer.self_attention_norm, x, y), keys, values


def _next_state(ssru: Ssru, x: Tensor, past_states: Tensor) -> Tensor:
    """Compute the next state (B, H, 1, d) of an SSRU from `x` (B, 1, D).

    In the first step, `past_states` (B, H, T, d) is empty, and the previous state is zeros. With
    SSRUs, keys and values have as many heads as queries (K = H).
    """
    _, num_heads, _, head_size = past_states.shape
    gates, candidates = ssru.project(x)  # (B, 1, D) each
    gates = gates.view(-1, num_heads, 1, head_size)  # (B, H, 1, d)
    candidates = candidates.view(-1, num_heads, 1, head_size)
    initial_state = torch.zeros_like(candidates)
    states = torch.cat([initial_state, past_states], dim=2)  # (B, H, T + 1, d)
    previous_state = states[:, :, -1:]  # (B, H, 1, d)
    state: Tensor = gates * previous_state + (1 - gates) * candidates
    return state


def _apply_cross_attention(
    layer: DecoderLayer,
    x: Tensor,
    source_keys: Tensor,
    source_values: Tensor,
    source_mask: Tensor,
    distances: Tensor,
) -> tuple[Tensor, Tensor]:
    """Apply the cross-attention of a layer to `x` (B, 1, D).

    Returns the result (B, 1, D) and the attention weights (B, H, 1, S).
    """
    attention = layer.cross_attention
    y = layer.sublayer_input(layer.cross_attention_norm, x)
    q, _, _ = attention.project(y, y)  # keys and values of `y` are unused, so the graph omits them
    # cross-attention has no positional encoding, so it ignores the distances
    y, weights = _attention_output(attention, q, source_keys, source_values, source_mask, distances)
    return layer.add_and_norm(layer.cross_attention_norm, x, y), weights


def _attention_output(
    attention: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, distances: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the output (B, 1, D) and the weights (B, H, 1, N) of attention to N tokens.

    `q` (B, H, 1, d), `k` and `v` (B, K, N, d) are projected. N is S in cross-attention, and T + 1
    in self-attention.
    """
    encoding = attention.position_encoding
    bias_encoding = encoding if encoding.has_bias else None  # only encodings such as ALiBi
    head_outputs, weights = attend(
        q,
        repeat_heads(k, attention.num_heads),
        repeat_heads(v, attention.num_heads),
        mask,
        encoding=bias_encoding,
        distances=distances,
    )  # (B, H, 1, d), (B, H, 1, N)
    return attention.out_projection(head_outputs.transpose(1, 2).flatten(2)), weights


def write_onnx(
    folder: Path,
    info: ModelInfo,
    weights: dict[str, Tensor],
    tokenizers: Tokenizers,
    config: ExportConfig,
) -> None:
    """Write `encoder.onnx` and `decoder.onnx` into `folder`.

    Raises `ModelError` for a model of 2 GiB or more, and `NmtError` if onnx or onnxruntime is not
    installed.
    """
    try:
        import onnx  # noqa: F401  # torch.onnx needs it
        import onnxruntime  # noqa: F401
    except ImportError:
        raise NmtError(
            f"format={config.format.value} needs onnx and onnxruntime; pip install nmt[onnx]"
        ) from None
    if sum(weight.nbytes for weight in weights.values()) > _MAX_BYTES:
        raise ModelError("the model exceeds 2 GiB, the limit of ONNX; use format=ctranslate2")
    model = _build_model(info, weights, config.max_positions)
    encoder = Encoder(model)
    decoder = DecoderStep(model, forbidden_ids(tokenizers.tgt))
    # Example inputs for tracing, with 2 sentences, 2 source tokens and 1 cached token. Only their
    # shapes and types matter.
    source = torch.tensor([[tokenizers.src.eos_id, tokenizers.src.pad_id]] * 2)  # (B, S)
    source_mask = torch.tensor([[True, False]] * 2)  # False for padding
    keys, values = encoder(source, source_mask)
    encoder_inputs = {"source": source, "source_mask": source_mask}
    decoder_inputs = {
        "tokens": torch.tensor([tokenizers.tgt.bos_id] * 2),
        "source_mask": source_mask,
        "source_keys": keys,
        "source_values": values,
        "past_keys": keys[:, :, :, :1],  # the shape of a cache of one target token
        "past_values": values[:, :, :, :1],
    }
    _write_graph(folder / ENCODER, encoder, encoder_inputs, ["source_keys", "source_values"])
    output_names = ["log_probs", "keys", "values", "source_attention"]
    _write_graph(folder / DECODER, decoder, decoder_inputs, output_names)
    for path in (folder / ENCODER, folder / DECODER):
        if config.quantization is Quantization.int8:
            _quantize(path)
        elif config.quantization is Quantization.float16:
            _store_float16(path)


def _build_model(info: ModelInfo, weights: dict[str, Tensor], max_positions: int) -> Transformer:
    """Build the model in float32 from modules that torch.onnx can trace."""
    model = Transformer(info.model, info.vocab_size, src_vocab_size=info.src_vocab_size)
    model.load_state_dict(weights)
    model.float().eval().requires_grad_(False)
    for encoding in (model.encoder_positions, model.decoder_positions):
        if isinstance(encoding, Sinusoidal):
            encoding.table = encoding.make_table(max_positions)  # a graph cannot enlarge it
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, RmsNorm):
                setattr(module, name, PlainRmsNorm(child))
    return model


def _write_graph(
    path: Path, module: nn.Module, inputs: dict[str, Tensor], output_names: list[str]
) -> None:
    """Write the graph of `module`, traced with `inputs`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that tracing is deprecated
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=output_names,
            dynamic_axes={name: _DYNAMIC_AXES[name] for name in [*inputs, *output_names]},
            opset_version=OPSET,
            dynamo=False,
        )


def _quantize(path: Path) -> None:
    """Convert the matrices of a file to int8. ONNX Runtime quantizes activations when it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Only constants can be quantized. The weights of queries, keys and values are slices of one
    # matrix, which `quant_pre_process` replaces by constants.
    folded_path = path.with_suffix(".folded")
    quant_pre_process(str(path), str(folded_path), skip_symbolic_shape=True)
    quantize_dynamic(folded_path, path, weight_type=QuantType.QInt8, per_channel=True)
    folded_path.unlink()


def _store_float16(path: Path) -> None:
    """Store the matrices of a file in float16.

    ONNX Runtime converts them to float32 when it loads the file.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    graph = model.graph
    _move_constants(graph)
    conversions = []  # nodes that convert a matrix to float32
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        name = tensor.name
        values = numpy_helper.to_array(tensor).astype(np.float16)
        # a node converts the tensor, under a new name, to a float32 tensor with the old name
        float16_name = f"{name}.float16"
        tensor.CopyFrom(numpy_helper.from_array(values, float16_name))
        conversion = onnx.helper.make_node(
            "Cast", [float16_name], [name], to=onnx.TensorProto.FLOAT
        )
        conversions.append(conversion)
    # a graph lists a node after the nodes that it reads
    _replace_nodes(graph, [*conversions, *graph.node])
    onnx.save(model, path)


def _move_constants(graph: Any) -> None:
    """Move constants, such as the table of sinusoidal positions, to the weights of a graph.

    Weights are `graph.initializer`. Scalars stay where they are.
    """
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant":
            [attribute] = node.attribute
            tensor = attribute.t  # the value of the constant
            if len(tensor.dims) > 0:
                tensor.name = node.output[0]
                graph.initializer.append(tensor)
                continue
        nodes.append(node)
    _replace_nodes(graph, nodes)


def _replace_nodes(graph: Any, nodes: list[Any]) -> None:
    """Replace the nodes of a graph, in place: protobuf does not allow to assign to `graph.node`."""
    del graph.node[:]
    graph.node.extend(nodes)
