"""Neural machine translation with the Transformer of "Attention Is All You Need".

`from nmt import Translator` loads torch only when the name is first used, so that `import nmt`
stays quick.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; importing typing takes 10 ms
if TYPE_CHECKING:
    from typing import Any

    from nmt.translate.translator import Translator

__version__ = "0.1.0"
__all__ = ["Translator", "__version__"]


def __dir__() -> list[str]:
    """List the names to use, for interactive shells."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import `Translator` at its first use (PEP 562)."""
    if name == "Translator":
        from nmt.translate.translator import Translator

        return Translator
    raise AttributeError(f"module 'nmt' has no attribute {name!r}")
