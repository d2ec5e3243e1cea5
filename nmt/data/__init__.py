"""From text to batches of token ids."""

from typing import Any

import numpy as np

# (N, 2), EOS included; int32 if a length exceeds 65,535, else uint16
Lengths = np.ndarray[Any, np.dtype[Any]]
Rows = np.ndarray[Any, np.dtype[np.int64]]  # indices of pairs in a split
