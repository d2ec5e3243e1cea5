"""The folder that an export writes: the converted model, its tokenizer, `nmt.json` and a README
with the few lines of Python that translate with it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nmt.checkpoint import (
    EXPORTED,
    FORMAT_VERSION,
    build_model,
    load_info,
    load_tokenizer,
    load_weights,
)
from nmt.config import ExportConfig, ExportFormat
from nmt.data.tokenizer import save_tokenizers
from nmt.export.ctranslate2 import write_ctranslate2
from nmt.export.huggingface import write_huggingface
from nmt.export.readme import readme
from nmt.export.support import require_exportable
from nmt.files import replace_folder, write_json

_WRITERS = {
    ExportFormat.ctranslate2: write_ctranslate2,
    ExportFormat.huggingface: write_huggingface,
}


def export(folder: Path, output: Path, config: ExportConfig) -> None:
    """Convert the model folder `folder` to `config.format` and write it to `output` in one step.

    Raises a `ConfigError` for an architecture that the format does not hold, a `ModelError` for a
    folder that is no model, and an `NmtError` for an `output` that is something else or for a
    missing package.
    """
    info = load_info(folder)
    require_exportable(info.model, config.format)
    tokenizer = load_tokenizer(folder, info)
    model = build_model(info, load_weights(folder), torch.device("cpu"))  # names and shapes fit
    with replace_folder(output, marker=EXPORTED) as temporary:
        _WRITERS[config.format](
            temporary,
            info,
            dict(model.state_dict()),
            tokenizer,
            quantization=config.quantization,
            max_positions=config.max_positions,
        )
        save_tokenizers(temporary, tokenizer)
        made = {"format": config.format.value, "quantization": config.quantization.value}
        marker = {"export": {**made, "max_positions": config.max_positions}, **info.content()}
        write_json(temporary / EXPORTED, {"format_version": FORMAT_VERSION, **marker})
        text = readme(info, tokenizer, config)
        (temporary / "README.md").write_text(text, encoding="utf-8", newline="\n")
