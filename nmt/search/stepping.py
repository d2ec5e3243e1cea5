"""What all kinds of search do at every step: ask the model, note its attention, and let the
constraints speak.
"""

# B sentences, V vocab, S source; rows, the hypotheses alive

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from nmt.search.hypotheses import Live, Task
from nmt.search.stepper import AttentiveStepper, Stepper


def begin(stepper: Stepper, task: Task) -> tuple[Live, Any]:
    """Encode the batch; return one empty hypothesis for each sentence, and the stepper's state."""
    state = stepper.start(task.src, task.src_lengths)
    if task.needs_attention:
        cast(AttentiveStepper, stepper).watch(state)
    return task.empty(stepper.device), state


def advance(stepper: Stepper, state: Any, live: Live, task: Task) -> tuple[Tensor, Live]:
    """Return log-probabilities of the next token (rows, V), and the hypotheses with the attention
    of this step noted.
    """
    if live.length:
        newest = live.tokens[:, -1]
    else:
        newest = torch.full((len(live),), task.ids.bos, device=live.tokens.device)
    log_probs = stepper.step(newest, state)  # (rows, V)
    if task.needs_attention:
        live = live.attend(cast(AttentiveStepper, stepper).attention(state))
    for constraint in task.constraints:
        log_probs = constraint(log_probs, live)
    return log_probs, live
