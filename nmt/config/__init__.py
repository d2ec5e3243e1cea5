"""Every setting of every command: its type, default, unit, range and contradictions.

The dataclasses are the single source of settings; the YAML under `configs/` only holds values that
differ from them. The defaults are the recipe of the base model in "Attention Is All You Need"
(Vaswani et al., 2017). This package imports neither Hydra nor torch. Other packages import from
`nmt.config` only.
"""

from nmt.config.augment import *
from nmt.config.corpora import *
from nmt.config.evaluate import *
from nmt.config.export import *
from nmt.config.model import *
from nmt.config.optimizer import *
from nmt.config.options import *
from nmt.config.preprocess import *
from nmt.config.rerank import *
from nmt.config.runtime import *
from nmt.config.search import *
from nmt.config.serve import *
from nmt.config.tokenizer import *
from nmt.config.training import *
from nmt.config.translate import *
from nmt.config.visualize import *
from nmt.config.words import *
