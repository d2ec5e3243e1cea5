"""Translates with fairseq as fairseq-generate does: its task, its batches, its beam search.

The model gets the weights of nmt. Since fairseq has another formula for sinusoids and another order
of ids, the table of positions and the reordered embeddings are loaded as weights too.
"""

# D d_model, V vocab, P positions

from __future__ import annotations

import math
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import fairseq
import sentencepiece
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_options import model_options
from torch import Tensor
from turns import Turns, fastest

Weights = dict[str, Tensor]
_EXTRA_TOKENS = 50  # above the length of the source, as in nmt
_NUM_POSITIONS = 512
_CONTROL_IDS = {"<s>": 2, "<pad>": 0, "</s>": 3, "<unk>": 1}  # in nmt
_BATCH_TOKENS = [1000, 2000, 4000]  # source tokens
_ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
_FEED_FORWARD = {"inner": "fc1", "outer": "fc2"}


def main() -> None:
    """Translate all lines in each turn."""
    warnings.simplefilter("ignore")
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    folder = Path(job["folders"][job["options"]["format"]])
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    config = convert_namespace_to_omegaconf(make_options(job))
    task = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    nmt_ids = []  # by fairseq's id
    for word in task.source_dictionary.symbols:
        nmt_ids.append(_CONTROL_IDS.get(word, tokenizer.piece_to_id(word)))
    weights = convert_weights(torch.load(folder / "weights.pt"), job["model"], nmt_ids)
    model.load_state_dict(weights, strict=False)
    model.prepare_for_inference_(config)
    model.eval()
    generator = task.build_generator([model], config.generation)

    def translate(lines: list[str], max_tokens: int) -> dict[str, int]:
        rows = []
        for pieces in tokenizer.encode(lines, out_type=str):
            text = " ".join(pieces)
            rows.append(task.source_dictionary.encode_line(text, add_if_not_exist=False))
        dataset = task.build_dataset_for_inference(rows, [len(row) for row in rows])
        batches = task.get_batch_iterator(
            dataset, max_tokens=max_tokens, max_positions=_NUM_POSITIONS
        )
        num_tokens = 0
        for batch in batches.next_epoch_itr(shuffle=False):
            for hypotheses in task.inference_step(generator, [model], batch):
                ids = hypotheses[0]["tokens"].tolist()
                num_tokens += len(ids)
                tokenizer.decode([nmt_ids[i] for i in ids[:-1]])
        return {"sentences": len(lines), "tgt_tokens": num_tokens}

    warmup_lines = job["lines"][: job["warmup_lines"]]
    translate(warmup_lines[:8], _BATCH_TOKENS[0])
    max_tokens = fastest(_BATCH_TOKENS, lambda size: translate(warmup_lines, size), job["device"])
    turns.ready(fairseq=fairseq.__version__, torch=torch.__version__, batch=max_tokens)
    while True:
        turns.end_translation(lambda lines: translate(lines, max_tokens))


def make_options(job: dict[str, Any]) -> Namespace:
    """Return fairseq's options for the model and the search."""
    words = f"""{job["pieces_dir"]} --source-lang src --target-lang tgt --task translation --cpu
        --arch transformer --share-all-embeddings --no-progress-bar
        --encoder-learned-pos --decoder-learned-pos
        --max-source-positions {_NUM_POSITIONS} --max-target-positions {_NUM_POSITIONS}""".split()
    words += model_options(job["model"])
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    arguments.beam = job["beam_size"]
    arguments.nbest = 1
    arguments.lenpen = job["length_exponent"]
    fixed_length = job["fixed_length"]
    if fixed_length:  # fairseq does not count EOS
        arguments.min_len = fixed_length - 1
        arguments.max_len_a = 0
        arguments.max_len_b = fixed_length - 1
    else:
        arguments.min_len = 1
        arguments.max_len_a = 1
        arguments.max_len_b = _EXTRA_TOKENS - 1
    return arguments


def convert_weights(weights: Weights, model: dict[str, Any], nmt_ids: list[int]) -> Weights:
    """Return nmt's weights under fairseq's names; `nmt_ids` (V,) maps fairseq's ids to nmt's."""
    embedding = weights["embedding.weight"][nmt_ids]  # (V, D)
    positions = torch.zeros(_NUM_POSITIONS + 2, embedding.size(1))  # rows 0 and 1 are padding
    positions[2:] = sinusoids(_NUM_POSITIONS, embedding.size(1))
    converted = {"decoder.output_projection.weight": embedding}
    for side in ("encoder", "decoder"):
        converted[f"{side}.embed_tokens.weight"] = embedding
        converted[f"{side}.embed_positions.weight"] = positions
        for i in range(model[f"num_{side}_layers"]):
            converted |= convert_layer(weights, f"{side}_layers.{i}", f"{side}.layers.{i}")
    return converted


def convert_layer(weights: Weights, nmt_name: str, fairseq_name: str) -> Weights:
    """Rename the weights of one layer; nmt has queries, keys and values in one matrix."""
    converted = {}
    for suffix in ("weight", "bias"):
        for attention, fairseq_attention in _ATTENTIONS.items():
            source = f"{nmt_name}.{attention}"
            target = f"{fairseq_name}.{fairseq_attention}"
            if f"{source}.out_projection.{suffix}" not in weights:
                continue
            q, k, v = weights[f"{source}.in_projection.{suffix}"].chunk(3)
            converted[f"{target}.q_proj.{suffix}"] = q
            converted[f"{target}.k_proj.{suffix}"] = k
            converted[f"{target}.v_proj.{suffix}"] = v
            converted[f"{target}.out_proj.{suffix}"] = weights[f"{source}.out_projection.{suffix}"]
            converted[f"{target}_layer_norm.{suffix}"] = weights[f"{source}_norm.{suffix}"]
        for linear, fairseq_linear in _FEED_FORWARD.items():
            weight = weights[f"{nmt_name}.feed_forward.{linear}.{suffix}"]
            converted[f"{fairseq_name}.{fairseq_linear}.{suffix}"] = weight
        norm = weights[f"{nmt_name}.feed_forward_norm.{suffix}"]
        converted[f"{fairseq_name}.final_layer_norm.{suffix}"] = norm
    return converted


def sinusoids(num_positions: int, d_model: int) -> Tensor:
    """Return the table of the paper (section 3.5), (P, D)."""
    positions = torch.arange(num_positions)[:, None]
    frequencies = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    angles = positions * frequencies  # (P, D/2)
    return torch.stack([torch.sin(angles), torch.cos(angles)], dim=-1).flatten(1)


main()
