"""Keys and values of other toolkits that the command line understands.

`OUR_KEY` maps a key of another toolkit to our key. This may be the last part of the full key:
`beam_size` is the whole key in translation, and the end of `search.beam_size` in training.
`ADVICE_FOR_KEY` maps keys without a counterpart to advice for the user.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable
from typing import Any

from nmt.config.runtime import DType, Quantization


def _map_each_key(values_and_keys: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return a mapping from each key to its value.

    `values_and_keys` are pairs such as `("beam_size", "beam num_beams")`: a value, and its keys
    separated by spaces.
    """
    value_of_key = {}
    for value, keys in values_and_keys:
        for key in keys.split():
            value_of_key[key] = value
    return value_of_key


# Our keys, each with the keys of other toolkits that mean the same. A key that the command has is
# never replaced. So model_dir and run_dir can stand for each other: commands that read a model have
# only model_dir, and training has only run_dir.
_OTHER_KEYS = {
    "activation": "activation_fn pos_ffn_activation_fn hidden_act mlp_activation_fn",
    "activation_dropout": "relu_dropout",
    "api_keys": "api_key_file",
    "attention_dropout": "attn_dropout attention_probs_dropout_prob",
    "beam_size": "beam num_beams beam_width beams",
    "best_metric": "metric_for_best_model best_checkpoint_metric",
    "checkpoint_every_updates": "save_steps save_interval_updates save_checkpoint_steps save_freq "
    "checkpoint_interval",
    "d_ff": "ffn_dim transformer_ff ff_size feed_forward_size intermediate_size dim_feedforward",
    "d_model": "hidden_size embed_dim rnn_size word_vec_size model_dim emb_size",
    "data_dir": "data_path dataset_dir",
    "decoder_d_ff": "decoder_ffn_dim decoder_ffn_embed_dim",
    "devices": "gpus num_gpus n_gpus ngpus n_gpu world_size nproc_per_node num_devices",
    "dtype": "precision compute_type",
    "experiment": "config config_name recipe",  # a YAML file of settings in a config group
    "format": "output_format",
    "hypotheses": "hypothesis hyp hyps sys",
    "init_from": "finetune_from finetune_from_model pretrained load_from train_from",
    "input": "in input_file source_file",
    "label_smoothing": "label_smooth smoothing label_smoothing_factor",
    "length_penalty": "lenpen len_penalty lp alpha lengthpenalty",
    "log_every_updates": "log_interval logging_steps report_every logging_freq log_every",
    "vocab_multiple": "vocab_size_multiple pad_to_multiple_of padding_factor",
    "max_distance": "max_relative_positions",
    "max_grad_norm": "clip_norm clip grad_clip gradient_clip_val clip_grad_norm",
    "max_length": "max_seq_len max_sentence_length max_sent_length",
    "max_updates": "max_steps train_steps max_update steps num_steps updates total_steps",
    "model_dir": "run_dir checkpoint ckpt path models checkpoint_path model_path checkpoint_dir",
    "n_best": "nbest num_hypotheses num_return_sequences",
    "no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
    "norm_layer": "layer_norm norm_type",
    "num_decoder_layers": "decoder_layers dec_layers",
    "num_encoder_layers": "encoder_layers enc_layers",
    "num_heads": "heads attention_heads nhead num_attention_heads n_heads",
    "num_kv_heads": "heads_kv kv_heads n_kv_heads num_key_value_heads",
    "num_positions": "max_position_embeddings",
    "num_threads": "threads cpu_threads num_workers workers",
    "optimizer.name": "optim",
    "output": "out output_file",
    "patience": "early_stopping early_stopping_patience",  # a number of validations, in OpenNMT-py
    "positions": "position_encoding_type positional_encoding",
    "qk_norm": "query_norm",
    "references": "reference ref refs",
    "run_dir": "save_dir output_dir save_model model_dir exp_dir",
    "sampling": "do_sample sample",
    "seed": "random_seed",
    "src_lang": "source_lang src_language",
    "temperature": "sampling_temperature",
    "tgt_lang": "target_lang tgt_language trg_lang",
    "top_k": "sampling_topk topk",
    "top_p": "sampling_topp nucleus",
    "train.src": "train_src src_train",
    "train.tgt": "train_tgt tgt_train train_trg",
    "valid.src": "valid_src dev_src",
    "valid.tgt": "valid_tgt dev_tgt valid_trg",
    "validate_every_updates": "eval_steps valid_steps validate_interval_updates validation_freq",
    "vocab_size": "vocab bpe_size",
    "warmup_steps": "warmup warmup_updates num_warmup_steps",
}
OUR_KEY = _map_each_key(_OTHER_KEYS.items())

