"""cpu-train: training the gpt2 shape (124M) on the host device against a plain PyTorch CPU loop.

Sequence 256, micro-batch 2, two threads; runs alternate, and the first step of each is left out. A further run
under a ceiling of 300 MiB says what offloading costs on the same machine.
"""
import array
import json
import random
import shutil
import statistics
import subprocess
from dataclasses import dataclass

import harness

SEQUENCE, BATCH, THREADS = 256, 2, 2
STEPS, PAIRS = 7, 3
VOCABULARY = 50257


def write_tokens(path):
    """Random ids, 16 bits each: the time of a step does not depend on what they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    ids = array.array("H", (chance.randrange(VOCABULARY) for _ in range(SEQUENCE * BATCH * (STEPS + 4))))
    path.write_bytes(ids.tobytes())


@dataclass(frozen=True)
class Work:
    """Work that both sides train with."""
    sequence: int
    batch: int
    threads: int
    steps: int

    def tandem(self, folder, model, data, *more):
        """Seconds of each step of `tandem train` on the host device, and its summary."""
        out = folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        harness.run([harness.program("tandem"), "train", "--model", model, "--data", data, "--out", out,
                     "--device", "host", "--threads", str(self.threads), "--update-threads", str(self.threads),
                     "--seq-len", str(self.sequence), "--micro-batch", str(self.batch), "--steps", str(self.steps), *more],
                    env=harness.QUIET)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [line["step_seconds"] for line in lines], json.loads((out / "summary.json").read_text())

    def peer(self, python, script, what):
        """Seconds of the steps of a peer's loop over `what`."""
        command = [python, harness.ROOT / "bench" / "peers" / script, what, "--steps", str(self.steps), "--sequence",
                   str(self.sequence), "--batch", str(self.batch), "--threads", str(self.threads)]
        harness.say("$ " + " ".join(str(word) for word in command))
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=harness.QUIET)
        if done.returncode != 0:
            raise harness.BenchError(f"{script} failed")
        return json.loads(done.stdout)["step_seconds"]

    def rate(self, step_seconds):
        """Tokens per second of the median step, the first left out."""
        return self.sequence * self.batch / statistics.median(step_seconds[1:])


WORK = Work(SEQUENCE, BATCH, THREADS, STEPS)


def measure():
    harness.build("tandem")
    python = harness.peers("torch", "numpy")
    work = harness.BUILD / "bench-cpu-train"
    tokens = work / "tokens.bin"
    write_tokens(tokens)

    tandem, torch = [], []
    for _ in range(PAIRS):
        tandem.append(WORK.rate(WORK.tandem(work, "gpt2", tokens, "--policy", "device")[0]))
        torch.append(WORK.rate(WORK.peer(python, "torch_gpt2.py", tokens)))
    seconds, summary = WORK.tandem(work, "gpt2", tokens, "--policy", "host", "--device-memory", "300MiB")

    figures = harness.Figures()
    figures.add("tokens_over_torch", harness.ratios(tandem, torch))
    figures.add("tokens_per_second", tandem)
    figures.add("torch_tokens_per_second", torch)
    figures.add("tokens_per_second_300mib", [WORK.rate(seconds)])
    for name in ("planned_device_bytes", "peak_device_bytes", "planned_host_bytes", "peak_host_bytes"):
        figures.values[name + "_300mib"] = summary[name]
    return figures.line("cpu-train", model="gpt2", sequence=SEQUENCE, micro_batch=BATCH, threads=THREADS, steps=STEPS)
