"""The README of an exported folder: the few lines of Python that translate with it."""

from __future__ import annotations

import json

from nmt.checkpoint import ModelInfo
from nmt.config import ExportConfig, ExportFormat, Positions
from nmt.data.tokenizer import JOINT, SOURCE, TARGET, Tokenizers

_CTRANSLATE2 = """\
Needs `pip install ctranslate2 sentencepiece`, and no nmt:

```python
import ctranslate2, sentencepiece
translator = ctranslate2.Translator(".")  # this folder
{load_tokenizers}
pieces = {source}.{encode}
[result] = translator.translate_batch(
    [pieces], beam_size={beam_size}, length_penalty={exponent}, patience=4,
    max_input_length=0, max_decoding_length=len(pieces) + 50, min_decoding_length=0,
    suppress_sequences=[[{pad}], [{bos}]],
)
print({target}.decode(result.hypotheses[0]))
```

- Without `max_input_length=0` CTranslate2 cuts input after 1,024 tokens without a word, and without
  `max_decoding_length` output after 256. More than {max_positions} tokens do not fit the table of
  positions.
- Scores of hypotheses are log P / length^length_penalty, `</s>` counted. With the settings above
  one to three translations in a hundred are others than nmt's, which divides by
  ((5 + length) / 6)^alpha.
- nmt reads NUL, lone carriage returns and Unicode's line breaks as spaces; do so before, too.
- `</s>` or `<pad>` in a text stays text: this tokenizer never makes control symbols of text.
  CTranslate2 adds the end of the source by itself.
"""

_HUGGINGFACE = """\
Needs `pip install transformers torch sentencepiece`, and no nmt:

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")  # this folder
model = AutoModelForSeq2SeqLM.from_pretrained(".")
batch = tokenizer(["A sentence."], return_tensors="pt", padding=True)
output = model.generate(**batch, max_length=batch.input_ids.size(1) + 50)
print(tokenizer.batch_decode(output, skip_special_tokens=True))
```

- More than {max_positions} tokens do not fit the table of positions.
- nmt reads NUL, lone carriage returns and Unicode's line breaks as spaces; do so before, too.
- `generate` ranks hypotheses by log P / length^length_penalty. With the settings of
  generation_config.json one to three translations in a hundred are others than nmt's, which
  divides by ((5 + length) / 6)^alpha.
- `</s>` or `<pad>` in a text stays text (`split_special_tokens` in tokenizer_config.json). A text
  that starts with a code such as `>>de<<` is special to MarianTokenizer: put a space before it.
"""

_TABLE = """\
- The table of positions is part of the weights (Tensor2Tensor's frequencies, which MarianMT does
  not compute). `save_pretrained` of transformers drops it: copy `model.safetensors` instead.
"""

_LOAD = '{} = sentencepiece.SentencePieceProcessor(model_file="{}")'
_BY_BYTES = 'encode("A sentence.", out_type=str)'
# without bytes an unknown text is one piece, which could be called like a control symbol
_BY_IDS = 'id_to_piece({}.encode("A sentence."))'
_JOINT = {"tokenizer": JOINT}
_SEPARATE = {"source": SOURCE, "target": TARGET}


def readme(info: ModelInfo, tokenizer: Tokenizers, config: ExportConfig) -> str:
    """Return the text of README.md for an export of the model of `info` by `config`."""
    is_marian = config.format is ExportFormat.huggingface
    body = _HUGGINGFACE if is_marian else _CTRANSLATE2
    if is_marian and info.model.positions is Positions.sinusoidal_concat:
        body += _TABLE
    files = _JOINT if info.src_vocab_size is None else _SEPARATE
    pad, bos = tokenizer.tgt.pieces([tokenizer.tgt.pad_id, tokenizer.tgt.bos_id])
    title = f"# {info.src_lang} to {info.tgt_lang}, {config.format.value}\n\n"
    made = f"Exported by nmt-export, weights as {config.quantization.value}. "
    return (
        title
        + made
        + body.format(
            beam_size=info.search.beam_size,
            exponent=info.search.length_exponent,
            max_positions=config.max_positions,
            pad=json.dumps(pad),
            bos=json.dumps(bos),
            load_tokenizers="\n".join(_LOAD.format(name, file) for name, file in files.items()),
            encode=_BY_BYTES if tokenizer.src.byte_ids else _BY_IDS.format(list(files)[0]),
            source=list(files)[0],
            target=list(files)[-1],
        )
    )
