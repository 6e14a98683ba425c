#!/usr/bin/env python3
"""Uses an installed wheel as somebody else would, out of sight of the tree that it was built in.

Usage: try_wheel.py BIN FOLDER

BIN: the folder of programs of the environment that it is installed in; FOLDER: an empty folder to work in. Ends with 1, and
says what failed, where something does not work.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

MOST_SECONDS = 60  # limit for the import and ten steps

TRAINING = """
import numpy as np, tandem, tandem.program
device = tandem.open_device("host", memory="64MiB", threads=1)
layout = tandem.ParameterLayout()
for i in range(2):
    layout.add_layer(f"h.{i}").add("w", (64, 64))
options = tandem.OffloadOptions(device_memory="16MiB", policy="interleave:2")
engine = tandem.OffloadEngine(device, layout, options, tandem.make_plan(layout, options, device))
engine.initialize(lambda p: np.ones(p.count, np.float32))
stream = device.make_stream()
for _ in range(10):
    engine.begin_step(lr=1e-2)
    for i in (1, 0):
        with engine.gradients(i, stream) as gradients:
            gradients["w"].numpy()[...] = 1.0
    engine.end_step()
print(engine.state_digest(), "24gb-pcie4" in tandem.shipped_profiles(), tandem.program.path())
"""


def run(*command):
    """Output of a command in an environment that names neither this tree nor its libraries."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))[:200]}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def libraries_of(file):
    """Files that the loader takes for a program or module, but for those of glibc and the C++ runtime."""
    found = [line.split("=>")[1].split("(")[0].strip() for line in run("ldd", file).splitlines() if "=>" in line]
    system = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libstdc++.so", "libgcc_s.so", "libutil.so")
    return [Path(f) for f in found if not Path(f).name.startswith(system)]


def main(arguments):
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    programs, folder = Path(arguments[1]).resolve(), Path(arguments[2]).resolve()
    os.chdir(folder)
    python, tandem = programs / "python", programs / "tandem"
    print(run(tandem, "--version").strip())
    begin = time.monotonic()
    digest, profiles, program = run(python, "-c", TRAINING).split()
    seconds = time.monotonic() - begin
    print(f"ten steps in Python: {digest}, {seconds:.1f} s with the import")
    if seconds > MOST_SECONDS:
        sys.exit(f"that is more than {MOST_SECONDS} s")
    if profiles != "True" or not program.startswith(str(programs.parent)):
        sys.exit(f"profiles are missing, or the program is {program}")
    package = Path(program).parents[1]
    outside = [f for part in (program, *package.glob("_core*.so")) for f in libraries_of(part) if programs.parent not in f.parents]
    if outside:
        sys.exit(f"libraries of the system are used: {', '.join(map(str, sorted(set(outside))))}")
    for subcommand in ("finetune", "prepare", "chat"):
        run(tandem, subcommand, "--help")
    Path("text.txt").write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(400)))
    run(tandem, "train", "--model", "tiny-gpt2", "--data", "text.txt", "--device", "host", "--threads", "1", "--seq-len", "32", "--steps",
        "3", "--out", "run")
    summary = json.loads(Path("run/summary.json").read_text())
    print(f"a training by the program: {summary['steps']} steps, {summary['state_digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
