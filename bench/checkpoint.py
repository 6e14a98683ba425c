"""checkpoint: saving and loading 4 GB of state against dd on the same disk, and what saving costs the steps meanwhile.

gpt2-medium on the host device, two threads. The first run saves while steps go on, with time enough between saves for
each to be written at its pace: it tells what that costs steps. The others save at their end, when nothing else goes on:
they tell how fast saving is. dd writes as many bytes with the same flush at the end. It reads the very file that tandem
loads, before and after it and each time from a cold cache: how fast a file is read depends on how long ago it was
written, and to which part of the disk. Save and dd take turns, and so do load and dd.
"""
import json
import os
import re
import shutil
import statistics
import subprocess
import time

import cpu_train
import harness

MODEL, SEQUENCE, THREADS = "gpt2-medium", 32, 2
EVERY, STEPS, LOADS = 30, 150, 7
SETTLED = 5  # seconds


def cold(path):
    """Lets go of a file's pages."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle():
    """Waits until the disk is quiet: a file system that discards removed data goes on doing so for seconds."""
    os.sync()
    time.sleep(SETTLED)


def seconds_of_dd(source, target, size, *more):
    begin = time.monotonic()
    harness.run(["dd", f"if={source}", f"of={target}", "bs=1M", f"count={-(-size // 2**20)}", *more],
                stderr=subprocess.DEVNULL)
    return time.monotonic() - begin


def seconds_to_read(path):
    cold(path)
    return seconds_of_dd(path, "/dev/null", path.stat().st_size)


def newest_state(out):
    return max(out.glob("checkpoints/step-*/state.safetensors"), key=lambda path: path.parent.name)


def train(tokens, out, *more):
    command = [harness.program("tandem"), "train", "--model", MODEL, "--data", tokens, "--out", out, "--device", "host",
               "--threads", str(THREADS), "--update-threads", str(THREADS), "--seq-len", str(SEQUENCE), "--keep", "2",
               "--policy", "device", "--steps", str(STEPS), *more]
    harness.say("$ " + " ".join(map(str, command)))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=harness.QUIET)
    if done.returncode != 0:
        raise harness.BenchError("the run failed")
    return done.stdout


def beside(text, metrics):
    """Seconds of the steps that a save overlapped from their beginning to their end, a list for each save, and of those
    that none touched."""
    seconds = {line["step"]: line["step_seconds"] for line in metrics}
    overlapped = {int(n) for n in re.findall(r"^step +(\d+)/.* saving \d+%", text, re.M)}
    if not overlapped:
        raise harness.BenchError("no step was overlapped by a save")
    saving = [[seconds[n] for n in range(first + 1, first + EVERY + 1) if n in overlapped]
              for first in range(EVERY, STEPS, EVERY)]
    alone = [s for n, s in seconds.items() if n not in overlapped and n - 1 not in overlapped and n > 2]
    return saving, alone


def measure():
    harness.build("tandem")
    work = harness.BUILD / "bench-checkpoint"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tokens, out, copy = work / "tokens.bin", work / "run", work / "dd"
    cpu_train.write_tokens(tokens)

    text = train(tokens, out, "--checkpoint-every", str(EVERY))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    size = newest_state(out).stat().st_size

    saves, writes, loads, reads = [], [], [], []
    for i in range(LOADS):
        state = newest_state(out)
        settle()
        writes.append(seconds_of_dd("/dev/zero", copy, size, "conv=fsync"))
        copy.unlink()
        settle()
        before = seconds_to_read(state)
        # A run that has nothing else to do: it loads, takes a step, and saves at its end.
        cold(state)
        line = train(tokens, out, "--resume", "--steps", str(STEPS + 1 + i))
        loads.append(float(re.search(r"resumed from .* in ([0-9.]+) s\)", line).group(1)))
        saves.append(float(re.search(r"saved .* in ([0-9.]+) s,", line).group(1)))
        reads.append((before + seconds_to_read(state)) / 2)

    figures = harness.Figures()
    figures.add("save_over_dd", harness.ratios(writes, saves))
    figures.add("load_over_dd", harness.ratios(reads, loads))
    saving, alone = beside(text, metrics)
    typical = statistics.median(alone)
    # Two figures of each save: the mean has the step in it during which the state is copied; the median is like most
    # steps.
    figures.add("step_slowdown", [statistics.mean(steps) / typical for steps in saving])
    figures.add("median_step_slowdown", [statistics.median(steps) / typical for steps in saving])
    figures.add("share_of_steps_beside_a_save", [sum(map(len, saving)) / len(metrics)])
    figures.add("seconds_beside_steps", [float(s) for s in re.findall(r"saved .* in ([0-9.]+) s,.* step [0-9.]+ x", text)])
    figures.add("save_bytes_per_second", [size / s for s in saves])
    figures.add("load_bytes_per_second", [size / s for s in loads])
    figures.values["peak_over_planned_host"] = round(summary["peak_host_bytes"] / summary["planned_host_bytes"], 4)
    shutil.rmtree(work)
    return figures.line("checkpoint", model=MODEL, state_bytes=size, threads=THREADS, steps=STEPS, every=EVERY)
