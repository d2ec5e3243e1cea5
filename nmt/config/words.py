"""Keys and values of other toolkits that the command line understands.

`OUR_KEY` maps a key of another toolkit to our key, such as `beam` to `beam_size`. The command line
adds the group of our key, such as `search.` in nmt-train. `ADVICE_FOR_KEY` maps a key without a
counterpart, or a short flag such as -s, to advice for the user.

The keys come from fairseq, Marian, Sockeye, JoeyNMT, OpenNMT-py and transformers.
"""

from __future__ import annotations

import re
import typing
from typing import Any

from nmt.config.runtime import DType, Quantization

# For each of our keys, the keys of other toolkits with the same meaning. A key is replaced only if
# the command has no setting of that name. So model_dir can stand for run_dir in nmt-train, and
# run_dir for model_dir in the commands that read a model.
_OTHER_KEYS = {
    "activation": "activation_fn pos_ffn_activation_fn hidden_act mlp_activation_fn",
    "activation_dropout": "relu_dropout",
    "api_keys": "api_key_file",
    "attention_dropout": "attn_dropout attention_probs_dropout_prob",
    "beam_groups": "num_beam_groups diverse_beam_groups",
    "beam_size": "beam num_beams beam_width beams",
    "checkpoints": "inputs",
    "best_metric": "metric_for_best_model best_checkpoint_metric",
    "checkpoint_every_updates": "save_steps save_interval_updates save_checkpoint_steps save_freq "
    "checkpoint_interval",
    "d_ff": "ffn_dim transformer_ff ff_size feed_forward_size intermediate_size dim_feedforward "
    "encoder_ffn_embed_dim transformer_dim_ffn "
    "transformer_feed_forward_num_hidden",
    "d_model": "hidden_size embed_dim rnn_size word_vec_size model_dim emb_size encoder_embed_dim "
    "decoder_embed_dim transformer_model_size num_embed dim_emb",
    "data_dir": "data_path dataset_dir destdir save_data prepared_data",
    "decoder_d_ff": "decoder_ffn_dim decoder_ffn_embed_dim",
    "devices": "gpus num_gpus n_gpus ngpus n_gpu world_size nproc_per_node num_devices",
    "diversity_penalty": "diverse_beam_strength",
    "dtype": "precision compute_type",
    "experiment": "config config_name recipe",  # a YAML file of settings in a config group
    "format": "output_format",
    "hypotheses": "hypothesis hyp hyps sys",
    "init_from": "finetune_from finetune_from_model pretrained load_from train_from",
    "input": "in input_file source_file",
    "keep_best": "keep_best_checkpoints keep_best_ckpts",
    "keep_last": "keep_checkpoint keep_interval_updates keep_last_epochs keep_last_params "
    "save_total_limit",
    "label_smoothing": "label_smooth smoothing label_smoothing_factor",
    "last": "num_epoch_checkpoints num_update_checkpoints",
    "length_penalty": "lenpen len_penalty lp alpha lengthpenalty length_penalty_alpha",
    "log_every_updates": "log_interval logging_steps report_every logging_freq log_every disp_freq",
    "vocab_multiple": "vocab_size_multiple pad_to_multiple_of padding_factor",
    "max_distance": "max_relative_positions",
    "max_grad_norm": "clip_norm clip grad_clip gradient_clip_val clip_grad_norm",
    "max_length": "max_seq_len max_sentence_length max_sent_length",
    "max_length_a": "max_len_a",
    "max_length_b": "max_len_b",
    "max_updates": "max_steps train_steps max_update steps num_steps updates total_steps",
    "min_freq": "voc_min_freq vocab_min_freq src_words_min_frequency words_min_frequency",
    "model_dir": "run_dir checkpoint ckpt path models checkpoint_path model_path checkpoint_dir "
    "teacher",
    "n_best": "nbest nbest_size num_hypotheses num_return_sequences",
    "no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
    "norm_layer": "layer_norm norm_type",
    "num_decoder_layers": "decoder_layers dec_layers dec_depth",
    "num_encoder_layers": "encoder_layers enc_layers enc_depth",
    "num_heads": "heads attention_heads nhead num_attention_heads n_heads encoder_attention_heads "
    "decoder_attention_heads transformer_heads transformer_attention_heads",
    "num_kv_heads": "heads_kv kv_heads n_kv_heads num_key_value_heads",
    "num_positions": "max_position_embeddings",
    "num_threads": "threads cpu_threads num_workers workers",
    "optimizer.name": "optim",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type decay_method "
    "learning_rate_scheduler_type",
    "output": "out output_file",
    "patience": "early_stopping early_stopping_patience max_num_checkpoint_not_improved",
    "positions": "position_encoding_type positional_encoding",
    "qk_norm": "query_norm",
    "references": "reference ref refs",
    "run_dir": "save_dir output_dir save_model model_dir exp_dir",
    "sampling": "do_sample sample",
    "seed": "random_seed",
    "src_lang": "source_lang src_language",
    "suppress": "suppress_tokens suppress_sequences",
    "temperature": "sampling_temperature",
    "tgt_lang": "target_lang tgt_language trg_lang",
    "top_k": "sampling_topk topk",
    "top_p": "sampling_topp nucleus",
    "train.src": "train_src src_train train_source",
    "train.tgt": "train_tgt tgt_train train_trg train_target",
    "valid.src": "valid_src dev_src validation_source vs",
    "valid.tgt": "valid_tgt dev_tgt valid_trg validation_target vt",
    "validate_every_updates": "eval_steps valid_steps validate_interval_updates validation_freq "
    "valid_freq",
    "vocab_size": "vocab bpe_size sentencepiece_vocab_size num_words nwordssrc src_vocab_size "
    "dim_vocabs",
    "warmup_steps": "warmup warmup_updates num_warmup_steps lr_warmup learning_rate_warmup",
    "unk_replacement": "replace_unk replace_unknown",
}


