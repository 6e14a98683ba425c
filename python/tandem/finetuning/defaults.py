"""Values that nobody gave, by what is published of supervised fine-tuning. docs/from-a-chat-file.md names the sources."""
from __future__ import annotations

import math

USUAL_ROW = 2048  # tokens
USUAL_MICRO_BATCH = 8192  # tokens that are computed at once
LARGE = 20_000_000_000  # parameters, between 13 billion and 33 billion
# Peak rates of AdamW for preferences, of whole models and of adapters; passes over them; pairs of a step at most.
PREFERENCE_RATE, PREFERENCE_ADAPTER_RATE, PREFERENCE_EPOCHS = 1e-6, 1e-5, 1.0
VALIDATION, WARMUP, PATIENCE = 0.05, 0.03, 3


def learning_rate(parameters: int) -> float:
    """Peak rate of AdamW: 2e-5 for a billion parameters, and less for more, by the square root. Two digits."""
    rate = min(2e-3, 2e-5 * math.sqrt(1e9 / max(parameters, 1)))
    return float(f"{rate:.1e}")


def adapter_rate(parameters: int) -> float:
    """Peak rate of AdamW for adapters over so many frozen parameters: 2e-4, 1e-4 for the largest models, more for less than a billion,
    2e-3 at most."""
    if parameters > LARGE:
        return 1e-4
    return float(f"{min(2e-3, max(2e-4, 10 * learning_rate(parameters))):.1e}")


def epochs(records: int) -> float:
    """How often the data are gone through: 15 times where there are a thousand records, twice where there are many."""
    return min(15.0, max(2.0, round(15 * math.sqrt(1000 / max(records, 1)))))


def records_per_step(records: int) -> int:
    """128, or fewer where an epoch would have less than 30 steps, but 8 at least."""
    return min(128, max(8, records // 30))


def row_length(longest: int, mean: float, positions: int | None, complete: bool) -> int:
    """Tokens of a packed row, and one more, of records that have such lengths. `complete`: whether these are all records."""
    wanted = max(longest, min(math.ceil(4 * mean), USUAL_ROW) if complete else USUAL_ROW)
    return max(2, min(wanted, positions or wanted) + 1)


def window_length(tokens: float, positions: int | None) -> int:
    """Tokens of a window of a stream, and one more, of texts that have so many tokens together."""
    return max(2, min(USUAL_ROW, positions or USUAL_ROW, max(16, int(tokens / 32))) + 1)


def micro_batch(rows: int, row: int) -> int:
    """Rows that are computed at once: the largest power of two of at most `rows` that is within USUAL_MICRO_BATCH tokens."""
    most = max(1, min(rows, USUAL_MICRO_BATCH // max(row, 1)))
    return 1 << (most.bit_length() - 1)


def evaluate_every(steps_of_an_epoch: int) -> int:
    """Steps from an evaluation to the next one: half an epoch."""
    return max(1, steps_of_an_epoch // 2)
