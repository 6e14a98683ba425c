#!/usr/bin/env python3
"""metrics.jsonl of a run into TensorBoard or Weights & Biases.

    tools/export_metrics.py RUN --tensorboard LOGDIR
    tools/export_metrics.py RUN --wandb PROJECT
"""
import argparse
import json
import pathlib
import sys


def fail(message):
    sys.exit(f"export_metrics.py: error: {message}")


def read(run):
    """The steps of a run. A killed one may have left a torn last line; resuming drops it too."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    if not file.is_file():
        fail(f"{file}: no such file")
    texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        elif number < len(texts):
            fail(f"{file}, line {number}: not the metrics of a step")
    return lines


def numbers(line):
    return {k: v for k, v in line.items() if k != "step" and isinstance(v, (int, float))}


def to_tensorboard(lines, folder):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        fail("torch and tensorboard are not installed; try pip install torch tensorboard")
    with SummaryWriter(folder) as writer:
        for line in lines:
            for name, value in numbers(line).items():
                writer.add_scalar(name, value, line["step"])


def to_wandb(lines, project, name):
    try:
        import wandb
    except ImportError:
        fail("wandb is not installed; try pip install wandb")
    with wandb.init(project=project, name=name) as run:
        for line in lines:
            run.log(numbers(line), step=line["step"])


def main():
    parser = argparse.ArgumentParser(description="metrics.jsonl of a run into TensorBoard or W&B.")
    parser.add_argument("run", type=pathlib.Path, help="run directory or metrics.jsonl")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", metavar="LOGDIR")
    target.add_argument("--wandb", metavar="PROJECT")
    arguments = parser.parse_args()
    lines = read(arguments.run)
    if arguments.tensorboard:
        to_tensorboard(lines, arguments.tensorboard)
    else:
        to_wandb(lines, arguments.wandb, arguments.run.resolve().name)
    print(f"{len(lines)} steps exported")


if __name__ == "__main__":
    main()
