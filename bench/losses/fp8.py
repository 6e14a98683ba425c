"""fp8: validation loss of the quickstart's model after 500 steps with products of eight-bit factors over that with bf16, for each format
of the gradients; and the time of a step on this CPU, which multiplies the same numbers in fp32 and so gains nothing.

It compares losses of the same data in the same order, whatever else the machine does.
"""
import json
import tempfile
from pathlib import Path

import harness

LICENCES = "/usr/share/common-licenses"
STEPS = 500
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
        runs = {way: trained(root / way, root / "text", flags) for way, flags in WAYS.items()}
    bf16 = runs["bf16"]
    figures.add("loss_over_bf16", [runs["e4m3"]["eval_loss"] / bf16["eval_loss"]])
    figures.add("loss_over_bf16_e5m2", [runs["e5m2"]["eval_loss"] / bf16["eval_loss"]])
    figures.add("bf16_eval_loss", [bf16["eval_loss"]])
    figures.add("step_over_bf16", [runs["e4m3"]["step_seconds"] / bf16["step_seconds"]])
    return figures.line("fp8", steps=STEPS)
