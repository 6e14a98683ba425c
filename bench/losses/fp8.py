"""fp8: validation loss of the quickstart's model after 500 steps with products of eight-bit factors over that with bf16, for each format
of the gradients; and the time of a step on this CPU, which multiplies the same numbers in fp32 and so gains nothing.

Figures are medians over five seeds, of the initial weights and of the order of the data, with the range of all five: two runs that differ
by rounding alone end some tenths of a percent apart. Each ratio is of runs with one seed, so with the same data in the same order.
"""
import json
import tempfile
from pathlib import Path

import harness

LICENCES = "/usr/share/common-licenses"
STEPS = 500
SEEDS = range(1, 6)
WAYS = {"bf16": ["--compute", "bf16"], "e4m3": ["--compute", "fp8"], "e5m2": ["--compute", "fp8", "--fp8-gradients", "e5m2"]}


def trained(out, data, flags):
    """Summary of a run."""
    command = [harness.program("tandem"), "train", "--model", "tiny-llama", "--data", data / "train", "--eval-data", data / "held-out",
               "--device", "host", "--seq-len", "256", "--micro-batch", "8", "--lr", "1e-3", "--warmup-steps", "50", "--steps", STEPS,
               "--out", out, "--quiet", *flags]
    harness.run([str(word) for word in command], env=harness.QUIET)
    return json.loads((out / "summary.json").read_text())


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    with tempfile.TemporaryDirectory(prefix="tandem-fp8-") as folder:
        root = Path(folder)
        harness.run([str(harness.ROOT / "tools" / "prepare_text.py"), LICENCES, "--out", str(root / "text")])
        runs = {way: [trained(root / f"{way}-{seed}", root / "text", [*flags, "--seed", seed]) for seed in SEEDS]
                for way, flags in WAYS.items()}

    def over_bf16(way, what):
        return [ours[what] / theirs[what] for ours, theirs in zip(runs[way], runs["bf16"])]

    figures.add("loss_over_bf16", over_bf16("e4m3", "eval_loss"))
    figures.add("loss_over_bf16_e5m2", over_bf16("e5m2", "eval_loss"))
    figures.add("bf16_eval_loss", [run["eval_loss"] for run in runs["bf16"]])
    figures.add("step_over_bf16", over_bf16("e4m3", "step_seconds"))
    return figures.line("fp8", steps=STEPS, seeds=len(SEEDS))
