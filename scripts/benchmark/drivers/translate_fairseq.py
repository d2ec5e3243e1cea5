"""Translates with fairseq as fairseq-generate does: its task, its batches, its beam search.

The model gets the weights of nmt. fairseq has other sines and cosines for positions and another
order of ids, so it gets the table of positions and reordered embeddings as weights too.
"""

# D d_model, V vocab, P positions

from __future__ import annotations

import math
import warnings
from argparse import Namespace
from pathlib import Path

import fairseq
import sentencepiece
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from turns import Turns, fastest

_MORE_TOKENS = 50  # than the source has, at most, as in nmt
_POSITIONS = 512
_CONTROL = {"<s>": 2, "<pad>": 0, "</s>": 3, "<unk>": 1}  # our ids
_BATCHES = [1000, 2000, 4000]  # source tokens


def main() -> None:
    """Translate all lines in each turn."""
    warnings.simplefilter("ignore")
    turns = Turns()
    job = turns.job
    torch.set_num_threads(job["threads"])
    folder = Path(job["folders"][job["options"]["folder"]])
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    config = convert_namespace_to_omegaconf(parse(job))
    task = tasks.setup_task(config.task)
    model = task.build_model(config.model)
    order = [
        _CONTROL.get(word, tokenizer.piece_to_id(word)) for word in task.source_dictionary.symbols
    ]
    model.load_state_dict(convert(torch.load(folder / "weights.pt"), job, order), strict=False)
    model.prepare_for_inference_(config)
    model.eval()
    generator = task.build_generator([model], config.generation)

    def translate(lines: list[str], max_tokens: int) -> dict[str, int]:
        words = [" ".join(pieces) for pieces in tokenizer.encode(lines, out_type=str)]
        rows = [task.source_dictionary.encode_line(text, add_if_not_exist=False) for text in words]
        data = task.build_dataset_for_inference(rows, [len(row) for row in rows])
        batches = task.get_batch_iterator(
            data, max_tokens=max_tokens, max_positions=_POSITIONS
        ).next_epoch_itr(shuffle=False)
        num_tokens = 0
        for batch in batches:
            for found in task.inference_step(generator, [model], batch):
                ids = found[0]["tokens"].tolist()
                num_tokens += len(ids)
                tokenizer.decode([order[i] for i in ids[:-1]])
        return {"sentences": len(lines), "tgt_tokens": num_tokens}

    some = job["lines"][: job["warmup_lines"]]
    translate(some[:8], _BATCHES[0])
    best = fastest(_BATCHES, lambda size: translate(some, size), job["device"])
    turns.ready(fairseq=fairseq.__version__, torch=torch.__version__, batch=best)
    while True:
        turns.end(**translate(job["lines"], best))


def parse(job: dict) -> Namespace:
    """Say in fairseq's options what the model and the search are."""
    model = job["model"]
    words = f"""{job["pieces_dir"]} --source-lang src --target-lang tgt --task translation --cpu
        --arch transformer --share-all-embeddings --no-progress-bar
        --encoder-learned-pos --decoder-learned-pos
        --max-source-positions {_POSITIONS} --max-target-positions {_POSITIONS}""".split()
    for side in ("encoder", "decoder"):
        words += [f"--{side}-layers", str(model[f"num_{side}_layers"])]
        words += [f"--{side}-embed-dim", str(model["d_model"])]
        words += [f"--{side}-ffn-embed-dim", str(model["d_ff"])]
        words += [f"--{side}-attention-heads", str(model["num_heads"])]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    length = job["fixed_length"]
    arguments.beam, arguments.nbest = job["beam_size"], 1
    arguments.lenpen = job["length_exponent"]
    # EOS comes besides
    arguments.max_len_a, arguments.max_len_b = (0, length - 1) if length else (1, _MORE_TOKENS - 1)
    arguments.min_len = length - 1 if length else 1
    return arguments


def convert(ours: dict, job: dict, order: list[int]) -> dict:
    """Rename weights; `order` (V,) has our id of each of fairseq's."""
    embedding = ours["embedding.weight"][order]  # (V, D)
    positions = torch.zeros(_POSITIONS + 2, embedding.size(1))  # the first rows are padding's
    positions[2:] = sinusoids(_POSITIONS, embedding.size(1))
    theirs = {"decoder.output_projection.weight": embedding}
    for side in ("encoder", "decoder"):
        theirs[f"{side}.embed_tokens.weight"] = embedding
        theirs[f"{side}.embed_positions.weight"] = positions
        for i in range(job["model"][f"num_{side}_layers"]):
            theirs |= layer(ours, f"{side}_layers.{i}", f"{side}.layers.{i}")
    return theirs


def layer(ours: dict, source: str, target: str) -> dict:
    """Rename the weights of one layer; nmt has queries, keys and values in one matrix."""
    names = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
    found = {}
    for kind in ("weight", "bias"):
        for old, new in names.items():
            if f"{source}.{old}.out_projection.{kind}" not in ours:
                continue
            parts = ours[f"{source}.{old}.in_projection.{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                found[f"{target}.{new}.{name}.{kind}"] = part
            found[f"{target}.{new}.out_proj.{kind}"] = ours[f"{source}.{old}.out_projection.{kind}"]
            found[f"{target}.{new}_layer_norm.{kind}"] = ours[f"{source}.{old}_norm.{kind}"]
        for old, new in {"inner": "fc1", "outer": "fc2"}.items():
            found[f"{target}.{new}.{kind}"] = ours[f"{source}.feed_forward.{old}.{kind}"]
        found[f"{target}.final_layer_norm.{kind}"] = ours[f"{source}.feed_forward_norm.{kind}"]
    return found


def sinusoids(num_positions: int, d_model: int) -> torch.Tensor:
    """Return the paper's table (section 3.5), (P, D)."""
    places = torch.arange(num_positions)[:, None]
    rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack([torch.sin(places * rates), torch.cos(places * rates)], -1).flatten(1)


main()
