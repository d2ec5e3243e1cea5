"""Settings of `nmt-evaluate` and `nmt-export`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nmt.config.options import DEFAULT_RUN_DIR, OutputFormat, check_ranges, option, require
from nmt.errors import ConfigError


class Metric(str, Enum):
    """Metrics, with sacreBLEU's defaults: 0 to 100, higher is better, except for TER.

    BLEU (Papineni et al., 2002); chrF2 (Popovic, 2015); chrF2++ (Popovic, 2017), which adds word
    uni- and bigrams; TER (Snover et al., 2006), edits per 100 reference words split at spaces.
    """

    bleu = "bleu"
    chrf = "chrf"
    chrfpp = "chrfpp"
    ter = "ter"


class Method(str, Enum):
    """How significance is tested: Koehn (2004) or, with fewer false positives, Riezler and Maxwell
    (2005).
    """

    bootstrap = "bootstrap"
    approximate_randomization = "approximate_randomization"


class ExportFormat(str, Enum):
    """Which library the exported model is for."""

    ctranslate2 = "ctranslate2"
    huggingface = "huggingface"


class Quantization(str, Enum):
    """How exported weights are stored: int8 with one scale per row, int16 with one per matrix.

    After `int8_`: the type of everything that is not a matrix multiplication.
    """

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int8_float32 = "int8_float32"
    int8_float16 = "int8_float16"
    int8_bfloat16 = "int8_bfloat16"
    int16 = "int16"


@dataclass(kw_only=True)
class EvaluateConfig:
    """Settings of `nmt-evaluate`."""

    hypotheses: str | None = option(None, "detokenized translations, one per line; - is stdin")
    references: list[str] = option([], "reference files, aligned line by line: r.de or [r1,r2]")
    baseline: str | None = option(None, "translations of another system to test against")
    model_dir: list[str] | None = option(None, "model (or ensemble [a,b]) that translates src")
    src: str | None = option(None, "source text for model_dir")
    metrics: list[Metric] = option(
        [Metric.bleu, Metric.chrf, Metric.ter], "bleu, chrf, chrfpp, ter"
    )
    tgt_lang: str = option("", "target language; picks BLEU's tokenizer for zh, ja, ko")
    tokenize: str | None = option(None, "BLEU's tokenizer by name; default by tgt_lang, else 13a")
    method: Method = option(
        Method.approximate_randomization, "or bootstrap, whose p-value compares with 0.025"
    )
    num_samples: int = option(1000, "resamples of the significance test", low=1)
    seed: int = option(12345, "of the significance test")
    force: bool = option(False, "score text that looks tokenized")
    format: OutputFormat = option(OutputFormat.text, "text or json")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    num_threads: int = option(0, "CPU threads; 0: torch's default", low=0)

    def __post_init__(self) -> None:
        if (self.hypotheses is None) == (self.model_dir is None):
            raise ConfigError("give either hypotheses=FILE or model_dir=FOLDER with src=FILE")
        for key in ("references", "metrics"):
            require(bool(getattr(self, key)), key, "[]", "name at least one")
        if self.model_dir is not None and self.src is None:
            require(False, "model_dir", ",".join(self.model_dir), "needs src=FILE to translate")
        check_ranges(self)


_FLOATS = (Quantization.float32, Quantization.float16, Quantization.bfloat16)


@dataclass(kw_only=True)
class ExportConfig:
    """Settings of `nmt-export`."""

    model_dir: str = option(DEFAULT_RUN_DIR, "run, checkpoint or model folder")
    output: str = option("exported", "folder to write")
    format: ExportFormat = option(
        ExportFormat.ctranslate2, "ctranslate2, or huggingface (MarianMT, for model.norm=post)"
    )
    quantization: Quantization = option(
        Quantization.float32, "float32, float16, bfloat16; ctranslate2 also int8, int8_float16, ..."
    )
    max_positions: int = option(
        2048, "longest source or target sentence, in tokens", low=2, high=65536
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        is_float = self.quantization in _FLOATS or self.format is not ExportFormat.huggingface
        rule = "format=huggingface takes float32, float16 or bfloat16"
        require(is_float, "quantization", self.quantization, rule)