_EPOCH_ADVICE = (
    "training is counted in updates: max_updates=N; dry_run=true shows the updates per epoch"
)
_BATCH_ADVICE = "a batch is counted in tokens: max_tokens (as many as fit in memory)"
_UPDATE_ADVICE = (
    f"{_BATCH_ADVICE}, and in training tokens_per_update (target tokens, over all devices)"
)
_ADVICE_AND_KEYS = (  # "{value}" becomes the value on the command line
    (_EPOCH_ADVICE, "epochs max_epoch max_epochs num_epochs num_train_epochs epoch"),
    (
        _UPDATE_ADVICE,
        "batch_size bsz per_device_train_batch_size max_sentences accum_count update_freq "
        "gradient_accumulation_steps accumulate_grad_batches batch_type batch_multiplier",
    ),
    (
        "write optimizer.peak_learning_rate={value} optimizer.schedule=inverse_sqrt (or cosine)",
        "lr learning_rate max_lr peak_lr",
    ),
    (
        "the same command resumes by itself; init_from=FOLDER takes only weights",
        "resume resume_from_checkpoint restore_file reset_optimizer",
    ),
    (
        "write model.num_encoder_layers={value} model.num_decoder_layers={value}",
        "layers num_layers",
    ),
    ("nmt uses a GPU if there is one; device=cuda or device=cpu chooses", "cuda use_cuda"),
    ("nmt uses a GPU if there is one; device=cuda:{value} chooses this one", "gpu gpu_id"),
    ("write devices=1, or the number of GPUs", "gpu_ranks"),
    ("write model=base, big, tiny, modern or deep_shallow", "arch architecture model_name"),
    ("write input={value}", "src source text"),
    ("translations and references are detokenized text already", "remove_bpe post_process"),
)
ADVICE_FOR_KEY = _map_each_key(_ADVICE_AND_KEYS)

_DTYPE_ALIASES = {  # values of dtype, or flags such as fp16=true
    "bf16": DType.bfloat16,
    "fp16": DType.float16,
    "half": DType.float16,
    "fp32": DType.float32,
    "float": DType.float32,
    "full": DType.float32,
}
_QUANTIZATION_ALIASES = {  # values of quantization
    "none": Quantization.float32,
    "no": Quantization.float32,
    "fp32": Quantization.float32,
    "fp16": Quantization.float16,
    "bf16": Quantization.bfloat16,
}
_NUMBER = re.compile(r"(?P<digits>[+-]?\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)(?P<suffix>[kKmM]?)")
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}


def translate_flag(key: str, value: str) -> tuple[str, str]:
    """Return our key and value for a flag of another toolkit.

    Converts bf16=true to dtype=bfloat16, and gpus=0 to device=cpu. Returns other keys and values
    unchanged.
    """
    if key in _DTYPE_ALIASES and value.lower() in ("true", "1", "yes"):
        return "dtype", _DTYPE_ALIASES[key].value
    if OUR_KEY.get(key) == "devices" and value == "0":
        return "device", "cpu"
    return key, value


def translate_value(text: str, type_hint: Any) -> str:
    """Write 100k, 1e5 or bf16 in our notation for a setting of type `type_hint`.

    Other text is returned unchanged.
    """
    accepted_types = (type_hint, *typing.get_args(type_hint))  # with the members of a union
    name = text.lower()
    if DType in accepted_types and name in _DTYPE_ALIASES:
        return _DTYPE_ALIASES[name].value
    if Quantization in accepted_types and name in _QUANTIZATION_ALIASES:
        return _QUANTIZATION_ALIASES[name].value
    match = _NUMBER.fullmatch(text)
    if match is None or text.isdigit():  # `float` would round a large whole number, such as a seed
        return text
    number = float(match["digits"].replace("_", "")) * _FACTORS[match["suffix"].lower()]
    if int in accepted_types:
        return str(int(number)) if number.is_integer() else text
    if float in accepted_types and match["suffix"]:
        return repr(number)
    return text
