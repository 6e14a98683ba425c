"""The learning rate as a function of the step, as the program's own training has it."""
from __future__ import annotations

import math

from .refusal import Refusal

KINDS = ("constant", "linear", "cosine", "wsd")
#: End of a decay, as a share of the rate.
_FLOOR = 0.1
#: Share of the steps in which `wsd` falls.
_DECAY = 0.1


def rate(schedule: str, lr: float, step: int, steps: int, warmup_steps: int) -> float:
    """Learning rate of step 1 to `steps`. It rises in a line to `lr`, reached at step `warmup_steps`; then `constant` stays, `linear`
    and `cosine` fall to a tenth, reached at the last step, and `wsd` stays and falls in a line over the last tenth of the steps. Raises Refusal of
    other schedules."""
    if schedule not in KINDS:
        raise Refusal(f"'{schedule}': is no schedule; use {', '.join(KINDS[:-1])} or {KINDS[-1]}", 2)
    if step < warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant":
        return lr
    begin = max(warmup_steps, steps - max(1, int(steps * _DECAY))) if schedule == "wsd" else warmup_steps
    if step >= steps:
        return lr * _FLOOR if steps > begin else lr
    if step <= begin:
        return lr
    progress = (step - begin) / (steps - begin)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return lr * (_FLOOR + (1 - _FLOOR) * share)