def _map_keys_to_ours() -> dict[str, str]:
    """Return our key for each key of another toolkit."""
    our_keys = {}
    for our_key, other_keys in _OTHER_KEYS.items():
        for other_key in other_keys.split():
            our_keys[other_key] = our_key
    return our_keys


OUR_KEY = _map_keys_to_ours()

_EPOCH_ADVICE = (
    "training is counted in updates: max_updates=N; dry_run=true shows the updates per epoch"
)
_BATCH_ADVICE = "a batch is counted in tokens: max_tokens (as many as fit in memory)"
_UPDATE_ADVICE = (
    f"{_BATCH_ADVICE}, and in training tokens_per_update (target tokens, over all devices)"
)
# Pairs of advice and the keys of other toolkits that get it. "{value}" stands for the value on the
# command line. Advice such as "write beam_size=..." is only for commands with this setting. If a
# key occurs several times, the command line shows the first advice that applies.
_ADVICE_AND_KEYS = (
    (
        _EPOCH_ADVICE,
        "epochs max_epoch max_epochs num_epochs num_train_epochs epoch after_epochs max_num_epochs "
        "after",
    ),
    ("write beam_size={value}", "b"),
    (
        _UPDATE_ADVICE,
        "b batch_size bsz per_device_train_batch_size max_sentences accum_count update_freq "
        "gradient_accumulation_steps accumulate_grad_batches batch_type batch_multiplier "
        "update_interval mini_batch maxi_batch mini_batch_words",
    ),
    (
        "write max_tokens=N (as many as fit in memory; dry_run=true tries)",
        "w workspace mini_batch_fit",
    ),
    (
        "write optimizer.peak_learning_rate={value} optimizer.schedule=inverse_sqrt (or cosine)",
        "lr learning_rate max_lr peak_lr learn_rate initial_learning_rate",
    ),
    ("write optimizer.schedule=inverse_sqrt optimizer.peak_learning_rate=N", "lr_decay_inv_sqrt"),
    (
        "write optimizer.beta1=0.9 optimizer.beta2=0.98",
        "adam_betas optimizer_betas optimizer_params",
    ),
    (
        "the same command resumes by itself; init_from=FOLDER takes only weights",
        "resume resume_from_checkpoint restore_file reset_optimizer",
    ),
    (
        "write model.num_encoder_layers={value} model.num_decoder_layers={value}",
        "layers num_layers model.layers model.num_layers",
    ),
    (
        "nmt uses a GPU if there is one; device=cuda or device=cpu chooses",
        "cuda use_cuda use_cpu cpu",
    ),
    (
        "nmt uses a GPU if there is one; device=cuda:{value} chooses this one",
        "gpu gpu_id device_id",
    ),
    ("write devices=1, or the number of GPUs", "gpu_ranks ddp_backend sync_sgd dist"),
    (
        "write model=base, big, small, tiny, modern, deep_shallow or student_tiny",
        "arch architecture model_name a encoder encoder_type decoder_type task",
    ),
    ("write input={value}", "src source text i"),
    ("write hypotheses={value}", "i o output translations"),
    ("write src={value}", "source text"),
    ("write tgt={value}", "target hyp hyps hypothesis hypotheses"),
    ("write references={value}", "r tgt target"),
    ("write src_lang={value}", "s"),
    ("write tgt_lang={value}", "t"),
    ("write data.train.src=FILE data.src_lang={value}", "s"),
    ("write data.train.tgt=FILE data.tgt_lang={value}", "t"),
    ("write data.train.src={value}", "source src"),
    ("write data.train.tgt={value}", "target tgt"),
    (
        "write data.train.src=FILE data.train.tgt=FILE",
        "trainpref train_pref train_sets train_set train_data train_file train",
    ),
    (
        "write data.valid.src=FILE data.valid.tgt=FILE",
        "validpref valid_pref valid_sets valid_set valid_data valid_file valid dev dev_data",
    ),
    ("write data.test.src=FILE data.test.tgt=FILE", "testpref test_pref test_data test"),
    ("write input=FILE, the text of this set", "gen_subset"),
    ("write data.src_lang=CODE data.tgt_lang=CODE", "lang langs language_pair"),
    ("write src_lang=CODE tgt_lang=CODE", "lang langs language_pair"),
    ("write output={value}", "o result_path"),
    ("write run_dir=runs/{value}", "name run_name exp_name"),
    ("write port={value}", "p"),
    ("write run_dir={value}", "o"),
    ("write data_dir={value}", "o d"),
    ("write model_dir={value}", "m"),
    ("write last={value}", "n"),
    (
        "write tokenizer.model=FILE for a SentencePiece model; else nmt-preprocess trains one",
        "srcdict tgtdict src_vocab tgt_vocab source_vocab target_vocab vocabs voc_file bpe_codes "
        "codes spm_model",
    ),
    (
        "leave it out, the model folder holds the vocabulary",
        "src_vocab tgt_vocab source_vocab target_vocab vocabs codes bpe_codes spm_model",
    ),
    (
        "a joint vocabulary is the default, tokenizer.separate=true makes one for each side",
        "joined_dictionary share_vocab shared_vocab joint_vocab",
    ),
    (
        "embeddings are tied by default; model.tied_output=false and, in nmt-preprocess, "
        "tokenizer.separate=true untie them",
        "share_all_embeddings share_embeddings share_decoder_embeddings tied_softmax "
        "share_decoder_input_output_embed tied_embeddings tied_embeddings_all weight_tying_type",
    ),
    ("write label_smoothing=0.1; the loss is cross entropy", "criterion loss cost_type"),
    ("write checkpoint_every_updates=N", "save_interval save_every"),
    ("write validate_every_updates=N", "validate_interval valid_every"),
    ("write keep_last=1 average_last=1", "no_epoch_checkpoints no_save"),
    (
        "valid_bleu=true is the default; valid_beam_size=N sets its beam",
        "eval_bleu decode_and_evaluate valid_metrics eval_metric",
    ),
    ("write best_metric=bleu (or loss)", "maximize_best_checkpoint_metric optimized_metric"),
    ("write ema_decay=0.9999", "ema exponential_smoothing"),
    ("write dtype=bfloat16 (or float16)", "amp memory_efficient_fp16 memory_efficient_bf16"),
    (
        "write tracker=[tensorboard] (or wandb, mlflow, trackio)",
        "tensorboard tensorboard_logdir tensorboard_log_dir wandb wandb_project report_to",
    ),
    (
        "write length_penalty={value} (0: none), or normalization=average",
        "normalize length_normalization",
    ),
    (
        "a model has no unknown words if nmt-preprocess had tokenizer.byte_fallback=true",
        "unkpen allow_unk",
    ),
    ("translations and references are detokenized text already", "remove_bpe post_process"),
)


