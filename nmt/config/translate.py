"""Settings of what uses a model: `nmt-translate`, `nmt-score`, `nmt-evaluate`, `nmt-export`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from nmt.config.options import (
    CORES,
    DEFAULT_RUN_DIR,
    NUMBER_FORMAT,
    VERIFY,
    DType,
    Normalization,
    OutputFormat,
    check_ranges,
    option,
    require,
    unnamed,
)
from nmt.errors import ConfigError

_MEAN = "mean of an ensemble: probabilities or log_probabilities"


class Combine(str, Enum):
    """How the models of an ensemble agree on the next token."""

    probabilities = "probabilities"  # the log of the mean of their probabilities
    log_probabilities = "log_probabilities"  # the mean of their log-probabilities


class TooLong(str, Enum):
    """What happens to a line of more tokens than `max_source_length`."""

    # at sentence ends, else clauses, else spaces; translated and joined again
    split = "split"  # type: ignore[assignment]  # shadows str.split
    truncate = "truncate"  # the rest of the line is left out, and counted
    error = "error"  # the line is named and nothing more is translated


class Engine(str, Enum):
    """What computes translations."""

    native = "native"  # torch
    ctranslate2 = "ctranslate2"  # a folder that nmt-export wrote


class ScoreMeasure(str, Enum):
    """What `nmt-score` reports for a pair, in nats."""

    log_prob = "log_prob"  # the sum over all tokens, EOS included
    per_token = "per_token"  # that sum over the number of tokens, EOS counted
    score = "score"  # what search ranks by: normalized, with rewards and penalties


@dataclass(kw_only=True)
class TranslationConfig:
    """Settings of all commands that translate; what is null comes from the model folder."""

    model_dir: list[str] = option([DEFAULT_RUN_DIR], "run or model folder; several: an ensemble")
    input: Any = option(None, "text to translate")
    output: str = option("-", "what is written")
    src_lang: str = option("", "source language, where the model has several")
    tgt_lang: str = option("", "target language, where the model has several")
    src_tag: str = option("", "symbol before every source, such as <2de>, instead of languages")
    tgt_tag: str = option("", "symbol before every target; no part of a translation")
    beam_size: int | None = option(None, "hypotheses kept per sentence; 1 is greedy search")
    length_penalty: float | None = option(None, "alpha of ((5 + length) / 6)^alpha; 0 disables")
    max_length_a: float | None = option(None, "output limit: a * source tokens + b")
    max_length_b: int | None = option(None, "output limit: a * source tokens + b")
    min_length: int | None = option(None, "least number of output tokens, EOS excluded")
    normalization: Normalization | None = option(None, "of scores: wu, average or none")
    word_reward: float | None = option(None, "nats added for each output token")
    coverage_penalty: float | None = option(None, "beta of Wu et al.; above 0 favors coverage")
    sampling: bool | None = option(None, "sample translations at random instead of searching")
    temperature: float | None = option(None, "sampling: divisor of log-probabilities")
    top_k: int | None = option(None, "sampling: number of candidates, the likeliest tokens; 0: all")
    top_p: float | None = option(None, "sampling: total probability of the candidates; 1: all")
    seed: int | None = option(None, "sampling: the same seed gives the same samples")
    combine: Combine = option(Combine.probabilities, _MEAN)
    too_long: TooLong = option(TooLong.split, "longer lines: split, truncate or error")
    max_source_length: int = option(  # a character is at most 4 bytes, each a token at worst
        256, "most source tokens translated at once, EOS included", low=8
    )
    max_tokens: int | None = option(
        None, "bound on a batch: rows * beam * longest source; null: auto", low=1
    )
    window_lines: int = option(2048, "lines read, sorted by length and translated at a time", low=1)
    backend: Engine = option(Engine.native, "native, or ctranslate2 for an exported folder")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    devices: int = option(1, "processes here; 0: one per GPU, or one on CPU", low=0, high=1024)
    scheduler: str | None = option(
        None, "Dask scheduler whose workers translate, for example tcp://host:8786"
    )
    dtype: DType = option(DType.float32, NUMBER_FORMAT)
    num_threads: int = option(0, CORES, low=0, high=1024)
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        check_ranges(self)
        is_shared = self.scheduler is not None and self.devices != 1
        require(not is_shared, "devices", self.devices, "does not go with scheduler")
        changed = self.combine is not Combine.probabilities and len(self.model_dir) == 1
        require(not changed, "combine", self.combine, "needs several models: model_dir=[a,b]")


@dataclass(kw_only=True)
class TranslateConfig(TranslationConfig):
    """Settings of `nmt-translate`."""

    input: str = option("-", "text to translate, one sentence per line; - is stdin")
    output: str = option("-", "file for translations, resumed after a kill; - is stdout")
    prefixes: str | None = option(
        None, "first words of each translation, line by line; may be empty"
    )
    context: int = option(
        0,
        "lines before each that it is translated with, by a model of data.context",
        low=0,
        high=100,
    )
    n_best: int = option(1, "hypotheses written per sentence", low=1)
    alignment: bool | None = option(None, "format=json: source token of each target token")
    format: OutputFormat = option(
        OutputFormat.text, "text (several a line as in Moses), or json (one object per line)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_plain = self.format is OutputFormat.text
        require(not (is_plain and self.alignment), "alignment", "true", "needs format=json")
        is_alone = self.context == 0 or (is_plain and self.n_best == 1 and self.prefixes is None)
        require(is_alone, "context", self.context, "only with format=text, n_best=1, no prefixes")
        self.input, self.output = unnamed(self.input), unnamed(self.output)


@dataclass(kw_only=True)
class SynthesisConfig(TranslationConfig):
    """Settings of the commands that make a corpus of text and its translations."""

    input: list[str] | None = option(None, "text to translate: file, glob, list or - (stdin)")
    max_ratio: float = option(3.0, "largest ratio of both sides' numbers of tokens; 0 disables")
    max_repeats: int = option(
        4, "times in a row that the same tokens may stand in a translation; 0 disables", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.input:
            raise ConfigError("give input=FILE, the text to translate")
        self.input = [unnamed(file) for file in self.input]
        draws_again = not (self.sampling and self.backend is Engine.ctranslate2)
        rule = "draws others when it goes on after a kill; use backend=native"
        require(draws_again, "sampling=true with backend", self.backend, rule)
        valid = self.max_ratio == 0 or self.max_ratio >= 1
        require(valid, "max_ratio", self.max_ratio, "must be 0 or at least 1")


@dataclass(kw_only=True)
class DistillConfig(SynthesisConfig):
    """Settings of `nmt-distill`."""

    output: str = option("data/distilled", "folder to write: src.txt, tgt.txt, summary.json")


@dataclass(kw_only=True)
class BacktranslateConfig(SynthesisConfig):
    """Settings of `nmt-backtranslate`."""

    output: str = option("data/backtranslated", "folder to write: src.txt, tgt.txt, summary.json")
    tag: str = option(
        "<bt>", "symbol that is to stand before the sources in training; may be empty"
    )


@dataclass(kw_only=True)
class ScoreConfig:
    """Settings of `nmt-score`; what is null comes from the model folder."""

    model_dir: list[str] = option([DEFAULT_RUN_DIR], "run or model folder; several: an ensemble")
    src: str | None = option(None, "source text, one sentence per line; - is stdin")
    tgt: str | None = option(None, "its translations, line by line; - is stdin")
    output: str = option("-", "file for scores; - is stdout")
    src_lang: str = option("", "source language, where the model has several")
    tgt_lang: str = option("", "target language, where the model has several")
    src_tag: str = option("", "symbol before every source, such as <2de>, instead of languages")
    tgt_tag: str = option("", "symbol before every target; no part of a translation")
    measure: ScoreMeasure = option(
        ScoreMeasure.log_prob, "log_prob (the sum), per_token or score (as search reports it); nats"
    )
    format: OutputFormat = option(OutputFormat.text, "text, or json with all measures")
    length_penalty: float | None = option(None, "of score: alpha of ((5 + length) / 6)^alpha")
    normalization: Normalization | None = option(None, "of score: wu, average or none")
    word_reward: float | None = option(None, "of score: nats added for each token, EOS included")
    coverage_penalty: float | None = option(None, "of score: beta of Wu et al. (2016)")
    alignment: bool = option(False, "format=json: source token of each target token")
    combine: Combine = option(Combine.probabilities, _MEAN)
    max_tokens: int = option(4096, "bound on one batch: rows * longest side", low=1)
    window_lines: int = option(8192, "lines read, sorted by length and scored at a time", low=1)
    backend: Engine = option(Engine.native, "native, or ctranslate2 for an exported folder")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    dtype: DType = option(DType.float32, NUMBER_FORMAT)
    num_threads: int = option(0, CORES, low=0, high=1024)
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        if self.src is None or self.tgt is None:
            raise ConfigError("give src=FILE and tgt=FILE, aligned line by line")
        self.src, self.tgt, self.output = map(unnamed, (self.src, self.tgt, self.output))
        require(self.src != "-" or self.tgt != "-", "tgt", "-", "src is stdin already")
        check_ranges(self)
        plain = self.format is OutputFormat.text
        require(not (plain and self.alignment), "alignment", "true", "needs format=json")


class Metric(str, Enum):
    """Metrics, with sacreBLEU's defaults: 0 to 100, higher is better, except for TER.

    BLEU (Papineni et al., 2002); chrF2 (Popovic, 2015); chrF2++ (Popovic, 2017), which adds word
    uni- and bigrams; TER (Snover et al., 2006), edits per 100 reference words split at spaces.
    """

    bleu = "bleu"
    chrf = "chrf"
    chrfpp = "chrfpp"
    ter = "ter"


class HeldOutSplit(str, Enum):
    """Held-out sets of a data folder."""

    test = "test"
    valid = "valid"


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
    argos = "argos"  # Argos Translate, LibreTranslate


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


class ImportFormat(str, Enum):
    """Which toolkit wrote the model."""

    auto = "auto"
    huggingface = "huggingface"  # a folder of transformers: MarianMT, M2M100 (NLLB), Pegasus
    marian = "marian"  # .npz
    opennmt = "opennmt"  # .pt of OpenNMT-py
    fairseq = "fairseq"  # .pt, beside dict.*.txt


@dataclass(kw_only=True)
class ImportConfig:
    """Settings of `nmt-import`."""

    input: str | None = option(None, "folder, or file, with the model of another toolkit")
    output: str = option("imported", "model folder to write")
    format: ImportFormat = option(
        ImportFormat.auto, "auto, huggingface, marian, opennmt or fairseq"
    )
    src_tokenizer: str | None = option(
        None, "SentencePiece model of the source; null: the one beside the model"
    )
    tgt_tokenizer: str | None = option(None, "that of the target; null: that of the source")
    src_lang: str | None = option(None, "source language, such as eng_Latn; null: as the files say")
    tgt_lang: str | None = option(None, "target language, such as fra_Latn; null: as the files say")

    def __post_init__(self) -> None:
        if self.input is None:
            raise ConfigError("give input=FOLDER, with the model of another toolkit")
        valid = self.tgt_tokenizer is None or self.src_tokenizer is not None
        require(valid, "tgt_tokenizer", self.tgt_tokenizer, "needs src_tokenizer=FILE")


@dataclass(kw_only=True)
class EvaluateConfig:
    """Settings of `nmt-evaluate`; BLEU's tokenizer is that of the target language, else 13a."""

    hypotheses: str | None = option(None, "detokenized translations, one per line; - is stdin")
    references: list[str] = option([], "reference files, aligned line by line: r.de or [r1,r2]")
    baseline: str | None = option(None, "translations of another system to test against")
    model_dir: list[str] | None = option(None, "model (or ensemble [a,b]) that translates src")
    src: str | None = option(None, "source text for model_dir")
    data_dir: str | None = option(None, "data folder whose test set model_dir translates instead")
    split: HeldOutSplit = option(HeldOutSplit.test, "of data_dir: test or valid")
    metrics: list[Metric] = option(
        [Metric.bleu, Metric.chrf, Metric.ter], "bleu, chrf, chrfpp, ter"
    )
    src_lang: str = option("", "source language, of a model with several")
    tgt_lang: str = option("", "target language, of hypotheses or of a model with several")
    tokenize: str | None = option(None, "BLEU's tokenizer by name instead")
    lowercase: bool = option(False, "compare without case, as TER always does")
    method: Method = option(
        Method.approximate_randomization, "or bootstrap, whose p-value compares with 0.025"
    )
    num_samples: int = option(1000, "resamples of the significance test", low=40, high=1_000_000)
    seed: int = option(12345, "of the significance test", low=1, high=2**32 - 1)
    force: bool = option(False, "score text that looks tokenized")
    format: OutputFormat = option(OutputFormat.text, "text or json")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    num_threads: int = option(0, CORES, low=0, high=1024)
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        if (self.hypotheses is None) == (self.model_dir is None):
            raise ConfigError("give either hypotheses=FILE or model_dir=FOLDER with src=FILE")
        reads_folder = self.hypotheses is None and self.src is None
        for key in ("metrics",) if reads_folder else ("references", "metrics"):
            require(bool(getattr(self, key)), key, "[]", "name at least one")
        if reads_folder and self.model_dir is not None:
            rule = "needs src=FILE or data_dir=FOLDER to translate"
            require(self.data_dir is not None, "model_dir", ",".join(self.model_dir), rule)
            require(self.baseline is None, "baseline", self.baseline, "needs src=FILE")
            require(not self.references, "references", ",".join(self.references), "needs src=FILE")
            require(not self.src_lang, "src_lang", self.src_lang, "needs src=FILE")
        check_ranges(self)
        without: dict[str, tuple[str, ...]] = {"baseline": ("method", "num_samples", "seed")}
        without["model_dir"] = ("src", "split", "src_lang", "device")
        for needed, keys in without.items():
            for key in keys if getattr(self, needed) is None else ():
                value, default = getattr(self, key), getattr(type(self), key)
                require(value == default, key, value, f"does nothing without {needed}")
        is_usual = self.src is None or self.split is HeldOutSplit.test
        require(is_usual, "split", self.split, "is of data_dir; leave out src")
        num_stdin = [self.hypotheses, self.baseline, self.src, *self.references].count("-")
        require(num_stdin < 2, "references", "-", "stdin is read once; give files")


@dataclass(kw_only=True)
class ExportConfig:
    """Settings of `nmt-export`."""

    model_dir: str = option(DEFAULT_RUN_DIR, "run, checkpoint or model folder")
    output: str | None = option(
        None, "folder to write; default: beside model_dir, MODEL_DIR-ctranslate2-int8 and so on"
    )
    format: ExportFormat = option(
        ExportFormat.ctranslate2, "ctranslate2, huggingface (transformers) or argos (.argosmodel)"
    )
    quantization: Quantization = option(
        Quantization.float32, "float32, float16, bfloat16; ctranslate2 also int8, int8_float16, ..."
    )
    max_positions: int = option(
        2048, "longest source or target sentence, in tokens", low=2, high=65536
    )
    verify: bool = option(True, VERIFY)

    def __post_init__(self) -> None:
        check_ranges(self)
        is_scaled = self.quantization.value.startswith("int")
        rule = "format=huggingface takes float32, float16 or bfloat16"
        is_marian = self.format is ExportFormat.huggingface
        require(not (is_marian and is_scaled), "quantization", self.quantization, rule)
