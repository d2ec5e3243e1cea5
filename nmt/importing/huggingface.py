"""Folders of Hugging Face transformers: MarianMT (OPUS-MT), M2M100 (NLLB) and Pegasus.

MarianMT is post-norm with Marian's positions. M2M100 is pre-norm with Tensor2Tensor's positions,
the first of which follows the id of padding; it decodes from EOS and puts a language before each
text. Pegasus is MarianMT with pre-norm, and what nmt-export makes of pre-norm models.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from nmt.config import (
    Activation,
    ImportConfig,
    ModelConfig,
    Norm,
    Positions,
    SearchConfig,
)
from nmt.errors import ModelError
from nmt.importing.settings import Imported, Settings, read_json
from nmt.importing.vocabulary import (
    SpecialIds,
    find_id,
    find_language,
    list_pieces,
    make_tokenizers,
    spm_files,
)
from nmt.importing.weights import (
    Sizes,
    Tensors,
    Weights,
    load_pickle,
    load_safetensors,
    settle_embeddings,
    to_state,
)
from nmt.model.transformer import sinusoidal_positions

log = logging.getLogger(__name__)
CONFIG = "config.json"
_TYPES = {"marian": Norm.post, "m2m_100": Norm.pre, "pegasus": Norm.pre}
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu}
_ACTIVATIONS |= {"swish": Activation.silu, "silu": Activation.silu}
_BIAS, _TABLE = "final_logits_bias", "{}.embed_positions.weight"
_SPM = (
    ("source.spm", "target.spm"),
    ("sentencepiece.bpe.model", "sentencepiece.bpe.model"),
    ("spiece.model", "spiece.model"),
)
_NOT_KEPT = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "do_sample": False}
_M2M100_LANGUAGES = (  # in the order of their ids, which M2M100Tokenizer keeps in its code
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn "
    "mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu "
)


def read(folder: Path, config: ImportConfig) -> Imported:
    """Read a folder that `save_pretrained` wrote.

    Raises a `ModelError` for an architecture or a setting that we have not, and for files that do
    not fit each other; a `ConfigError` for a language that the model has not.
    """
    theirs = Settings.read(folder / CONFIG)
    theirs.choose("model_type", _TYPES)
    theirs.demand(normalize_embedding=False, normalize_before=False, add_final_layer_norm=False)
    theirs.demand(add_bias_logits=False, static_position_embeddings=True, is_encoder_decoder=True)
    tensors = Tensors(folder, _load(folder))
    tensors.rename(lambda name: name.removeprefix("model.").replace("lm_head.", "output."))
    sizes = settle_embeddings(tensors, is_tied=theirs.flag("tie_word_embeddings", True))
    model = _architecture(theirs, tensors, is_tied=sizes.is_tied)
    path = folder / "tokenizer_config.json"
    tokenizer = Settings(path, read_json(path) if path.is_file() else {})
    langs = {
        "src": config.src_lang or tokenizer.text("src_lang") or tokenizer.text("source_lang"),
        "tgt": config.tgt_lang or tokenizer.text("tgt_lang") or tokenizer.text("target_lang"),
    }
    # M2M100 puts a language before each text, unless nmt-export made it
    has_languages = theirs.get("model_type") == "m2m_100"
    has_languages &= tokenizer.get("tokenizer_class") != "MarianTokenizer"
    pieces = _pieces(folder, tokenizer, sizes, has_languages=has_languages)
    ids = {piece: i for i, piece in enumerate(pieces[1])}
    special = SpecialIds(
        pad=theirs.number("pad_token_id"),
        unk=find_id(ids, tokenizer.text("unk_token") or "<unk>", folder),
        start=theirs.number("decoder_start_token_id"),
        eos=theirs.number("eos_token_id"),
    )
    sides = [special, special]
    if has_languages:
        found = [find_language(ids, f"{side}_lang", lang) for side, lang in langs.items()]
        sides = [replace(special, prefix=[language]) for language in found]
    spm = spm_files(folder, config, *_SPM)
    path = folder / "generation_config.json"
    return Imported(
        model=model,
        tokenizers=make_tokenizers(spm, pieces, sides, is_joint=sizes.src_vocab_size is None),
        weights=to_state(tensors, model, sizes),
        search=_search(Settings.read(path) if path.is_file() else theirs, sides[1]),
        src_lang=langs["src"],
        tgt_lang=langs["tgt"],
    )


def _load(folder: Path) -> Weights:
    """Read the weights, in one file or several; rather from files that cannot hold code."""
    for name, load in (("model.safetensors", load_safetensors), ("pytorch_model.bin", load_pickle)):
        index, names = folder / f"{name}.index.json", {name}
        if not (folder / name).is_file() and index.is_file():
            names = set(map(str, dict(read_json(index).get("weight_map", {})).values()))
            if any(Path(part).name != part for part in names):
                raise ModelError(f"{index} names files outside of its folder; copy it again")
        if all((folder / part).is_file() for part in names):
            found: Weights = {}
            for part in sorted(names):
                found |= load(folder / part)
            return found
    raise ModelError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")


def _architecture(theirs: Settings, tensors: Tensors, *, is_tied: bool) -> ModelConfig:
    """Return our settings of their config; take the tensors that say nothing else."""
    heads, d_ff = theirs.number("encoder_attention_heads"), theirs.number("encoder_ffn_dim")
    theirs.demand(decoder_attention_heads=heads, decoder_ffn_dim=d_ff)
    d_model, kind = theirs.number("d_model"), theirs.get("model_type")
    tables = [_TABLE.format(stack) for stack in ("encoder", "decoder")]
    layouts = [(Positions.sinusoidal_halves, 0)]
    if kind == "m2m_100":
        layouts = [(Positions.sinusoidal_concat, theirs.number("pad_token_id") + 1)]
    elif any(table in tensors for table in tables):
        # nmt-export stores what these classes do not compute
        layouts += itertools.product((p for p in Positions if p.is_sinusoidal), range(4))

    def fits(layout: Positions, offset: int) -> bool:
        """Return whether stored tables of positions, if any, are those of a layout."""
        compute = partial(sinusoidal_positions, d_model=d_model, layout=layout, offset=offset)
        return all(tensors.has_positions(table, compute) for table in tables)

    layout = next((some for some in layouts if fits(*some)), None)
    if layout is None:
        raise ModelError(f"{theirs.path.parent} holds learned positions; these are not imported")
    for table in tables:
        tensors.drop(table)
        tensors.drop(table + "s")  # of old files of M2M100
    has_bias = tensors.settle_bias("final_logits_bias")
    return theirs.architecture(
        num_encoder_layers=theirs.number("encoder_layers"),
        num_decoder_layers=theirs.number("decoder_layers"),
        d_model=d_model,
        d_ff=d_ff,
        num_heads=heads,
        dropout=theirs.share("dropout", 0.1),
        attention_dropout=theirs.share("attention_dropout"),
        activation_dropout=theirs.share("activation_dropout"),
        norm=_TYPES[kind],
        positions=layout[0],
        position_offset=layout[1],
        activation=theirs.choose("activation_function", _ACTIVATIONS),
        scale_embedding=theirs.flag("scale_embedding", kind == "m2m_100"),
        tied_output=is_tied,
        output_bias=has_bias,
    )


def _pieces(
    folder: Path, tokenizer: Settings, sizes: Sizes, *, has_languages: bool
) -> tuple[list[str], list[str]]:
    """Return the pieces of source and target: of `vocab.json` or `tokenizer.json`, and those that
    the tokenizer adds.
    """
    path = folder / "vocab.json"
    if path.is_file():
        ids = list(read_json(path).items())
        added = tokenizer.get("added_tokens_decoder", {})
        ids += [(str(token.get("content")), int(i)) for i, token in added.items()]
        if has_languages and "__en__" not in dict(ids):
            first = 1 + max((i for _, i in ids if isinstance(i, int)), default=-1)
            ids += [(f"__{lang}__", first + i) for i, lang in enumerate(_M2M100_LANGUAGES.split())]
    else:
        path = folder / "tokenizer.json"
        content = read_json(path)
        vocab = dict(content.get("model", {})).get("vocab", {})
        if isinstance(vocab, list):  # of a unigram model, with scores
            vocab = {str(piece): i for i, (piece, _) in enumerate(vocab)}
        ids = list(vocab.items())
        ids += [
            (token.get("content"), token.get("id")) for token in content.get("added_tokens", [])
        ]
    if not tokenizer.flag("separate_vocabs", False):
        names = list_pieces(path, ids, sizes.vocab_size)
        if sizes.src_vocab_size not in (None, sizes.vocab_size):
            raise ModelError(f"{folder} has embeddings of two sizes and one vocabulary")
        return names, names
    target = folder / "target_vocab.json"
    sources = list_pieces(path, read_json(path).items(), sizes.src_vocab_size or sizes.vocab_size)
    return sources, list_pieces(target, read_json(target).items(), sizes.vocab_size)


def _search(theirs: Settings, special: SpecialIds) -> SearchConfig:
    """Return their defaults of search as ours; warn of those that we have not."""
    for name, off in _NOT_KEPT.items():
        if theirs.get(name, off) != off:
            log.warning("%s: %s=%s is not kept", theirs.path, name, theirs.get(name))
    forced = theirs.get("forced_bos_token_id")
    if forced is not None and [forced] != list(special.prefix):
        log.warning("%s: forced_bos_token_id=%s is not kept", theirs.path, forced)
    for ids in theirs.get("bad_words_ids", []):
        if ids not in ([special.pad], [special.start]):
            wanted = f"[{special.pad}] and [{special.start}], padding and the start"
            raise theirs.refuse("bad_words_ids", ids, wanted)
    return theirs.search(beam_size="num_beams", exponent="length_penalty", default=1.0)
