"""speculate: AdamW updates that may be taken back against plain ones, in time and in bytes of records.

Times are of 64 million parameters in host memory on all cores. Bytes are of a small GPT that learns text, by gradients of PyTorch:
means over steps 5 to 50.
"""
import statistics
import subprocess

import harness

COUNT = 64_000_000
PAIRS = 7
FIRST, STEPS = 5, 50
FORMATS = {"fp32": 28, "split": 26, "bf16-moments": 18, "8bit-moments": 14.0625}  # bytes that a plain update moves


def times(name):
    """Pair by pair, over a plain update: one that may be taken back, and taking it back for another."""
    command = [harness.program("bench_speculate"), "time", str(COUNT), str(harness.cores()), str(PAIRS), name]
    rows = [[float(x) for x in line.split()] for line in harness.output(command, env=harness.QUIET).splitlines()]
    return [s / plain for plain, s, _ in rows], [redo / plain for plain, _, redo in rows]


def record_bytes():
    """Bytes per parameter and share of parameters that have a record, by format."""
    python = harness.peers("torch")
    peer = [python, harness.ROOT / "bench" / "peers" / "torch_gradients.py", str(STEPS), str(harness.cores())]
    with subprocess.Popen([str(word) for word in peer], stdout=subprocess.PIPE, env=harness.QUIET) as training:
        lines = harness.output([harness.program("bench_speculate"), "bytes", str(FIRST)], stdin=training.stdout,
                               env=harness.QUIET)
    if training.returncode != 0:
        raise harness.BenchError(f"{peer[1].name} ended with {training.returncode}")
    return {name: (float(size), float(share)) for name, size, share in map(str.split, lines.splitlines())}


def measure():
    harness.build("bench_speculate")
    figures = harness.Figures()
    ratios = {name: times(name) for name in FORMATS}
    worst = max(ratios, key=lambda name: statistics.median(ratios[name][0]))
    figures.add("kernel_over_plain", ratios[worst][0])
    for name, (speculated, redone) in ratios.items():
        spelled = name.replace("-", "_")
        figures.add(f"{spelled}_over_plain", speculated)
        figures.add(f"{spelled}_redo_over_plain", redone)
    for name, (size, share) in record_bytes().items():
        spelled = name.replace("-", "_")
        figures.add(f"undo_bytes_{spelled}", [size])
        figures.add(f"recorded_share_{spelled}", [share])
        figures.add(f"{spelled}_bytes_over_plain", [(FORMATS[name] + size) / FORMATS[name]])
    return figures.line("speculate", parameters=COUNT, threads=harness.cores(), pairs=PAIRS, steps=STEPS)
