"""speculate: AdamW updates that may be taken back against plain ones, in time and in bytes of records.

Times are of 64 million parameters in host memory on all cores. Bytes are of a small GPT that learns text, by gradients of PyTorch:
means over steps 5 to 50. Steps are of 12 layers on the host device, on an emulated link, with the CPU update emulated so that it
takes as long as backward and half of forward: where nothing is clipped, where all steps are, and where all are just before they end.
"""
import statistics
import subprocess

import harness
from race import Race

COUNT = 64_000_000
PAIRS = 7
FIRST, STEPS = 5, 50
STEP_TURNS = 11
FORMATS = {"fp32": 28, "split": 26, "bf16-moments": 18, "8bit-moments": 14.0625}  # bytes that a plain update moves


def times(name):
    """Pair by pair, over a plain update: one that may be taken back, and taking it back for another."""
    command = [harness.program("bench_speculate"), "time", str(COUNT), str(harness.cores()), str(PAIRS), name]
    rows = [[float(x) for x in line.split()] for line in harness.output(command, env=harness.QUIET).splitlines()]
    return [s / plain for plain, s, _ in rows], [redo / plain for plain, _, redo in rows]


def record_bytes():
    """Bytes per parameter and share of parameters that have a record, by format."""
    python = harness.peers("torch")
    peer = [python, harness.ROOT / "bench" / "peers" / "torch_gradients.py", str(STEPS), str(harness.cores())]
    with subprocess.Popen([str(word) for word in peer], stdout=subprocess.PIPE, env=harness.QUIET) as training:
        lines = harness.output([harness.program("bench_speculate"), "bytes", str(FIRST)], stdin=training.stdout,
                               env=harness.QUIET)
    if training.returncode != 0:
        raise harness.BenchError(f"{peer[1].name} ended with {training.returncode}")
    return {name: (float(size), float(share)) for name, size, share in map(str.split, lines.splitlines())}


def program(*settings):
    return [harness.program("bench_steps"), "layers=12", "width=256", "sequence=128", "batch=2", "state=split", *settings]


def compute_alone():
    """Seconds of a step that moves nothing, and facts about one that streams."""
    with Race({"resident": program("policy=device"), "moving": program("policy=host")}) as race:
        race.run(5, 2)
        return statistics.median(race.seconds("resident")), race.facts("moving")


def add_steps(figures):
    compute, facts = compute_alone()
    # All blocks are computed again, so that forward is a quarter. The link takes half of the step each way together.
    update = 0.875 * compute
    base = ["policy=host", "subgroup=65536", f"link={2 * (facts['to_device'] + facts['to_host']) / compute}",
            f"update_rate={facts['parameters'] / update}"]
    races = {"confirmed": "clip=1e9", "rejected": f"clip={1e-6 * facts['norm']}", "forced": "clip_of_norm=0.9"}
    for race_name, clip in races.items():
        kinds = ("off", "on") if race_name == "forced" else ("off", "on", "auto") if race_name == "confirmed" else ("off", "auto")
        with Race({kind: program(*base, clip, f"speculate={kind}") for kind in kinds}) as race:
            race.run(STEP_TURNS, 3)
            found = race.facts(kinds[1])
            confirmed, taken_back = found["confirmed_steps"], found["rolled_back_steps"]
            right = {"confirmed": confirmed > 9 * taken_back, "rejected": confirmed == 0, "forced": taken_back > 4 * confirmed}
            if not right[race_name]:
                raise harness.BenchError(f"{race_name}: {confirmed} steps were confirmed, {taken_back} taken back")
            of = "auto" if race_name == "rejected" else "on"
            figures.add(f"{race_name}_over_waiting", harness.ratios(race.seconds(of), race.seconds("off")))
            if "auto" in kinds and of == "on":
                figures.add("auto_over_on", harness.ratios(race.seconds("auto"), race.seconds("on")))
            for kind in kinds:
                figures.add(f"{race_name}_{kind}_step_seconds", race.seconds(kind))


def add_kernels(figures):
    ratios = {name: times(name) for name in FORMATS}
    worst = max(ratios, key=lambda name: statistics.median(ratios[name][0]))
    figures.add("kernel_over_plain", ratios[worst][0])
    for name, (speculated, redone) in ratios.items():
        spelled = name.replace("-", "_")
        figures.add(f"{spelled}_over_plain", speculated)
        figures.add(f"{spelled}_redo_over_plain", redone)


def add_bytes(figures):
    for name, (size, share) in record_bytes().items():
        spelled = name.replace("-", "_")
        figures.add(f"undo_bytes_{spelled}", [size])
        figures.add(f"recorded_share_{spelled}", [share])
        figures.add(f"{spelled}_bytes_over_plain", [(FORMATS[name] + size) / FORMATS[name]])


def line(name, figures):
    return figures.line(name, parameters=COUNT, threads=harness.cores(), pairs=PAIRS, steps=STEPS)


def measure():
    harness.build("bench_speculate", "bench_steps")
    figures = harness.Figures()
    add_kernels(figures)
    add_steps(figures)
    add_bytes(figures)
    return line("speculate", figures)
