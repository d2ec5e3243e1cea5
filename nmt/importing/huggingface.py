"""Import folders of Hugging Face transformers: MarianMT (OPUS-MT), M2M100 (NLLB) and Pegasus.

MarianMT is post-norm and has the positional encoding of Marian. M2M100 is pre-norm and has the
positional encoding of Tensor2Tensor, with positions counted from the id of padding plus 1. It
starts decoding from EOS, and a language comes before each text. Pegasus is MarianMT with pre-norm;
nmt-export writes it for pre-norm models.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nmt.checkpoint import load_tensors
from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions, SearchConfig
from nmt.errors import ModelError
from nmt.importing.piece_ids import (
    Side,
    SpecialIds,
    find_id,
    find_language,
    find_spm,
    list_pieces,
    make_tokenizers,
)
from nmt.importing.settings import ImportedModel, Settings, read_json
from nmt.importing.weights import (
    EmbeddingSizes,
    Tensors,
    Weights,
    load_pickle,
    make_state,
    merge_embeddings,
)
from nmt.model.positions import sinusoidal_positions

log = logging.getLogger(__name__)
CONFIG = "config.json"
_NORMS = {"marian": Norm.post, "m2m_100": Norm.pre, "pegasus": Norm.pre}
_ACTIVATIONS = {
    "relu": Activation.relu,
    "gelu": Activation.gelu,
    "swish": Activation.silu,
    "silu": Activation.silu,
}
_POSITION_TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
_SPM_NAMES = (  # of source and target
    ("source.spm", "target.spm"),
    ("sentencepiece.bpe.model", "sentencepiece.bpe.model"),
    ("spiece.model", "spiece.model"),
)
_IGNORED_SETTINGS = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "do_sample": False}
"""Settings of generation that are not imported, with the values that turn them off."""
# M2M100Tokenizer has these in its code. The languages have consecutive ids in this order.
_M2M100_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu "
)


def read(folder: Path, config: ImportConfig) -> ImportedModel:
    """Read a folder that `save_pretrained` wrote.

    Raises `ModelError` for an architecture or a setting that nmt does not have, and for files that
    do not belong together; `ConfigError` for a language that the model does not have.
    """
    settings = Settings.read(folder / CONFIG)
    settings.choose("model_type", _NORMS)
    settings.demand(
        normalize_embedding=False,
        normalize_before=False,
        add_final_layer_norm=False,
        add_bias_logits=False,
        static_position_embeddings=True,
        is_encoder_decoder=True,
    )
    tensors = Tensors(folder, _load_weights(folder))
    tensors.rename([(r"^model\.", ""), (r"^lm_head\.", "output.")])
    sizes = merge_embeddings(tensors, is_tied=settings.flag("tie_word_embeddings", True))
    model = _convert_architecture(settings, tensors, is_tied=sizes.is_tied)
    tokenizer_settings = _read_optional(folder / "tokenizer_config.json", Settings(folder, {}))
    src_lang = config.src_lang or _find_lang(tokenizer_settings, "src_lang", "source_lang")
    tgt_lang = config.tgt_lang or _find_lang(tokenizer_settings, "tgt_lang", "target_lang")
    # M2M100 puts a language before each text, except in folders of nmt-export
    has_languages = (
        settings.get("model_type") == "m2m_100"
        and tokenizer_settings.get("tokenizer_class") != "MarianTokenizer"
    )
    src_pieces, tgt_pieces = _read_pieces(
        folder, tokenizer_settings, sizes, has_languages=has_languages
    )
    ids = {piece: i for i, piece in enumerate(tgt_pieces)}
    special = SpecialIds(
        pad=settings.number("pad_token_id"),
        unk=find_id(ids, tokenizer_settings.text("unk_token") or "<unk>", folder),
        start=settings.number("decoder_start_token_id"),
        eos=settings.number("eos_token_id"),
    )
    src_special = special
    tgt_special = special
    if has_languages:
        src_special = replace(special, language=find_language(ids, "src_lang", src_lang))
        tgt_special = replace(special, language=find_language(ids, "tgt_lang", tgt_lang))
    src_spm, tgt_spm = find_spm(folder, config, _SPM_NAMES)
    generation_settings = _read_optional(folder / "generation_config.json", settings)
    return ImportedModel(
        model=model,
        tokenizers=make_tokenizers(
            Side(src_spm, src_pieces, src_special),
            Side(tgt_spm, tgt_pieces, tgt_special),
            is_joint=sizes.is_joint,
        ),
        weights=make_state(tensors, model, sizes),
        search=_convert_search(generation_settings, tgt_special),
        src_lang=src_lang,
        tgt_lang=tgt_lang,
    )


def _read_optional(path: Path, default: Settings) -> Settings:
    return Settings.read(path) if path.exists() else default


def _find_lang(settings: Settings, *names: str) -> str | None:
    """Return the value of the first of these settings that is set."""
    for name in names:
        if lang := settings.text(name):
            return lang
    return None


def _load_weights(folder: Path) -> Weights:
    """Read the weights from one file or several shards; prefer files that cannot hold code."""
    for name, load in (("model.safetensors", load_tensors), ("pytorch_model.bin", load_pickle)):
        shards = _list_shards(folder, name)
        if all((folder / shard).exists() for shard in shards):
            weights: Weights = {}
            for shard in shards:
                weights |= load(folder / shard)
            return weights
    raise ModelError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")


def _list_shards(folder: Path, name: str) -> list[str]:
    """Return the file `name`, or the files that its index lists if there is only an index."""
    index_path = folder / f"{name}.index.json"
    if (folder / name).exists() or not index_path.exists():
        return [name]
    shard_of_tensor = dict(read_json(index_path).get("weight_map", {}))
    shards = sorted(set(map(str, shard_of_tensor.values())))
    if any(Path(shard).name != shard for shard in shards):
        raise ModelError(f"{index_path} names files outside of its folder; copy it again")
    return shards


def _convert_architecture(settings: Settings, tensors: Tensors, *, is_tied: bool) -> ModelConfig:
    """Convert the architecture, and remove the position tables from the tensors.

    Raises `ModelError` for a setting that nmt does not have.
    """
    num_heads = settings.number("encoder_attention_heads")
    d_ff = settings.number("encoder_ffn_dim")
    d_model = settings.number("d_model")
    settings.demand(decoder_attention_heads=num_heads, decoder_ffn_dim=d_ff)
    model_type = settings.get("model_type")
    positions, offset = _find_positions(settings, tensors, d_model)
    for table in _POSITION_TABLES:
        tensors.drop(table)
        tensors.drop(table + "s")  # in old files of M2M100
    has_bias = tensors.rename_output_bias("final_logits_bias")
    return settings.model_config(
        num_encoder_layers=settings.number("encoder_layers"),
        num_decoder_layers=settings.number("decoder_layers"),
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        dropout=settings.dropout("dropout", 0.1),
        attention_dropout=settings.dropout("attention_dropout"),
        activation_dropout=settings.dropout("activation_dropout"),
        norm=_NORMS[model_type],
        positions=positions,
        position_offset=offset,
        activation=settings.choose("activation_function", _ACTIVATIONS),
        scale_embedding=settings.flag("scale_embedding", model_type == "m2m_100"),
        tied_output=is_tied,
        output_bias=has_bias,
    )


def _find_positions(settings: Settings, tensors: Tensors, d_model: int) -> tuple[Positions, int]:
    """Return layout and offset of the sinusoidal positions that equal the stored position tables.

    Without stored tables, returns the ones of the `model_type`. Raises `ModelError` if none fits.
    """
    candidates = [(Positions.sinusoidal_halves, 0)]
    if settings.get("model_type") == "m2m_100":
        candidates = [(Positions.sinusoidal_concat, settings.number("pad_token_id") + 1)]
    elif any(table in tensors for table in _POSITION_TABLES):
        # stored by nmt-export, for positions that these classes do not compute
        layouts = [layout for layout in Positions if layout.is_sinusoidal]
        candidates += itertools.product(layouts, range(4))
    for layout, offset in candidates:
        compute_table = partial(sinusoidal_positions, d_model=d_model, layout=layout, offset=offset)
        if all(tensors.has_positions(table, compute_table) for table in _POSITION_TABLES):
            return layout, offset
    raise ModelError(f"{settings.path.parent} holds learned positions; these are not imported")


def _read_pieces(
    folder: Path, tokenizer_settings: Settings, sizes: EmbeddingSizes, *, has_languages: bool
) -> tuple[list[str], list[str]]:
    """Return the pieces of source and target from the files of the tokenizer."""
    if tokenizer_settings.flag("separate_vocabs", False):
        src_path = folder / "vocab.json"
        tgt_path = folder / "target_vocab.json"
        return (
            list_pieces(src_path, read_json(src_path).items(), sizes.num_src_rows),
            list_pieces(tgt_path, read_json(tgt_path).items(), sizes.vocab_size),
        )
    if sizes.num_src_rows != sizes.vocab_size:
        raise ModelError(f"{folder} has embeddings of two sizes and one vocabulary")
    path = folder / "vocab.json"
    if path.exists():
        ids = _read_vocabulary(path, tokenizer_settings, has_languages=has_languages)
    else:
        path = folder / "tokenizer.json"
        ids = _read_fast_tokenizer(path)
    pieces = list_pieces(path, ids, sizes.vocab_size)
    return pieces, pieces


def _read_vocabulary(
    path: Path, tokenizer_settings: Settings, *, has_languages: bool
) -> list[tuple[str, Any]]:
    """Return the pieces and ids of `vocab.json`, and of the pieces that transformers adds to it."""
    ids = list(read_json(path).items())
    added = tokenizer_settings.get("added_tokens_decoder", {})
    ids += [(str(token.get("content")), int(i)) for i, token in added.items()]
    if has_languages and "__en__" not in dict(ids):
        next_id = 1 + max((i for _, i in ids if isinstance(i, int)), default=-1)
        for i, lang in enumerate(_M2M100_LANGUAGES.split(), start=next_id):
            ids.append((f"__{lang}__", i))
    return ids


def _read_fast_tokenizer(path: Path) -> list[tuple[str, Any]]:
    """Return the pieces and ids of `tokenizer.json`."""
    content = read_json(path)
    vocabulary = dict(content.get("model", {})).get("vocab", {})
    if isinstance(vocabulary, list):  # a unigram model, with scores
        vocabulary = {str(piece): i for i, (piece, _score) in enumerate(vocabulary)}
    ids = list(vocabulary.items())
    for token in content.get("added_tokens", []):
        ids.append((token.get("content"), token.get("id")))
    return ids


def _convert_search(settings: Settings, special: SpecialIds) -> SearchConfig:
    """Convert the defaults of generation; warn about settings that are not imported.

    Raises `ModelError` for forbidden words, except padding and the start of decoding.
    """
    for name, off in _IGNORED_SETTINGS.items():
        if settings.get(name, off) != off:
            log.warning("%s: ignoring %s=%s", settings.path, name, settings.get(name))
    forced = settings.get("forced_bos_token_id")
    if forced not in (None, special.language):
        log.warning("%s: ignoring forced_bos_token_id=%s", settings.path, forced)
    for ids in settings.get("bad_words_ids", []):
        if ids not in ([special.pad], [special.start]):
            valid = f"[{special.pad}] and [{special.start}], padding and the start"
            raise settings.make_error("bad_words_ids", ids, valid)
    return settings.search_config(beam_size="num_beams", exponent="length_penalty", default=1.0)
