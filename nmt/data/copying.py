"""The copy task as text: the target is the source, a short random row of symbols.

The first example of "The Annotated Transformer" (Rush 2018). A model that cannot learn this has a
bug; one that can proves little else. Knows nothing of files and tokenizers.
"""

from __future__ import annotations

import random
from itertools import islice

Pair = tuple[str, str]

SYMBOLS = "abcdefghij"
MIN_SYMBOLS, MAX_SYMBOLS = 8, 12
SIZES = {"train": 5000, "valid": 200, "test": 500}


def generate(seed: int = 0) -> dict[str, list[Pair]]:
    """Return train, valid and test pairs, all distinct; a function of `seed` alone."""
    rng = random.Random(seed)
    # A dict keeps the order of drawing, where a set of strings would differ from run to run.
    rows: dict[str, None] = {}
    while len(rows) < sum(SIZES.values()):
        length = rng.randint(MIN_SYMBOLS, MAX_SYMBOLS)
        rows[" ".join(rng.choices(SYMBOLS, k=length))] = None
    remaining = iter(rows)
    return {name: [(row, row) for row in islice(remaining, size)] for name, size in SIZES.items()}
