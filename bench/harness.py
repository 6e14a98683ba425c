"""Parts of every benchmark: building, peers in an environment of their own, and the line of figures."""
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import instruction_sets

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PEERS = BUILD / "bench-venv"
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"
# Programs that are there and not to be built: those of the bundle that this folder is part of, or where a test says.
GIVEN = os.environ.get("TANDEM_BENCH_PROGRAMS") or ((ROOT / "bin") if (ROOT / "bin" / "tandem").exists() else None)
BENCH = "bench/run.py" if GIVEN else "scripts/bench"

# Idle threads of one contestant must not take the cores from another.
QUIET = {**os.environ, "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


class BenchError(Exception):
    """One line: what went wrong."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, **options):
    """Runs to its end, output to standard error; BenchError where it fails."""
    say("$ " + " ".join(str(word) for word in command))
    if subprocess.run(command, stdout=sys.stderr, **options).returncode != 0:
        raise BenchError(f"{command[0]} failed")


class CommandFailed(BenchError):
    """Failure of a command, with what it printed and how it ended; None: it was still running when its time was up."""

    def __init__(self, line, printed, returncode):
        super().__init__(line)
        self.printed, self.returncode = printed, returncode


def output(command, seconds=None, **options):
    """Output of a command; CommandFailed, with the last line that it said, where it fails, or takes longer than
    `seconds`."""
    say("$ " + " ".join(str(word) for word in command))
    last_said = ""

    def pass_on(lines):
        nonlocal last_said
        for line in lines:
            sys.stderr.write(line)
            last_said = line.strip() or last_said

    # A file, as a grandchild that is left behind would keep a pipe open; so would it the thread's, which is not waited
    # for long.
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.PIPE, text=True, errors="replace",
                                   **options)
        said = threading.Thread(target=pass_on, args=(process.stderr,), daemon=True)
        said.start()
        try:
            returncode = process.wait(seconds)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            process.kill()
            process.wait()
            said.join(2.0)
        printed.seek(0)
        text = printed.read()
    if returncode is None:
        raise CommandFailed(f"{command[0]} had not ended after {seconds:g} seconds", text, None)
    if returncode != 0:
        why = f": {last_said[:300]}" if last_said else f" with {returncode}"
        raise CommandFailed(f"{command[0]} failed{why}", text, returncode)
    return text


def program(name):
    """Path of one of tandem's programs."""
    if GIVEN:
        return Path(GIVEN) / name
    return BUILD / name if name == "tandem" else BUILD / "bench" / name


def build(*targets):
    if GIVEN:
        return
    run(["cmake", "--preset", "release", "-S", ROOT, "-DTANDEM_BENCH=ON", "--log-level=WARNING"])
    run(["cmake", "--build", BUILD, "--parallel", str(cores()), "--target", *targets])


def cores():
    return len(os.sched_getaffinity(0))


def imports(python, modules):
    return subprocess.run([python, "-c", f"import {', '.join(modules)}"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, env=QUIET).returncode == 0


def peers(*modules):
    """A Python that has `modules`: $TANDEM_BENCH_PYTHON where set, else build/bench-venv, filled from PyPI."""
    given = os.environ.get("TANDEM_BENCH_PYTHON")
    if given:
        if not imports(given, modules):
            raise BenchError(f"TANDEM_BENCH_PYTHON={given} cannot import {' '.join(modules)}")
        return given
    python = PEERS / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", PEERS])
    install = [python, "-m", "pip", "install", "--quiet"]
    if not imports(python, ["torch", "numpy"]):
        try:  # the build without CUDA is a tenth of the size
            run([*install, "--retries", "1", "--timeout", "15", "--index-url", PYTORCH_CPU, "torch"])
            run([*install, "numpy"])
        except BenchError:
            run([*install, "torch", "numpy"])
    missing = [module for module in modules if not imports(python, [module])]
    if "tokenizers" in missing:
        run([*install, "tokenizers"])
    if "transformers" in missing:
        run([*install, "transformers"])
    if "deepspeed" in missing:  # it compiles its optimizer at first use
        run([*install, "setuptools", "wheel", "ninja"])
        run([*install, "--no-build-isolation", "deepspeed"], env={**QUIET, "DS_BUILD_OPS": "0"})
    if "peft" in missing:
        run([*install, "peft"])
    if "torchao" in missing:
        run([*install, "torchao"])
    if not imports(python, modules):
        raise BenchError(f"{PEERS} cannot import {' '.join(modules)}")
    return python


def path_with(python):
    """Environment in which tools beside `python` (ninja) are found."""
    return {**QUIET, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


def instruction_set():
    """Best that the processor has, or the limit where one is set."""
    limit = os.environ.get("TANDEM_MAX_ISA", "avx512")
    within = list(instruction_sets.SETS)[:list(instruction_sets.SETS).index(limit) + 1]
    return next((name for name in reversed(instruction_sets.sets_here()) if name in within), "unknown")


def limit_instruction_set(name):
    """Limits all that is started from here on, peers too. torch_adam.py does it for DeepSpeed."""
    limits = {**instruction_sets.limits(name), **instruction_sets.limits_of_peers(name),
              "TORCH_EXTENSIONS_DIR": str(BUILD / f"bench-extensions-{name}")}
    os.environ.update(limits)
    QUIET.update(limits)


def machine():
    facts = {"cpu": platform.processor() or platform.machine(), "cores": cores(), "instruction_set": instruction_set()}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            facts["cpu"] = line.split(":", 1)[1].strip()
            break
    facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    try:
        facts["system"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        facts["system"] = platform.system()
    return facts


def commit():
    """Hash of the checkout, "-dirty" behind it where tracked files other than results differ; None outside of one. Of a
    bundle, what it was built from."""
    if (ROOT / "commit").exists():
        return (ROOT / "commit").read_text().strip()

    def git(*words):
        try:
            done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)bench/results")
    return f"{head}-dirty" if head and changed else head


def parts_asked_for():
    """The variables by which less was measured than the benchmark does by itself, before a command."""
    names = ("SHAPES", "POLICIES", "MICRO_BATCH", "STEPS")
    asked = [(f"TANDEM_BENCH_{name}", os.environ.get(f"TANDEM_BENCH_{name}")) for name in names]
    return "".join(f"{name}={shlex.quote(value)} " for name, value in asked if value is not None)


def limit_asked_for():
    limited = os.environ.get("TANDEM_MAX_ISA")
    return f" --instruction-set {limited}" if limited else ""


class Figures:
    """Medians, with the range of what they are medians of."""

    def __init__(self):
        self.values, self.spread = {}, {}

    def add(self, name, samples):
        self.values[name] = float(f"{statistics.median(samples):.6g}")
        if len(samples) > 1:
            self.spread[name] = [float(f"{bound:.6g}") for bound in (min(samples), max(samples))]

    def line(self, name, **more):
        return {"name": name, "figures": self.values, "spread": self.spread, "commit": commit(), "machine": machine(),
                "date": datetime.date.today().isoformat(), "command": f"{parts_asked_for()}{BENCH} {name}{limit_asked_for()}", **more}


def ratios(others, ours):
    """Pair by pair: how many times longer the other took."""
    return [other / own for other, own in zip(others, ours)]


def save(result):
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    limited = os.environ.get("TANDEM_MAX_ISA")
    path = folder / f"{result['name']}{f'-{limited}' if limited else ''}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    say(f"saved {path.relative_to(ROOT)}")
