"""Record a trace of some updates with torch.profiler (`profile=10:20`)."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.profiler import profile

log = logging.getLogger(__name__)


class UpdateProfiler:
    """Writes a trace of the updates in the range `updates`, to open in Chrome or Perfetto.

    Call `start_update` before each update, and `close` at the end of the run.
    """

    def __init__(self, updates: range, path: Path) -> None:
        self._updates = updates
        self._path = path
        self._profile: profile | None = None  # None unless it is recording

    def start_update(self, update: int) -> None:
        """Start to record before the first of the updates; write the trace after the last."""
        if update not in self._updates:
            self.close()
        elif self._profile is None:
            self._profile = profile()
            self._profile.start()

    def close(self) -> None:
        """Write the trace if updates are being recorded."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            log.info("wrote %s; open it in chrome://tracing or ui.perfetto.dev", self._path)
