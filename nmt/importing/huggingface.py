"""Import models from folders of Hugging Face transformers. Three architectures are supported:

- MarianMT (OPUS-MT) is post-norm and has sinusoidal positions in the layout of Marian.
- M2M100 (NLLB) is pre-norm and has sinusoidal positions in the layout of Tensor2Tensor, which count
  from `pad_token_id + 1`. Decoding starts from EOS, and each text begins with its language.
- Pegasus is MarianMT with pre-norm. nmt-export writes it for pre-norm models.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nmt.checkpoint import load_tensors
from nmt.config import Activation, ImportConfig, ModelConfig, Norm, Positions, SearchConfig
from nmt.data.tokenizer import is_unused_piece
from nmt.errors import ModelError
from nmt.importing.piece_ids import (
    SideVocabulary,
    SpecialIds,
    find_id,
    find_language,
    find_spm,
    make_tokenizers,
    sort_pieces,
)
from nmt.importing.settings import ImportedModel, Settings, read_json
from nmt.importing.weights import (
    EmbeddingLayout,
    TensorFile,
    Weights,
    drop_tied_copies,
    load_pickle,
    make_state_dict,
)
from nmt.model.positions import sinusoidal_positions

log = logging.getLogger(__name__)
CONFIG = "config.json"
_NORM_OF_MODEL_TYPE = {"marian": Norm.post, "m2m_100": Norm.pre, "pegasus": Norm.pre}
_ACTIVATIONS = {
    "relu": Activation.relu,
    "gelu": Activation.gelu,
    "swish": Activation.silu,
    "silu": Activation.silu,
}
_POSITION_TABLES = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
_OLD_POSITION_TABLES = ("encoder.embed_positions.weights", "decoder.embed_positions.weights")
"""The names of the position tables in old files of M2M100."""
_MAX_POSITION_OFFSET = 3  # the largest offset that is tried on a stored position table
_SPM_NAMES = (  # pairs of file names for source and target, which may be the same
    ("source.spm", "target.spm"),
    ("sentencepiece.bpe.model", "sentencepiece.bpe.model"),
    ("spiece.model", "spiece.model"),
)
_NEUTRAL_VALUES = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "do_sample": False}
"""Generation settings that are not imported, with the values that have no effect."""
# The languages of M2M100, which its files do not list. Their ids are consecutive, in this order.
_M2M100_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu "
)


def read(folder: Path, config: ImportConfig) -> ImportedModel:
    """Read a folder that `save_pretrained` wrote.

    Raises `ModelError` for an architecture or a setting that nmt does not have, and for files that
    do not belong together. Raises `ConfigError` for a language that the model does not have.
    """
    settings = _read_settings(folder)
    tensors = TensorFile(folder, _load_weights(folder))
    tensors.rename([(r"^model\.", ""), (r"^lm_head\.weight$", "output.weight")])
    must_tie_output = settings.get_bool("tie_word_embeddings", True)
    embeddings = drop_tied_copies(tensors, must_tie_output=must_tie_output)
    model = _convert_architecture(settings, tensors, has_tied_output=embeddings.has_tied_output)
    tokenizer_settings = Settings(folder, {})
    if (folder / "tokenizer_config.json").exists():
        tokenizer_settings = Settings.read(folder / "tokenizer_config.json")
    src_lang = config.src_lang or _find_text(tokenizer_settings, "src_lang", "source_lang")
    tgt_lang = config.tgt_lang or _find_text(tokenizer_settings, "tgt_lang", "target_lang")
    src, tgt = _read_vocabularies(
        settings, tokenizer_settings, embeddings, config, src_lang=src_lang, tgt_lang=tgt_lang
    )
    generation_settings = settings  # old folders have them in `config.json`
    if (folder / "generation_config.json").exists():
        generation_settings = Settings.read(folder / "generation_config.json")
    return ImportedModel(
        model=model,
        tokenizers=make_tokenizers(src, tgt, shares_embedding=embeddings.shares_embedding),
        weights=make_state_dict(tensors, model, embeddings),
        search=_convert_generation(generation_settings, tgt),
        src_lang=src_lang,
        tgt_lang=tgt_lang,
    )


def _read_settings(folder: Path) -> Settings:
    """Read `config.json`. Raises `ModelError` for an architecture that nmt does not have."""
    settings = Settings.read(folder / CONFIG)
    settings.require_choice("model_type", _NORM_OF_MODEL_TYPE)
    # Old files have these settings. Other values mean another architecture.
    settings.require_values(
        normalize_embedding=False,
        normalize_before=False,
        add_final_layer_norm=False,
        add_bias_logits=False,
        static_position_embeddings=True,
        is_encoder_decoder=True,
    )
    return settings


def _read_vocabularies(
    settings: Settings,
    tokenizer_settings: Settings,
    embeddings: EmbeddingLayout,
    config: ImportConfig,
    *,
    src_lang: str | None,
    tgt_lang: str | None,
) -> tuple[SideVocabulary, SideVocabulary]:
    """Return the vocabularies of source and target. Only M2M100 needs `src_lang` and `tgt_lang`."""
    folder = settings.path.parent
    # nmt-export writes M2M100 with the tokenizer of MarianMT, which adds no language
    has_languages = (
        settings.get("model_type") == "m2m_100"
        and tokenizer_settings.get("tokenizer_class") != "MarianTokenizer"
    )
    src_pieces, tgt_pieces = _read_pieces(
        folder, tokenizer_settings, embeddings, has_languages=has_languages
    )
    id_of_piece = {piece: i for i, piece in enumerate(tgt_pieces)}
    unk_piece = tokenizer_settings.get_text("unk_token") or "<unk>"
    src_special_ids = SpecialIds(
        pad=settings.get_int("pad_token_id"),
        unk=find_id(id_of_piece, unk_piece, folder),
        decoder_start=settings.get_int("decoder_start_token_id"),
        eos=settings.get_int("eos_token_id"),
    )
    tgt_special_ids = src_special_ids
    if has_languages:
        src_language_id = find_language(id_of_piece, "src_lang", src_lang)
        tgt_language_id = find_language(id_of_piece, "tgt_lang", tgt_lang)
        src_special_ids = replace(src_special_ids, language=src_language_id)
        tgt_special_ids = replace(tgt_special_ids, language=tgt_language_id)
    src_spm, tgt_spm = find_spm(folder, config, _SPM_NAMES)
    src = SideVocabulary(src_spm, src_pieces, src_special_ids)
    tgt = SideVocabulary(tgt_spm, tgt_pieces, tgt_special_ids)
    return src, tgt


def _find_text(settings: Settings, name: str, other_name: str) -> str | None:
    """Return the text of the setting `name`, or of `other_name` if `name` is missing or empty.

    Returns None if both are missing or empty.
    """
    text = settings.get_text(name)
    if not text:
        text = settings.get_text(other_name)
    return text or None


def _load_weights(folder: Path) -> Weights:
    """Read the weights from one file or from several shards.

    Reads safetensors if the folder has them, and otherwise pickles, which could hold code.
    """
    weights: Weights = {}
    for path in _find_shards(folder, "model.safetensors"):
        weights |= load_tensors(path)
    if weights:
        return weights
    for path in _find_shards(folder, "pytorch_model.bin"):
        weights |= load_pickle(path)
    if not weights:
        raise ModelError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
    return weights


def _find_shards(folder: Path, name: str) -> list[Path]:
    """Return the file `name` or, if the folder lacks it, the files that its index lists.

    Returns an empty list if the folder also lacks the index or one of these files.
    """
    if (folder / name).exists():
        return [folder / name]
    index_path = folder / f"{name}.index.json"
    if not index_path.exists():
        return []
    shard_of_tensor = dict(read_json(index_path).get("weight_map", {}))
    shard_names = sorted({str(shard_name) for shard_name in shard_of_tensor.values()})
    for shard_name in shard_names:
        if Path(shard_name).name != shard_name:
            raise ModelError(f"{index_path} names files outside of its folder; copy it again")
    shards = [folder / shard_name for shard_name in shard_names]
    if not all(shard.exists() for shard in shards):
        return []
    return shards


def _convert_architecture(
    settings: Settings, tensors: TensorFile, *, has_tied_output: bool
) -> ModelConfig:
    """Convert the architecture, and remove the position tables from the tensors.

    Raises `ModelError` for a setting that nmt does not have.
    """
    num_heads = settings.get_int("encoder_attention_heads")
    d_model = settings.get_int("d_model")
    settings.require_values(decoder_attention_heads=num_heads)
    positions, position_offset = _find_positions(settings, tensors, d_model)
    for table in (*_POSITION_TABLES, *_OLD_POSITION_TABLES):
        tensors.drop(table)
    tensors.rename_or_drop_output_bias("final_logits_bias")
    scales_by_default = settings.get("model_type") == "m2m_100"
    return settings.make_model_config(
        num_encoder_layers=settings.get_int("encoder_layers"),
        num_decoder_layers=settings.get_int("decoder_layers"),
        d_model=d_model,
        d_ff=settings.get_int("encoder_ffn_dim"),
        decoder_d_ff=settings.get_int("decoder_ffn_dim"),
        num_heads=num_heads,
        dropout=settings.get_dropout("dropout", 0.1),
        attention_dropout=settings.get_dropout("attention_dropout"),
        activation_dropout=settings.get_dropout("activation_dropout"),
        norm=settings.get_choice("model_type", _NORM_OF_MODEL_TYPE),
        positions=positions,
        position_offset=position_offset,
        activation=settings.get_choice("activation_function", _ACTIVATIONS),
        scale_embedding=settings.get_bool("scale_embedding", scales_by_default),
        tied_output=has_tied_output,
        output_bias="output.bias" in tensors,
    )


def _find_positions(settings: Settings, tensors: TensorFile, d_model: int) -> tuple[Positions, int]:
    """Return the layout and the offset of a model's sinusoidal positions.

    Raises `ModelError` if the file has position tables that are not sinusoidal.
    """
    for layout, offset in _list_possible_positions(settings, tensors):
        compute_table = partial(sinusoidal_positions, d_model=d_model, layout=layout, offset=offset)
        differs = any(tensors.differs_from_table(name, compute_table) for name in _POSITION_TABLES)
        if not differs:
            return layout, offset
    raise ModelError(f"{settings.path.parent} holds learned positions; these are not imported")


def _list_possible_positions(
    settings: Settings, tensors: TensorFile
) -> list[tuple[Positions, int]]:
    """Return the layouts and offsets that a model can have, the most likely ones first.

    The model type determines layout and offset, unless a MarianMT or Pegasus model has position
    tables. nmt-export stores such tables if the model has other positions than its type.
    """
    if settings.get("model_type") == "m2m_100":
        return [(Positions.sinusoidal_concat, settings.get_int("pad_token_id") + 1)]
    possible_positions = [(Positions.sinusoidal_halves, 0)]
    if any(table in tensors for table in _POSITION_TABLES):
        for layout in Positions:
            if layout.is_sinusoidal:
                for offset in range(_MAX_POSITION_OFFSET + 1):
                    possible_positions.append((layout, offset))
    return possible_positions


def _read_pieces(
    folder: Path, tokenizer_settings: Settings, embeddings: EmbeddingLayout, *, has_languages: bool
) -> tuple[list[str], list[str]]:
    """Return the pieces of source and target from the tokenizer's files.

    With `has_languages`, the pieces include the languages of M2M100.
    """
    src_path = folder / "vocab.json"
    if tokenizer_settings.get_bool("separate_vocabs", False):
        tgt_path = folder / "target_vocab.json"
        src_pieces = sort_pieces(src_path, read_json(src_path).items(), embeddings.num_src_rows)
        tgt_pieces = sort_pieces(tgt_path, read_json(tgt_path).items(), embeddings.vocab_size)
        return src_pieces, tgt_pieces
    if embeddings.num_src_rows != embeddings.vocab_size:
        raise ModelError(f"{folder} has embeddings of two sizes and one vocabulary")
    if src_path.exists():
        pieces_and_ids = _read_vocabulary(src_path, tokenizer_settings, has_languages=has_languages)
    else:
        src_path = folder / "tokenizer.json"
        pieces_and_ids = _read_fast_tokenizer(src_path)
    pieces = sort_pieces(src_path, pieces_and_ids, embeddings.vocab_size)
    return pieces, pieces


def _read_vocabulary(
    path: Path, tokenizer_settings: Settings, *, has_languages: bool
) -> list[tuple[str, Any]]:
    """Return the pieces and ids in `vocab.json` and in the tokenizer's settings.

    With `has_languages`, also adds the languages of M2M100 if the files do not list them.
    """
    pieces_and_ids = list(read_json(path).items())
    added_tokens = tokenizer_settings.get("added_tokens_decoder", {})
    for id_text, token in added_tokens.items():  # such as "7": {"content": "<mask>", ...}
        pieces_and_ids.append((str(token.get("content")), int(id_text)))
    if has_languages and "__en__" not in dict(pieces_and_ids):
        ids = [i for _, i in pieces_and_ids if isinstance(i, int)]
        first_language_id = max(ids, default=-1) + 1  # the languages follow all other pieces
        for i, lang in enumerate(_M2M100_LANGUAGES.split(), start=first_language_id):
            pieces_and_ids.append((f"__{lang}__", i))
    return pieces_and_ids


def _read_fast_tokenizer(path: Path) -> list[tuple[str, Any]]:
    """Return the pieces and ids in `tokenizer.json`."""
    content = read_json(path)
    model = dict(content.get("model", {}))
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # a unigram model, with pairs of piece and score
        pieces = [str(piece) for piece, _ in vocabulary]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
    pieces_and_ids = list(vocabulary.items())
    for token in content.get("added_tokens", []):
        pieces_and_ids.append((token.get("content"), token.get("id")))
    return pieces_and_ids


def _convert_generation(settings: Settings, tgt: SideVocabulary) -> SearchConfig:
    """Convert the generation settings to search settings.

    Warns about settings that are not imported. Raises `ModelError` if `bad_words_ids` forbids any
    token but padding, the start symbol and unused pieces, which our search never generates anyway.
    """
    special_ids = tgt.special_ids
    unused_ids = [i for i, piece in enumerate(tgt.pieces) if is_unused_piece(piece)]
    never_generated = [special_ids.pad, special_ids.decoder_start, *unused_ids]
    for name, neutral_value in _NEUTRAL_VALUES.items():
        value = settings.get(name, neutral_value)
        if value != neutral_value:
            log.warning("%s: ignoring %s=%s", settings.path, name, value)
    forced_id = settings.get("forced_bos_token_id")
    if forced_id not in (None, special_ids.language):
        log.warning("%s: ignoring forced_bos_token_id=%s", settings.path, forced_id)
    forbidden_sequences = [[i] for i in never_generated]
    for bad_sequence in settings.get("bad_words_ids", []):
        if bad_sequence not in forbidden_sequences:
            valid = f"[{special_ids.pad}] and [{special_ids.decoder_start}], padding and the start"
            raise settings.make_error("bad_words_ids", bad_sequence, valid)
    return settings.make_search_config(
        beam_size_name="num_beams", exponent_name="length_penalty", default_exponent=1.0
    )
