"""Neural machine translation with the Transformer of "Attention Is All You Need".

`import nmt` is quick: torch is loaded when `Translator`, `prepare` or `train` is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers assume True; importing it from typing would take 10 ms
if TYPE_CHECKING:
    from typing import Any

    from nmt.cli.train import train_in_process as train
    from nmt.preprocess.prepare import prepare
    from nmt.translate.translator import Translator

__version__ = "0.1.0"
__all__ = ["Translator", "__version__", "prepare", "train"]


def __dir__() -> list[str]:
    """List the public names, for completion in interactive shells."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name of the API at its first use (PEP 562)."""
    if name == "Translator":
        from nmt.translate.translator import Translator

        return Translator
    if name == "prepare":
        from nmt.preprocess.prepare import prepare

        return prepare
    if name == "train":
        from nmt.cli.train import train_in_process

        return train_in_process
    raise AttributeError(f"module 'nmt' has no attribute {name!r}")
