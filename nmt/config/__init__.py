"""Every setting of every command: its type, default, unit, range and contradictions.

The dataclasses are the truth; the YAML under `configs/` only holds what differs from them. The
defaults are the recipe of the base model in "Attention Is All You Need" (Vaswani et al., 2017).
This package knows neither Hydra nor torch.
"""

from nmt.config.data import (
    CorpusConfig,
    DataConfig,
    FilterConfig,
    PreprocessConfig,
    SplitConfig,
    TokenizerConfig,
)
from nmt.config.export import ExportConfig
from nmt.config.inference import EvaluateConfig, TranslateConfig
from nmt.config.model import ModelConfig, SearchConfig
from nmt.config.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    BestMetric,
    Combine,
    Corpus,
    DType,
    Duplicates,
    Engine,
    ExportFormat,
    Invalid,
    Method,
    Metric,
    Norm,
    Normalization,
    Optimizer,
    OutputFormat,
    Positions,
    Quantization,
    Schedule,
    ScoreMeasure,
    Step,
    TokenizerType,
    TooLong,
    choose,
    option,
    require,
    resolve,
)
from nmt.config.score import ScoreConfig
from nmt.config.training import AverageConfig, OptimizerConfig, TrainConfig

__all__ = [
    "AverageConfig",
    "BestMetric",
    "Combine",
    "Corpus",
    "CorpusConfig",
    "DEFAULT_DATA_DIR",
    "DEFAULT_RUN_DIR",
    "DType",
    "DataConfig",
    "Duplicates",
    "Engine",
    "EvaluateConfig",
    "ExportConfig",
    "ExportFormat",
    "FilterConfig",
    "Invalid",
    "Method",
    "Metric",
    "ModelConfig",
    "Norm",
    "Normalization",
    "Optimizer",
    "OptimizerConfig",
    "OutputFormat",
    "Positions",
    "PreprocessConfig",
    "Quantization",
    "Schedule",
    "ScoreConfig",
    "ScoreMeasure",
    "SearchConfig",
    "SplitConfig",
    "Step",
    "TokenizerConfig",
    "TokenizerType",
    "TooLong",
    "TrainConfig",
    "TranslateConfig",
    "choose",
    "option",
    "require",
    "resolve",
]