def _map_keys_to_advice() -> dict[str, list[str]]:
    """Return all advice for each key of another toolkit, in the order of `_ADVICE_AND_KEYS`."""
    advice_for_key: dict[str, list[str]] = {}
    for advice, keys in _ADVICE_AND_KEYS:
        for key in keys.split():
            advice_for_key.setdefault(key, []).append(advice)
    return advice_for_key


ADVICE_FOR_KEY = _map_keys_to_advice()

_DTYPE_ALIASES = {  # other names for values of dtype; also flags, such as fp16=true
    "bf16": DType.bfloat16,
    "fp16": DType.float16,
    "half": DType.float16,
    "fp32": DType.float32,
    "float": DType.float32,
    "full": DType.float32,
}
_QUANTIZATION_ALIASES = {  # other names for values of quantization
    "none": Quantization.float32,
    "no": Quantization.float32,
    "fp32": Quantization.float32,
    "fp16": Quantization.float16,
    "bf16": Quantization.bfloat16,
}
# such as -1, 0.5, 1e-4, 100_000 or 30k
_NUMBER = re.compile(r"(?P<digits>[+-]?\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?)(?P<suffix>[kKmM]?)")
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}


def translate_flag(key: str, value: str) -> tuple[str, str]:
    """Convert flags such as bf16=true to dtype=bfloat16, and gpus=0 to device=cpu.

    Returns other keys and values unchanged.
    """
    if key in _DTYPE_ALIASES and value.lower() in ("true", "1", "yes"):
        return "dtype", _DTYPE_ALIASES[key].value
    if OUR_KEY.get(key) == "devices" and value == "0":
        return "device", "cpu"
    return key, value


def translate_value(text: str, type_hint: Any) -> str:
    """Convert 100k, 1e5 or bf16 to our notation for a setting of type `type_hint`.

    Returns other text unchanged.
    """
    accepted_types = (type_hint, *typing.get_args(type_hint))  # a union accepts its members
    name = text.lower()
    if DType in accepted_types and name in _DTYPE_ALIASES:
        return _DTYPE_ALIASES[name].value
    if Quantization in accepted_types and name in _QUANTIZATION_ALIASES:
        return _QUANTIZATION_ALIASES[name].value
    match = _NUMBER.fullmatch(text)
    if match is None or text.isdigit():  # `float` would round a large whole number, such as a seed
        return text
    digits = match["digits"].replace("_", "")
    number = float(digits) * _FACTORS[match["suffix"].lower()]
    if int in accepted_types:
        if number.is_integer():
            return str(int(number))
        return text  # a fraction, which a later check refuses
    if float in accepted_types and match["suffix"]:
        return repr(number)
    return text
