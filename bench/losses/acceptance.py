"""acceptance: share of steps that are not clipped at --clip 1.0, and keep updates that ran ahead of the norm, in trainings of a small model.

The quickstart's training of tiny-llama on licences from scratch, and a fine-tune of what it left. It counts steps, whatever else the
machine does.
"""
import json
import tempfile
from pathlib import Path

import harness

LICENCES = "/usr/share/common-licenses"
SCRATCH_STEPS, TUNE_STEPS = 500, 200


def confirmed_share(out, *flags):
    """Share of a training's steps whose updates, all ahead of the norm, stayed."""
    command = [harness.program("tandem"), "train", "--device", "host", "--policy", "host", "--seq-len", "256", "--micro-batch", "8",
               "--clip", "1.0", "--speculate", "on", "--out", out, "--quiet", *flags]
    harness.run([str(word) for word in command], env=harness.QUIET)
    summary = json.loads((out / "summary.json").read_text())
    if summary["confirmed_steps"] + summary["rolled_back_steps"] != summary["steps"] or summary["speculated_parameters"] == 0:
        raise harness.BenchError(f"{out.name}: not every step ran updates ahead")
    return summary["confirmed_steps"] / summary["steps"]


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    with tempfile.TemporaryDirectory(prefix="tandem-acceptance-") as folder:
        root = Path(folder)
        harness.run([str(harness.ROOT / "tools" / "prepare_text.py"), LICENCES, "--out", str(root / "text")])
        data = ["--data", root / "text" / "train"]
        figures.add("acceptance_from_scratch", [confirmed_share(root / "scratch", *data, "--model", "tiny-llama", "--steps", SCRATCH_STEPS,
                                                                "--lr", "1e-3", "--warmup-steps", "50")])
        figures.add("acceptance_fine_tune", [confirmed_share(root / "tuned", *data, "--model", root / "scratch", "--steps", TUNE_STEPS,
                                                             "--lr", "2e-5")])
    return figures.line("acceptance", scratch_steps=SCRATCH_STEPS, tune_steps=TUNE_STEPS)
