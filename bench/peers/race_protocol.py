"""The protocol of bench_adam_race for peers in Python: "ready", then a line of output for each line of input."""
import sys

import torch


def serve(make, threads):
    """Makes a contestant, whose `step()` gives its seconds, `change()` what it has changed and `facts()`, where it has that, more of
    the last step, and answers until the input ends."""
    torch.set_num_threads(threads)
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries that chat do not disturb the protocol
    race = make()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(repr(getattr(race, {"step": "step", "change": "change", "facts": "facts"}[line.strip()])()), file=answers, flush=True)
