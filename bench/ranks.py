"""ranks: two processes of a rank each, whose bytes Gloo moves, beside two devices in one process, and the bytes on the wire.

Eight layers of GPT-2's kind, host devices of a thread each, state and weights on the host. Both ways take turns. Bytes are those that a
loopback device of the launch's own has seen, between runs of few steps and of more, so that what is said once does not count.

Then both devices in one process behind emulated links, across which they reach each other: the step that `plan` predicts by a calibration
made before it, over steps that are measured.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 512,
         "n_layer": 8, "n_head": 8}
TEXT = "".join(f"The {n}th line says that {n * n} is the square of {n}.\n" for n in range(4000))
TURNS, STEPS, FEW = 5, 8, 3
# Emulated, each way of each device: what a step copies takes three times as long as it computes, and half of that.
LINKS = {"predicted_over_measured": "100MB/s", "predicted_over_measured_200MBps": "200MB/s"}
# Puts a loopback device into a network of its own, and prints the bytes that it has seen behind a command.
IN_A_NETWORK = """
import fcntl, socket, struct, subprocess, sys
with socket.socket() as any_socket:
    name_and_flags = struct.pack("16sh", b"lo", 1)  # up
    fcntl.ioctl(any_socket, 0x8914, name_and_flags)
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
print(line.split()[1])
sys.exit(code)
"""


def work(folder, device):
    return ["--model", folder / "config.json", "--device", device, "--threads", "1", "--update-threads", "1", "--seq-len", "256",
            "--grad-accum", "2", "--policy", "host", "--resident-layers", "0"]


def training(folder, steps, out):
    return ["--data", folder / "text.txt", "--steps", str(steps), "--quiet", "--out", out]


def command(folder, processes, steps, out):
    launch = ["launch", "--processes", str(processes), "--"] if processes > 1 else []
    device = "host" if processes > 1 else "host,host"
    return [harness.program("tandem"), *launch, "train", *work(folder, device), *training(folder, steps, out)]


def summary(out):
    return json.loads((out / "summary.json").read_text())


def seconds(folder, processes, number):
    out = folder / f"run{processes}-{number}"
    harness.run(command(folder, processes, STEPS, out))
    return summary(out)["step_seconds"], summary(out)["state_digest"]


def bytes_seen(folder, steps):
    """Bytes on the wire, and bytes that the ranks have counted where they moved them, as their plan has it."""
    out = folder / f"seen{steps}"
    words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", IN_A_NETWORK, *command(folder, 2, steps, out)]
    seen = int(harness.output([str(word) for word in words]).split()[-1])
    return seen, summary(out)["bytes"]["peers"]


def over_measured(folder, figures):
    """Predicted steps over measured ones, by one calibration."""
    environment = {**harness.QUIET, "XDG_CACHE_HOME": str(folder / "cache")}
    harness.run([harness.program("tandem"), "calibrate", "--device", "host", "--threads", "1"], env=environment)
    for figure, link in LINKS.items():
        emulated = [*work(folder, "host,host"), "--link-bandwidth", link]
        plan = harness.output([str(word) for word in [harness.program("tandem"), "plan", *emulated, "--json"]], env=environment)
        predicted = json.loads(plan)["predicted"]["step_seconds"]
        measured = []
        for turn in range(TURNS):
            out = folder / f"{figure}{turn}"
            harness.run([harness.program("tandem"), "train", *emulated, *training(folder, STEPS, out)], env=environment)
            measured.append(summary(out)["step_seconds"])
        figures.add(figure, [predicted / seconds_of_step for seconds_of_step in measured])


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    with tempfile.TemporaryDirectory(prefix="tandem-ranks-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_text(TEXT)
        apart, together = [], []
        for turn in range(TURNS):
            for processes, times in ((2, apart), (1, together)):
                times.append(seconds(folder, processes, turn))
        if len({digest for _, digest in apart + together}) != 1:
            raise harness.BenchError("processes and devices of one process end with different digests")
        apart, together = ([time for time, _ in times] for times in (apart, together))
        figures.add("gloo_over_local", harness.ratios(apart, together))
        figures.add("gloo_step_seconds", apart)
        figures.add("local_step_seconds", together)
        try:
            (few, few_counted), (more, more_counted) = bytes_seen(folder, FEW), bytes_seen(folder, STEPS)
        except subprocess.SubprocessError as error:
            raise harness.BenchError(f"no network of its own: {error}") from error
        figures.add("bytes_over_model", [(more - few) / (more_counted - few_counted)])
        over_measured(folder, figures)
    return figures.line("ranks", turns=TURNS)
