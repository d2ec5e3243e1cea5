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
from nmt.config.score import ScoreConfig
from nmt.config.training import AverageConfig, OptimizerConfig, TrainConfig

__all__ = [
    "AverageConfig",
    "CorpusConfig",
    "DataConfig",
    "EvaluateConfig",
    "ExportConfig",
    "FilterConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PreprocessConfig",
    "ScoreConfig",
    "SearchConfig",
    "SplitConfig",
    "TokenizerConfig",
    "TrainConfig",
    "TranslateConfig",
]
