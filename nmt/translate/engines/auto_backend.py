"""The engine of backend=auto: CTranslate2 where it supports the request, else the native engine.

This module does not import CTranslate2's engine, which imports the exporters of models.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from nmt.config import ModelConfig, SearchConfig
from nmt.errors import ConfigError, DataError, NmtError
from nmt.search.hypotheses import Hypothesis
from nmt.search.request import Ids, SearchRequest
from nmt.translate.engines.base import Backend
from nmt.translate.engines.native import NativeBackend

log = logging.getLogger(__name__)


class AutoBackend:
    """Searches with CTranslate2 where it supports the request, else natively. Scores natively.

    Args:
        fast: the CTranslate2 engine.
        model_config: the architecture of the model.
        load_native: loads the native engine; called at the first use of the engine.
    """

    def __init__(
        self, fast: Backend, model_config: ModelConfig, load_native: Callable[[], Backend]
    ) -> None:
        self.max_tokens = fast.max_tokens
        self.num_workers = fast.num_workers
        self.model_config = model_config
        self._fast = fast
        self._load_native = load_native
        self._native: NativeBackend | None = None
        self._lock = threading.Lock()
        self._logged_reasons: set[str] = set()

    @property
    def native(self) -> NativeBackend:
        """The native engine, which is loaded at the first use."""
        with self._lock:
            if self._native is None:
                backend = self._load_native()
                assert isinstance(backend, NativeBackend)
                self._native = backend
            return self._native

    def check(self, config: SearchConfig, *, scoring: bool = False) -> None:
        """Accept every setting, since the native engine supports all settings."""

    def search(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """See `Backend.search`."""
        try:
            # all three raise an error for what CTranslate2 does not support
            check_reproducible(request.config)
            self._fast.check(request.config)
            return self._fast.search(request)
        except (ConfigError, DataError) as error:
            self._log_reason(error)
            return self.native.search(request)

    def score(
        self, sources: Sequence[Ids], targets: Sequence[Ids], config: SearchConfig, max_tokens: int
    ) -> list[Hypothesis]:
        """See `Backend.score`. Scores natively, since quantization changes scores."""
        return self.native.score(sources, targets, config, max_tokens)

    def _log_reason(self, error: NmtError) -> None:
        """Log once why the native engine takes a call."""
        reason = describe_reason(error)
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            log.info("backend=auto: native, since %s", reason)


def check_reproducible(config: SearchConfig) -> None:
    """Raise a `ConfigError` for sampling: CTranslate2 does not repeat samples for a seed."""
    if config.sampling:
        raise ConfigError("sampling=true: CTranslate2 draws other samples with the same seed")


def describe_reason(error: NmtError) -> str:
    """Return the message of an error without the advice after the semicolon."""
    return str(error).partition("; ")[0]
