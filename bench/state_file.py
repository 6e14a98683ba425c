"""state-file: updates of state that lives in a file, over the same in memory, and beside what the disk carries.

On the host device, a model whose compute is short beside its updates; all state that is on the host is in the file.
"""
import json
import os
import subprocess
import tempfile
from pathlib import Path

import harness

MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 768,
         "n_layer": 12, "n_head": 12}
POLICIES = ["host", "stream"]
STEPS, TURNS = 5, 3


class Program:
    """The built program with a model, a cache and a disk of its own."""

    def __init__(self, folder):
        self.model = folder / "config.json"
        self.model.write_text(json.dumps(MODEL))
        self.disk = folder
        self.environment = {**harness.QUIET, "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, command, *words):
        done = subprocess.run([harness.program("tandem"), command, "--device", "host", *map(str, words), "--json"],
                              stdout=subprocess.PIPE, env=self.environment, text=True)
        if done.returncode != 0:
            raise harness.BenchError(f"tandem {command} ended with {done.returncode}")
        return json.loads(done.stdout)

    def work(self, command, *words):
        return self.run(command, "--model", self.model, "--seq-len", 32, "--state-dir", self.disk, *words)


def least_memory(program):
    """A ceiling under which all of the state that would be on the host is in the file."""
    plan = program.work("plan", "--policy", "host")
    state = sum(e["bytes"] for e in plan["entries"] if e["name"] == "optimizer")
    low, high = plan["host_bytes"] - state, plan["host_bytes"]
    while high - low > 8 << 20:
        middle = (low + high) // 2
        done = subprocess.run([harness.program("tandem"), "plan", "--device", "host", "--model", program.model, "--seq-len", "32",
                               "--state-dir", program.disk, "--policy", "host", "--host-memory", str(middle)],
                              env=program.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        low, high = (low, middle) if done.returncode == 0 else (middle, high)
    return high


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    folder = os.environ.get("TANDEM_BENCH_WORK", tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="tandem-state-file-", dir=folder) as own:
        program = Program(Path(own))
        program.run("calibrate", "--state-dir", own)
        disk = program.run("calibrate", "--show")["figures"]
        ceiling = least_memory(program)
        planned = {p: program.work("plan", "--policy", p, "--host-memory", ceiling)["file_bytes"] for p in POLICIES}
        steps, shares, errors, digests = {p: [] for p in POLICIES}, {p: [] for p in POLICIES}, [], set()
        for _ in range(TURNS):
            memory = program.work("bench", "--steps", STEPS, "--policies", *POLICIES)["policies"]
            in_file = program.work("bench", "--steps", STEPS, "--policies", *POLICIES, "--host-memory", ceiling)["policies"]
            for policy, there, here in zip(POLICIES, in_file, memory, strict=True):
                digests |= {there["state_digest"], here["state_digest"]}
                steps[policy].append(there["measured"]["step_seconds"] / here["measured"]["step_seconds"])
                rate = 2 * planned[policy] / there["measured"]["update_seconds"]
                shares[policy].append(rate / disk["file.both_ways"]["value"])
                errors.append(there["predicted"]["step_seconds"] / there["measured"]["step_seconds"] - 1)
                harness.say(f"{policy}: {there['measured']['step_seconds']:.3f} s a step, predicted {errors[-1]:+.1%}; in memory "
                            f"{here['measured']['step_seconds']:.3f} s; the update at {shares[policy][-1]:.2f} of the disk's rate")
    for policy in POLICIES:
        figures.add(f"{policy}_step_over_memory", steps[policy])
        figures.add(f"{policy}_update_over_disk", shares[policy])
        figures.add(f"{policy}_file_bytes_of_step", [planned[policy]])
    figures.add("worst_step_error", [max(map(abs, errors))])
    figures.add("different_digests", [len(digests)])
    for way in ("read", "write", "both_ways"):
        figures.add(f"file_{way}_bytes_per_second", [disk[f"file.{way}"]["value"]])
    line = figures.line("state-file", turns=TURNS)
    if len(digests) != 1:
        line["failed"] = [f"{len(digests)} digests of the same work"]
    return line
