"""engine: CPU time of guards, queues and bookkeeping in a step of 48 layers and 1,008 subgroups, on a device that does nothing.

Three policies in turn, several runs of each; the figure is the worst of their medians. Most of the time is the kernel's,
for waking threads, and differs from run to run by a third. Instructions of the program itself hardly differ: where valgrind is
installed, they are counted for one policy, over all tasks of the run, its beginning included. So are, by the kernel, how often a thread
goes to sleep, for work or for a lock, and has to be woken.
"""
import json
import re
import resource
import shutil
import statistics
import subprocess

import harness

POLICIES = ("host", "interleave:2", "stream")
RUNS = 7


def run(policy):
    done = subprocess.run([harness.program("bench_engine"), policy], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise harness.BenchError("bench_engine failed")
    return json.loads(done.stdout)


COUNTED = "interleave:2"


def tasks_of_a_run():
    return json.loads(harness.output([str(harness.program("bench_engine")), COUNTED, "tasks"]))["tasks"]


def sleeps():
    """How often threads of a run have gone to sleep."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_nvcsw
    run(COUNTED)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_nvcsw - before


def instructions():
    """Instructions of a run; None where valgrind is not installed."""
    if not shutil.which("valgrind"):
        harness.say("no valgrind (Debian: valgrind): instructions are not counted")
        return None
    program = str(harness.program("bench_engine"))
    done = subprocess.run(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, COUNTED],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    counted = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or not counted:
        raise harness.BenchError("valgrind of bench_engine failed")
    return int(counted.group(1))


def measure():
    harness.build("bench_engine")
    runs = {policy: [] for policy in POLICIES}
    for _ in range(RUNS):
        for policy in POLICIES:
            runs[policy].append(run(policy))
    figures = harness.Figures()
    medians = {policy: [r["cpu_ms"] for r in of_policy] for policy, of_policy in runs.items()}
    figures.add("overhead_cpu_ms", [max(statistics.median(values) for values in medians.values())])
    for policy, values in medians.items():
        figures.add(f"{policy.replace(':', '_')}_cpu_ms", values)
    tasks = tasks_of_a_run()
    figures.add("sleeps_per_task", [sleeps() / tasks for _ in range(RUNS)])
    if (counted := instructions()) is not None:
        figures.add("instructions_per_task", [counted / tasks])
    return figures.line("engine", subgroups=runs["host"][0]["subgroups"], runs=RUNS)
