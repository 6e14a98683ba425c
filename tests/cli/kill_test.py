"""Runs killed with SIGKILL at random moments, half of them while they save: every one resumes, and ends with the
digest and the losses of the run that nobody disturbed. Half of each save from a copy of the state, half beside training;
some go on with two devices, or again with one; in some all updates run before the gradient norm is known, and nearly half of
the steps take them back.

kill_test.py PROGRAM COUNT SEED
"""
import concurrent.futures
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM, COUNT, SEED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS = 24
MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 32,
         "n_embd": 32, "n_layer": 2, "n_head": 2}
TEXT = "".join(f"{n} squared is {n * n}; " for n in range(2000))
POLICIES = ["device", "host", "static:0.5", "interleave:2", "stream"]
DEVICES = ["host", "host", "host,host"]
SPECULATE = ["on", "on", "auto", "off"]
CLIP = "1.46"  # about half of the norms lie above


def shape(root, policy, devices):
    return ["--model", str(root / "config.json"), "--device", devices, "--threads", "1", "--update-threads", "1", "--seq-len",
            "32", "--grad-accum", "2", "--checkpoint-every", "1", "--policy", policy]


def plan(root, policy, devices, *more):
    done = subprocess.run([PROGRAM, "plan", *shape(root, policy, devices), *more, "--json"], capture_output=True, text=True,
                          timeout=60, check=True)
    return json.loads(done.stdout)


def no_room_for_a_copy(root, *way):
    """The ceiling under which a run saves beside training."""
    with_copy = plan(root, *way)
    copy = next(e["bytes"] for e in with_copy["entries"] if e["name"] == "checkpoint copy")
    ceiling = ["--host-memory", str(with_copy["host_bytes"] - copy // 2)]
    assert not plan(root, *way, *ceiling)["saving"]["copies_state"]
    return ceiling


def command(root, out, policy, devices, *more):
    return [PROGRAM, "train", *shape(root, policy, devices), *more, "--data", str(root / "text.txt"), "--out", str(out), "--steps",
            str(STEPS), "--lr", "1e-3", "--clip", CLIP, "--resume", "--quiet"]


def finish(words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"a killed run does not resume: {done.stderr}")


def result(out):
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text())["state_digest"], losses


def saving(out):
    try:
        return any(name.startswith(".step-") for name in os.listdir(out / "checkpoints"))
    except FileNotFoundError:
        return False


def kill_at(words, out, seconds, in_save, chance):
    """Starts a run and kills it; whether a save was under way, None where it ended first."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)
    give_up = time.monotonic() + 5.0
    while in_save and process.poll() is None and not saving(out) and time.monotonic() < give_up:
        time.sleep(0.0001)
    if in_save:
        time.sleep(chance.choice([0.0, 0.0005, 0.002]))
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return saving(out)


class Estimate:
    """Seconds of an undisturbed run: what else a machine does changes, and a kill that comes late kills nothing."""

    def __init__(self, seconds):
        self.seconds = seconds

    def ended_within(self, seconds):
        self.seconds = min(self.seconds, seconds)


def one(root, number, straight, estimate, ceilings):
    chance = random.Random(SEED * 100003 + number)
    out = root / f"run{number}"
    in_save = number % 2 == 1
    beside = number // 2 % 2 == 1

    def words():
        way = chance.choice(POLICIES), chance.choice(DEVICES)
        return command(root, out, *way, *(ceilings[way] if beside else ()), "--speculate", chance.choice(SPECULATE))
    kills, saves = 0, 0
    for _ in range(chance.choice([1, 1, 2, 3])):
        fresh = not out.exists()
        begin = time.monotonic()
        after = chance.uniform(0.0, 0.5 * estimate.seconds if in_save else estimate.seconds)
        during = kill_at(words(), out, after, in_save, chance)
        if during is None and fresh:
            estimate.ended_within(time.monotonic() - begin)
        kills += during is not None
        saves += during is True
    finish(words())
    if result(out) != straight:
        raise AssertionError(f"run {number} of seed {SEED} ended otherwise than the undisturbed one: kept in {out}")
    left = [name for name in os.listdir(out / "checkpoints") if name.startswith(".")]
    if left:
        raise AssertionError(f"run {number} of seed {SEED} left {left}")
    return kills, saves


def main():
    with tempfile.TemporaryDirectory(prefix="tandem-kill-") as folder:
        root = pathlib.Path(folder)
        (root / "config.json").write_text(json.dumps(MODEL))
        (root / "text.txt").write_text(TEXT)
        begin = time.monotonic()
        finish(command(root, root / "straight", "device", "host"))
        estimate = Estimate(time.monotonic() - begin)
        straight = result(root / "straight")
        assert len(straight[1]) == STEPS, straight
        finish(command(root, root / "ahead", "host", "host", "--speculate", "on"))
        assert result(root / "ahead") == straight
        ahead = json.loads((root / "ahead" / "summary.json").read_text())
        assert min(ahead["confirmed_steps"], ahead["rolled_back_steps"]) >= STEPS // 4, ahead
        ceilings = {way: no_room_for_a_copy(root, *way) for way in itertools.product(POLICIES, set(DEVICES))}
        with concurrent.futures.ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            counts = list(pool.map(lambda n: one(root, n, straight, estimate, ceilings), range(COUNT)))
    kills, saves = (sum(column) for column in zip(*counts))
    print(f"{COUNT} runs, {kills} kills, {saves} of them during a save: all resumed to digest {straight[0]}")
    assert kills >= COUNT // 2 and saves >= COUNT // 8, "too few of them struck; the test proves little"


if __name__ == "__main__":
    main()
