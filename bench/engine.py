"""engine: CPU time of guards, queues and bookkeeping in a step of 48 layers and 1,008 subgroups, on a device that does nothing.

Three policies; the figure is the worst of them.
"""
import json
import subprocess

import harness

POLICIES = ("host", "interleave:2", "stream")


def measure():
    harness.build("bench_engine")
    runs = []
    for policy in POLICIES:
        done = subprocess.run([harness.BUILD / "bench" / "bench_engine", policy], stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise harness.BenchError("bench_engine failed")
        runs.append(json.loads(done.stdout))
    figures = harness.Figures()
    figures.add("overhead_cpu_ms", [max(run["cpu_ms"] for run in runs)])
    for run in runs:
        figures.add(f"{run['policy'].replace(':', '_')}_cpu_ms", [run["least"], run["cpu_ms"], run["most"]])
    return figures.line("engine", subgroups=runs[0]["subgroups"])
