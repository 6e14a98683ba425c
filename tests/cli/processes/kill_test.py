"""Ranks in processes of which one is killed at a random moment, half of them while they save: the others end within seconds and
name it, and the run goes on in another number of processes, or in one, to the digest and the losses of the one that nobody
disturbed.

kill_test.py PROGRAM COUNT SEED
"""
import concurrent.futures
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
STEPS = 16
MODEL = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_positions": 32,
         "n_embd": 32, "n_layer": 2, "n_head": 2}
TEXT = "".join(f"{n} squared is {n * n}; " for n in range(2000))
POLICIES = ["device", "host", "static:0.5", "interleave:2", "stream"]
SECONDS = 5.5  # until the others have ended, and their launcher


def command(root, out, policy):
    return [PROGRAM, "train", "--model", root / "config.json", "--data", root / "text.txt", "--device", "host", "--threads", "1",
            "--update-threads", "1", "--seq-len", "32", "--grad-accum", "6", "--checkpoint-every", "1", "--policy", policy,
            "--steps", STEPS, "--lr", "1e-3", "--clip", "1.46", "--out", out, "--resume"]


def launched(words, count):
    return [PROGRAM, "launch", "--processes", count, "--", *words[1:]] if count > 1 else words


def start(words):
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(words, count):
    process = start(launched(words, count))
    errors = process.communicate(timeout=120)[1]
    if process.returncode != 0:
        raise AssertionError(f"a killed run does not go on: {errors}")


def children_of(process, count):
    """Ranks of a launch as file descriptors, in their order."""
    names = []
    while len(names) < count:
        names = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [os.pidfd_open(int(name)) for name in names]


def result(out):
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text())["state_digest"], losses


def saving(out):
    try:
        return any(name.startswith(".step-") for name in os.listdir(out / "checkpoints"))
    except FileNotFoundError:
        return False


def kill_one(words, out, count, rank, in_save, seconds):
    """Starts ranks and kills one. Returns whether it struck, and whether a save was under way."""
    launcher = start(launched(words, count))
    ranks = children_of(launcher, count)
    time.sleep(seconds)
    until = time.monotonic() + 2.0
    while in_save and not saving(out) and launcher.poll() is None and time.monotonic() < until:
        time.sleep(0.0005)
    during = saving(out)
    try:
        signal.pidfd_send_signal(ranks[rank], signal.SIGKILL)
    except ProcessLookupError:  # it has ended
        pass
    for rank_of_launch in ranks:
        os.close(rank_of_launch)
    begin = time.monotonic()
    errors = launcher.communicate(timeout=60)[1]
    if time.monotonic() - begin > SECONDS:
        raise AssertionError(f"the others took {time.monotonic() - begin:.1f} s to end: {errors}")
    struck = f"rank {rank} was ended by signal 9" in errors
    if launcher.returncode != (128 + signal.SIGKILL if struck else 0):
        raise AssertionError(f"the launcher ended with {launcher.returncode}: {errors}")
    for line in errors.splitlines():
        if "] tandem: error:" in line and f"rank {rank} at" not in line:
            raise AssertionError(f"a rank does not name rank {rank}: {line}")
    return struck, struck and during


class Estimate:
    """Seconds of an undisturbed run: what else a machine does changes, and a kill that comes late kills nothing."""

    def __init__(self, seconds):
        self.seconds = seconds

    def ended_within(self, seconds):
        self.seconds = min(self.seconds, seconds)


def one(root, number, straight, estimate):
    chance = random.Random(SEED * 100003 + number)
    out = root / f"run{number}"
    in_save = number % 2 == 1
    kills = saves = 0
    for _ in range(chance.choice([1, 2])):
        count = chance.choice([2, 3])
        fresh, begin = not out.exists(), time.monotonic()
        struck, during = kill_one(command(root, out, chance.choice(POLICIES)), out, count, chance.randrange(count), in_save,
                                  chance.uniform(0.0, (0.4 if in_save else 0.9) * estimate.seconds))
        if fresh and not struck:
            estimate.ended_within(time.monotonic() - begin)
        kills, saves = kills + struck, saves + during
    finish(command(root, out, chance.choice(POLICIES)), chance.choice([1, 2, 3]))
    if result(out) != straight:
        raise AssertionError(f"run {number} of seed {SEED} ended otherwise than the undisturbed one")
    return kills, saves


def main():
    with tempfile.TemporaryDirectory(prefix="tandem-kill-ranks-") as folder:
        root = pathlib.Path(folder)
        (root / "config.json").write_text(json.dumps(MODEL))
        (root / "text.txt").write_text(TEXT)
        finish(command(root, root / "straight", "device"), 1)
        straight = result(root / "straight")
        begin = time.monotonic()
        finish(command(root, root / "ranks", "host"), 2)
        estimate = Estimate(time.monotonic() - begin)
        assert result(root / "ranks") == straight
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            counts = list(pool.map(lambda n: one(root, n, straight, estimate), range(COUNT)))
    kills, saves = (sum(column) for column in zip(*counts))
    print(f"{COUNT} runs, {kills} kills, {saves} of them during a save: all went on to digest {straight[0]}")
    assert kills >= COUNT // 2 and saves >= COUNT // 8, "too few of them struck; the test proves little"


if __name__ == "__main__":
    main()
