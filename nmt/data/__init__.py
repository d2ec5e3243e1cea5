"""From text to batches of token ids."""

from typing import Any

import numpy as np

Lengths = np.ndarray[
    Any, np.dtype[Any]
]  # (N, 2), EOS included; int32 if a length exceeds 65,535, else uint16
Rows = np.ndarray[Any, np.dtype[np.int64]]  # indices of pairs in a split
