"""Settings of tests with generated examples.

`NMT_FUZZ_EXAMPLES=100000 pytest TESTS` tries more examples, and others in each run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

NUM_EXAMPLES = int(os.environ.get("NMT_FUZZ_EXAMPLES", "0"))


def example_settings(num_examples: int) -> settings:
    """Return the settings of a test that by default tries `num_examples`, the same in each run."""
    return settings(
        max_examples=NUM_EXAMPLES or num_examples,
        derandomize=NUM_EXAMPLES == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
