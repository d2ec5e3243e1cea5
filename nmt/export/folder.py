"""The folder that an export writes: the converted model, its tokenizer, `nmt.json` and a README
with the Python that translates with it; and which architectures each format supports, which is
known before a model is trained.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint import (
    EXPORTED,
    FORMAT_VERSION,
    ModelInfo,
    build_model,
    load_info,
    load_tokenizer,
    load_weights,
)
from nmt.config import ExportConfig, ExportFormat, ModelConfig, NormLayer, Positions
from nmt.data.languages import LanguagePair
from nmt.data.tokenizer import JOINT, SOURCE, TARGET, Tokenizer, Tokenizers, save_tokenizers
from nmt.errors import ConfigError
from nmt.export import argos, ctranslate2, huggingface
from nmt.runtime.files import replace_folder, write_json

log = logging.getLogger(__name__)

_WRITERS = {
    ExportFormat.ctranslate2: ctranslate2.write_ctranslate2,
    ExportFormat.huggingface: huggingface.write_huggingface,
    ExportFormat.argos: argos.write_argos,
}
_ANY = ["num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads"]
_ANY += ["position_offset", "scale_embedding", "tied_output", "output_bias", "norm"]
_ANY += ["num_positions", "max_distance"]
_ALL: dict[str, list[Any] | None] = dict.fromkeys(_ANY)
_CHOICES = ["positions", "activation", "norm_layer", "num_kv_heads", "qk_norm", "source_eos"]
SUPPORTED = {
    ExportFormat.ctranslate2: {**_ALL, **dict.fromkeys(_CHOICES)},
    ExportFormat.huggingface: {  # its encoder-decoders; and its tokenizers add EOS
        **_ALL,
        "positions": [layout for layout in Positions if layout.is_added],
        "activation": list(huggingface.ACTIVATIONS),
        "norm_layer": [NormLayer.layer],
        "num_kv_heads": [None],
        "qk_norm": [False],
    },
    ExportFormat.argos: {**_ALL, **dict.fromkeys(_CHOICES)},
}
"""The values of each setting of the architecture that a format supports; None: any value."""


def export(folder: Path, output: Path, config: ExportConfig) -> None:
    """Convert the model folder `folder` to `config.format` and write it to `output` in one step.

    Raises a `ConfigError` for an architecture that the format does not support, a `ModelError` for
    a folder that is no model, and an `NmtError` for an `output` that is something else or for a
    missing package.
    """
    info = load_info(folder)
    reasons = check_exportable(info.model)
    if why := reasons[config.format]:
        others = " or ".join(f"format={name.value}" for name in reasons if not reasons[name])
        raise ConfigError(
            f"format={config.format.value} does not support {' and '.join(why)}; use {others}"
        )
    tokenizer = load_tokenizer(folder, info)
    model = build_model(info, load_weights(folder), torch.device("cpu"))  # names and shapes fit
    with replace_folder(output, marker=EXPORTED) as temporary:
        _WRITERS[config.format](temporary, info, dict(model.state_dict()), tokenizer, config)
        save_tokenizers(temporary, tokenizer)
        keys = ("format", "quantization", "max_positions")
        marker = {"export": {key: getattr(config, key) for key in keys}, **info.content()}
        write_json(temporary / EXPORTED, {"format_version": FORMAT_VERSION, **marker})
        text = readme(info, tokenizer, config)
        (temporary / "README.md").write_text(text, encoding="utf-8", newline="\n")


def check_exportable(config: ModelConfig) -> dict[ExportFormat, list[str]]:
    """Return for each format why a model of this architecture cannot be exported to it, if so.

    Dropout only affects training and is never a reason. A setting that a format's table does not
    name is a reason unless it has its default.
    """
    reasons: dict[ExportFormat, list[str]] = {name: [] for name in SUPPORTED}
    for name, table in SUPPORTED.items():
        for setting in dataclasses.fields(config):
            value = getattr(config, setting.name)
            held = table.get(setting.name, [setting.default])
            if held is not None and value not in held and "dropout" not in setting.name:
                shown, *only = (json.dumps(one).strip('"') for one in (value, *held))
                reasons[name].append(f"model.{setting.name}={shown} (only {', '.join(only)})")
    return reasons


def announce(config: ModelConfig, *, required: bool) -> None:
    """Log, before a model is trained, to which formats it can be exported, and why not to others.

    With `required`, raise a `ConfigError` for one that CTranslate2 cannot run.
    """
    reasons = check_exportable(config)
    if required and reasons[ExportFormat.ctranslate2]:
        raise ConfigError(
            f"{' and '.join(reasons[ExportFormat.ctranslate2])} cannot be exported to CTranslate2; "
            "change it, or set exportable=false to train it anyway"
        )
    for name, why in reasons.items():
        log.info("export to %s: %s", name.value, f"no, {', '.join(why)}" if why else "yes")


def readme(info: ModelInfo, tokenizer: Tokenizers, config: ExportConfig) -> str:
    """Return the text of README.md for an export of the model of `info` by `config`."""
    is_marian = config.format is ExportFormat.huggingface
    bodies = {ExportFormat.huggingface: _HUGGINGFACE, ExportFormat.argos: _ARGOS}
    body = bodies.get(config.format, _CTRANSLATE2)
    if is_marian and info.model.positions in (Positions.sinusoidal_concat, Positions.learned):
        body += _TABLE
    is_separate = not isinstance(tokenizer, Tokenizer)
    files = {"source": SOURCE, "target": TARGET} if is_separate else {"tokenizer": JOINT}
    source, target = list(files)[0], list(files)[-1]
    load = '{} = sentencepiece.SentencePieceProcessor(model_file="{}")'
    encode = "{0}.encode({1}, out_type=str)"
    if not tokenizer.src.byte_ids:  # unknown text is one piece, perhaps named as a control symbol
        encode = "{0}.id_to_piece({0}.encode({1}))"
    tagged = {"tags": "", "sentence": '"A sentence."', "prefix": "", "forced": "", "untag": ""}
    if tokenizer.tgt.vocabulary and not is_marian:  # of which the SentencePiece model may lack some
        tagged["untag"] = '.replace("▁", " ").lstrip()'
    if directions := [direction for direction in info.directions if any(direction.tags)]:
        body += _TAGGED.format(list="; ".join(map(_describe, directions)))
        first = directions[0]
        pair = f"{json.dumps(first.src_tag)}, {json.dumps(first.tgt_tag)}"
        prefix = encode.format(target, "target_tag")
        tagged = {
            "tags": f"source_tag, target_tag = {pair}  # {first.src_lang} to {first.tgt_lang}\n",
            "sentence": 'f"{source_tag} A sentence."',
            "prefix": _PREFIX if is_marian else "",
            "forced": "decoder_input_ids=start, " if is_marian else f"target_prefix=[{prefix}], ",
            "untag": ".removeprefix(target_tag).lstrip()",
        }
    if not is_marian and (tokenizer.src.prefix or tokenizer.tgt.prefix):
        before, after = (one.pieces(one.prefix) for one in (tokenizer.src, tokenizer.tgt))
        encode = f"{json.dumps(before)} + {encode}"
        tagged["forced"] = f"target_prefix=[{json.dumps(after)}], "
        tagged["untag"] = f".removeprefix({json.dumps(' '.join(after))}).lstrip()"
    pad, bos = tokenizer.tgt.pieces([tokenizer.tgt.pad_id, tokenizer.tgt.bos_id])
    return (
        f"# {info.src_lang} to {info.tgt_lang}, {config.format.value}\n\n"
        f"Exported by nmt-export, weights as {config.quantization.value}. "
    ) + body.format(
        beam_size=info.search.beam_size,
        exponent=info.search.length_exponent,
        max_positions=config.max_positions,
        pad=json.dumps(pad),
        bos=json.dumps(bos),
        load_tokenizers="\n".join(load.format(name, file) for name, file in files.items()),
        encode=encode.format(source, tagged["sentence"]),
        target=target,
        **tagged,
    )


def _describe(direction: LanguagePair) -> str:
    """Say which tags ask for a direction."""
    sides = (("source", direction.src_tag), ("target", direction.tgt_tag))
    tags = " and ".join(f"`{tag}` before the {side}" for side, tag in sides if tag)
    return f"{direction.src_lang} to {direction.tgt_lang}, {tags}"


_CTRANSLATE2 = """\
Needs `pip install ctranslate2 sentencepiece`, and no nmt:

