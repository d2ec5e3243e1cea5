"""Tries the largest batch of a run before its first update, so that too little memory shows then.

It knows neither model nor data: a function runs one batch forward and backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from nmt.data import Lengths, Rows
from nmt.data.batch import bucket
from nmt.errors import ConfigError
from nmt.training.memory import peak_memory_bytes

_NUM_HALVINGS_AGAIN = 3  # of the gap between what fits and what does not
_MARGIN = 0.9  # of what fits is advised: memory falls into pieces when shapes change
# CPU, Windows, Apple's GPU, cuBLAS, oneDNN and the C++ library, in this order
_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a memory",
    "could not create a primitive",
    "bad_alloc",
)


def preflight(
    run: Callable[[Rows], None],
    lengths: Lengths,
    max_tokens: int,
    *,
    device: torch.device,
    ballast_bytes: int,
    remedy: str,
) -> int:
    """Run the largest batches of the plan; return the peak memory in bytes (`peak_memory_bytes`).

    Args:
        run: runs the pairs given forward and backward. Gradients stay, as they do between the
            batches of an update; the caller drops them afterwards.
        lengths: source and target tokens of every pair (N, 2).
        max_tokens: bound on a batch. Batches of all epochs and ranks are at most as large.
        ballast_bytes: what is to exist later than now, such as the moments of Adam.
        remedy: what else to do about too little memory, beside a smaller max_tokens.

    Raises `ConfigError` when memory does not suffice, with a max_tokens that does, as was tried.
    """

    def fits(tokens: int) -> bool:
        return _fits(run, largest_batches(lengths, tokens), device, ballast_bytes)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if fits(max_tokens):
        return peak_memory_bytes(device)
    batch = lengths[largest_batches(lengths, max_tokens)[0]]
    what = f"out of memory: max_tokens={max_tokens} makes batches such as {len(batch)} pairs of "
    what += f"{batch[:, 0].max()} source and {batch[:, 1].max()} target tokens"
    most = _most_tokens(fits, int(lengths.max()), max_tokens)
    if most is None:
        raise ConfigError(f"{what}, but not even the longest pair fits alone; {remedy}")
    raise ConfigError(f"{what}; set max_tokens={most}, which fits, or {remedy}")


def largest_batches(lengths: Lengths, max_tokens: int) -> list[Rows]:
    """Return the batches that may need the most memory, the one with most positions first.

    What a batch needs grows with its positions on each side, and with the squares of its lengths
    where attention is computed as a whole; which of them counts most depends on the model.
    """
    batches = bucket(lengths, max_tokens, np.arange(len(lengths)))
    sizes = np.array([(len(rows), *lengths[rows].max(axis=0)) for rows in batches], dtype=np.int64)
    rows, src, tgt = sizes.T  # (batches,) each
    measures = [rows * (src + tgt), rows * src, rows * tgt, rows * (src**2 + src * tgt + tgt**2)]
    worst = dict.fromkeys(int(measure.argmax()) for measure in measures)
    return [batches[i] for i in worst]


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means too little memory, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def _fits(
    run: Callable[[Rows], None], batches: list[Rows], device: torch.device, ballast_bytes: int
) -> bool:
    """Run the batches, the first once more at the end, when gradients of others are there."""
    failed = False
    try:
        # written to, since a processor gives no memory before
        ballast = torch.ones(ballast_bytes, dtype=torch.uint8, device=device)
        for rows in [*batches, batches[0]]:
            run(rows)
        del ballast
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    if failed:
        gc.collect()  # only here, where the error no longer holds the tensors of its frames
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return not failed


def _most_tokens(fits: Callable[[int], bool], fewest: int, too_many: int) -> int | None:
    """Search for a max_tokens from `fewest` to `too_many` that fits; None when none does."""
    most = too_many
    while not fits(most := max(most // 2, fewest)):
        if most == fewest:
            return None
        too_many = most
    for _ in range(_NUM_HALVINGS_AGAIN):
        middle = (most + too_many) // 2
        if fits(middle):
            most = middle
        else:
            too_many = middle
    return max(int(most * _MARGIN), fewest)
