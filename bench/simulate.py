"""simulate: seconds to simulate a 70B model in 10,000 subgroups, how they grow with layers, and to choose the plan of a 7B run,
of one micro-batch and of eight."""
import json
import os
import subprocess

import harness

REPEATS = 5


def measure():
    harness.build("bench_simulate")
    done = subprocess.run([harness.program("bench_simulate"), "--benchmark_format=json",
                           f"--benchmark_repetitions={REPEATS}"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TANDEM_PROFILES": str(harness.ROOT / "profiles")})
    if done.returncode != 0:
        raise harness.BenchError("bench_simulate failed")
    samples, growth, counts = {}, {}, {}
    for run in json.loads(done.stdout)["benchmarks"]:
        name = run["name"].split("/")
        if run["run_type"] == "iteration":
            samples.setdefault(run["run_name"], []).append(1e-3 * run["real_time"])
            if "simulations" in run:
                counts[run["run_name"]] = {what: round(run[what]) for what in ("simulations", "tasks")}
        elif run["aggregate_name"] == "BigO":
            growth["_".join(name[:2]).removesuffix("_BigO")] = run["big_o"]
    figures = harness.Figures()
    for name, seconds in samples.items():
        figures.add(name.replace("/", "_").replace(":", "_") + "_seconds", seconds)
    figures.add("worst_70b_seconds", [max(value for name, value in figures.values.items() if "layers_80" in name)])
    return figures.line("simulate", growth_with_tasks=growth, searches=counts, repeats=REPEATS)