```python
import ctranslate2, sentencepiece
translator = ctranslate2.Translator(".")  # this folder
{load_tokenizers}
{tags}pieces = {encode}
[result] = translator.translate_batch(
    [pieces], {forced}beam_size={beam_size}, length_penalty={exponent}, patience=4,
    max_input_length=0, max_decoding_length=len(pieces) + 50, min_decoding_length=0,
    suppress_sequences=[[{pad}], [{bos}]],
)
print({target}.decode(result.hypotheses[0]){untag})
```

- Without `max_input_length=0` CTranslate2 silently truncates input after 1,024 tokens, and without
  `max_decoding_length` output after 256. More than {max_positions} tokens do not fit the table of
  positions.
- Scores of hypotheses are log P / length^length_penalty, `</s>` counted. With the settings above
  one to three translations in a hundred differ from nmt's, which divides by
  ((5 + length) / 6)^alpha.
- nmt reads NUL, lone carriage returns and Unicode's line breaks as spaces; replace them as well.
- `</s>` or `<pad>` in a text stays text: this tokenizer never parses control symbols from text.
  CTranslate2 appends the end of the source itself.
"""

_HUGGINGFACE = """\
Needs `pip install transformers torch sentencepiece`, and no nmt:

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")  # this folder
model = AutoModelForSeq2SeqLM.from_pretrained(".")
{tags}batch = tokenizer([{sentence}], return_tensors="pt", padding=True)
{prefix}output = model.generate(**batch, {forced}max_length=batch.input_ids.size(1) + 50)
print(tokenizer.batch_decode(output, skip_special_tokens=True)[0]{untag})
```

- More than {max_positions} tokens do not fit the table of positions.
- nmt reads NUL, lone carriage returns and Unicode's line breaks as spaces; replace them as well.
- `generate` ranks hypotheses by log P / length^length_penalty. With the settings of
  generation_config.json one to three translations in a hundred differ from nmt's, which
  divides by ((5 + length) / 6)^alpha.
- `</s>` or `<pad>` in a text stays text (`split_special_tokens` in tokenizer_config.json). A text
  that starts with a code such as `>>de<<` is special to MarianTokenizer: put a space before it.
"""

_ARGOS = """\
`argospm install FILE.argosmodel` installs the package for argos-translate, and LibreTranslate
translates with what argos-translate has installed (`LT_LOAD_ONLY` names languages).

- Both search with beam 4 or more and log P / length^0.2, whatever the model's settings, write at
  most 256 tokens a sentence and turn `_` into a space.
- To cut text into sentences they need a splitter, which they download when it is first used.
"""

_PREFIX = """\
import torch
first = [model.config.decoder_start_token_id, *tokenizer.spm_target.encode(target_tag)]
start = torch.tensor([first])
"""

_TAGGED = """\
- The directions and their tags: {list}.
"""

_TABLE = """\
- The table of positions is part of the weights, since MarianMT does not compute it (Tensor2Tensor's
  frequencies, or learned). `save_pretrained` of transformers drops it: copy `model.safetensors`
  instead.
"""
