"""Draw training pairs in a random order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from nmt.data.batch import Ids
from nmt.data.binary import ParallelData

Pairs = Sequence[tuple[Ids, Ids]] | ParallelData


def shuffle_pairs(pairs: Pairs, seed: int = 1) -> Iterator[tuple[Ids, Ids]]:
    """Yield all pairs in a random order, which is equal in every process.

    Time and memory grow with the number of pairs that the caller takes, not with `len(pairs)`.
    """
    rng = Random(seed)
    # A Fisher-Yates shuffle of the list of all indices: each step exchanges the value at `position`
    # with a random later one. Only exchanged values are stored.
    indices: dict[int, int] = {}
    for position in range(len(pairs)):
        drawn_position = rng.randrange(position, len(pairs))
        index = indices.get(drawn_position, drawn_position)
        # later steps never read `position` again, so that its value need not be replaced
        indices[drawn_position] = indices.pop(position, position)
        yield pairs[index]
