"""Every setting of every command: its type, default, unit, range and contradictions.

The dataclasses are the truth; the YAML under `configs/` only holds what differs from them. The
defaults are the recipe of the base model in "Attention Is All You Need" (Vaswani et al., 2017).
This package imports neither Hydra nor torch. A new setting is a field of its dataclass; a new
dataclass or enum is also named here, since other packages import from `nmt.config` alone.
"""

from nmt.config.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_RUN_DIR,
    DType,
    Normalization,
    OutputFormat,
    choose,
    option,
    require,
    resolve,
)
from nmt.config.preprocess import (
    NORMALIZATIONS,
    Corpus,
    CorpusConfig,
    DataConfig,
    Duplicates,
    FilterConfig,
    Invalid,
    PreprocessConfig,
    SplitConfig,
    Step,
    TokenizerConfig,
    TokenizerType,
)
from nmt.config.serve import ServeConfig
from nmt.config.training import (
    Activation,
    Adapter,
    AverageConfig,
    BestMetric,
    ModelConfig,
    Norm,
    Optimizer,
    OptimizerConfig,
    Part,
    Positions,
    Schedule,
    SearchConfig,
    TrainConfig,
)
from nmt.config.translate import (
    Combine,
    Engine,
    EvaluateConfig,
    ExportConfig,
    ExportFormat,
    ImportConfig,
    ImportFormat,
    Method,
    Metric,
    Quantization,
    ScoreConfig,
    ScoreMeasure,
    TooLong,
    TranslateConfig,
)
