"""five-policies: seconds of calibrating, planning and benching five policies, as in the user's guide, on the host device.

`tandem calibrate`, `tandem plan --explain` and `tandem bench` with five policies, each a process of its own, with a cache
and a model of their own. All policies must end with the same `state_digest`.
"""
import json
import os
import tempfile
import time
from pathlib import Path

import harness

POLICIES = ["host", "static:0.5", "interleave:2", "stream", "auto"]
STEPS = 3
# Half of the state fits under the ceiling, and not all of it.
RUN = ["--model", "gpt2", "--device", "host", "--seq-len", "64", "--micro-batch", "1", "--device-memory", "1536MiB"]
LIMIT = 300


class Timed:
    """Runs commands of the built program, and keeps how long each took."""

    def __init__(self, folder, figures):
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.figures = figures
        self.together = 0.0

    def run(self, command, *words):
        started = time.monotonic()
        harness.run([harness.program("tandem"), command, *words], env=self.environment)
        seconds = time.monotonic() - started
        self.together += seconds
        self.figures.add(f"{command}_seconds", [seconds])


def digests_of(report):
    rows = json.loads(report.read_text())["policies"]
    if [row["policy"] for row in rows] != POLICIES:
        raise harness.BenchError(f"{report.name} has other policies than {' '.join(POLICIES)}")
    if not all(row.get("state_digest") for row in rows):
        raise harness.BenchError("a policy was not executed")
    return {row["state_digest"] for row in rows}


def measure():
    harness.build("tandem")
    figures = harness.Figures()
    with tempfile.TemporaryDirectory(prefix="tandem-five-") as name:
        folder = Path(name)
        timed = Timed(folder, figures)
        timed.run("calibrate", "--device", "host")
        timed.run("plan", *RUN, "--explain")
        timed.run("bench", *RUN, "--steps", str(STEPS), "--policies", *POLICIES, "--out", str(folder / "report"))
        digests = digests_of(folder / "report" / "report.json")
    figures.add("together_seconds", [timed.together])
    figures.add("different_digests", [len(digests)])
    if len(digests) != 1:
        raise harness.BenchError(f"{len(digests)} different state digests")
    if timed.together > LIMIT:
        raise harness.BenchError(f"took {timed.together:.0f} s together, {LIMIT} s are allowed")
    return figures.line("five-policies", policies=POLICIES, steps=STEPS, run=" ".join(RUN))
