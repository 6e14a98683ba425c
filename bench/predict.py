"""predict: predicted beside measured steps, and auto beside the fixed policies, on emulated links and CPU updates.

Twelve settings of `tandem bench` on the host device: two ceilings under each of six pairs of link and update rate, chosen
from the measured compute so that CPU updates, streaming and interleaving are each the fastest of the fixed policies in
four. Then nine of link and update beside compute, executed over the same plan simulated without overhead. Before these,
one step by modules.
"""
import json
import os
import subprocess
import tempfile
from pathlib import Path

import harness

MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 128, "n_embd": 256,
         "n_layer": 8, "n_head": 4}
FIXED = ["host", "stream", "interleave:2"]
STEPS = 7
STATE, WEIGHT = 12, 2  # bytes of a parameter
# Seconds of the CPU's update, and of all state one way across the link, over those of forward and backward.
PAIRS = {"host": [(0.3, 4.0), (0.5, 6.0)], "stream": [(4.0, 0.4), (6.0, 0.8)], "interleave": [(2.0, 2.0), (3.0, 3.0)]}


class Program:
    """The built program with a model and a cache of its own."""

    def __init__(self, folder):
        self.model = folder / "config.json"
        self.model.write_text(json.dumps(MODEL))
        self.environment = {**harness.QUIET, "XDG_CACHE_HOME": str(folder / "cache")}
        self.flags = ["--device", "host", "--threads", "1", "--update-threads", "1"]

    def run(self, command, *words):
        done = subprocess.run([harness.program("tandem"), command, *self.flags, *map(str, words)], stdout=subprocess.PIPE,
                              env=self.environment, text=True)
        if done.returncode != 0:
            raise harness.BenchError(f"tandem {command} ended with {done.returncode}")
        return done.stdout

    def work(self, command, *words):
        return json.loads(self.run(command, "--model", self.model, "--seq-len", 128, "--micro-batch", 2, "--json", *words))

    def bench(self, policies, *words):
        return self.work("bench", "--steps", STEPS, "--policies", *policies, *words)["policies"]


def ceilings(program):
    """The least that every policy fits in, and with room for some state on the device."""
    streamed = ["--resident-layers", 0, "--prefetch-layers", 2]
    least = max(program.work("plan", "--policy", policy, *streamed)["device_bytes"] for policy in FIXED)
    return [least, least + 4 * STATE * parameters() // 10]


def parameters():
    width = MODEL["n_embd"]
    return 12 * MODEL["n_layer"] * width * width


def emulated(compute, update, state):
    rate = parameters() / (update * compute)
    link = STATE * parameters() / (state * compute)
    return ["--update-rate", round(rate), "--link-bandwidth", f"{round(link)}B/s"]


def fastest_by(rows):
    """The fixed policy that is measured fastest, and how many times longer the next of another kind takes."""
    times = {}
    for row in rows:
        kind = row["policy"].split(":")[0]
        seconds = row["measured"]["step_seconds"]
        times[kind] = min(seconds, times.get(kind, seconds))
    (best, first), (_, second) = sorted(times.items(), key=lambda item: item[1])[:2]
    return best, second / first


def over_settings(program, compute, memory, figures):
    errors, autos, wins = [], [], {kind: 0 for kind in PAIRS}
    for pairs in PAIRS.values():
        for update, state in pairs:
            rows = program.bench([*FIXED, "auto"], *emulated(compute, update, state), "--device-memory", *memory)
            for ceiling in memory:
                ours = [row for row in rows if row["setting"]["device-memory"] == str(ceiling)]
                fixed, auto = [row for row in ours if row["policy"] != "auto"], ours[-1]
                best, by = fastest_by(fixed)
                wins[best] += by >= 1.2
                least = min(row["measured"]["step_seconds"] for row in fixed)
                autos.append(auto["measured"]["step_seconds"] / least)
                for row in ours:
                    error = row["predicted"]["step_seconds"] / row["measured"]["step_seconds"] - 1
                    errors.append(abs(error))
                    harness.say(f"{update} {state} {ceiling >> 20} MiB {row['policy']}: {row['measured']['step_seconds']:.3f} s, "
                                f"predicted {error:+.1%}")
                harness.say(f"  best {best} by {by:.2f}, auto over it {autos[-1]:.2f}")
    figures.add("worst_step_error", [max(errors)])
    figures.add("median_step_error", errors)
    figures.add("auto_over_best", [max(autos)])
    for kind, count in wins.items():
        figures.add(f"{kind}_best_by_20_percent", [count])


def over_simulated(program, compute, memory, figures):
    """The CPU updates everything, weights stream: 4 bytes of a parameter go up in a step."""
    ratios = []
    for link in (0.5, 1.0, 2.0):
        for update in (0.1, 0.33, 1.0):
            (row,) = program.bench(["host"], *emulated(compute, update, link * STATE / (2 * WEIGHT)), "--device-memory",
                                   memory[0], "--resident-layers", 0, "--prefetch-layers", 2)
            ratios.append(row["measured"]["step_seconds"] / row["predicted"]["ideal_step_seconds"])
            harness.say(f"link {link} update {update}: {ratios[-1]:.3f} of the simulated step")
    figures.add("worst_step_over_simulated", [max(ratios)])


def over_modules(program, figures):
    """The modules of a step that is watched, added up, over the model's work in steps that are not."""
    step = program.work("bench", "--modules", "--policy", "device", "--steps", STEPS)
    for row in step["modules"]:
        harness.say(f"{row['module']}: {row['measured']['seconds']:.4f} s, predicted {row['predicted']['seconds']:.4f} s")
    figures.add("modules_over_step", [step["measured"]["modules_over_step"]])


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    with tempfile.TemporaryDirectory(prefix="tandem-predict-") as folder:
        program = Program(Path(folder))
        program.run("calibrate")
        (alone,) = program.bench(["device"])
        compute = alone["measured"]["forward_seconds"] + alone["measured"]["backward_seconds"]
        figures.add("compute_seconds", [compute])
        over_modules(program, figures)
        memory = ceilings(program)
        over_settings(program, compute, memory, figures)
        over_simulated(program, compute, memory, figures)
    return figures.line("predict", settings=12)
