"""adam: the CPU update in each state format against DeepSpeedCPUAdam, PyTorch's fused AdamW and a plain copy.

Every contestant takes a bf16 gradient and gives a bf16 weight. They are processes that all exist at once and step
in turn, so that each pair sees the same machine. The copy is of four times as many parameters, beside an update of
as many: nothing of either stays in a cache.
"""
import statistics

import harness
from race import Race

COUNT = 64_000_000
COUNT_BESIDE_COPY = 4 * COUNT
WARM_UP = 2
PAIRS = 15
ROUNDED = ("bf16-moments", "8bit-moments")
BYTES = {"fp32": 28, "split": 26, "bf16-moments": 18, "8bit-moments": 14, "copy": 8}  # moved per parameter


def check_same_work(contestants):
    changes = {c.name: c.ask("change") for c in contestants}
    for name, change in changes.items():
        # Rounded moments make a slightly different run of it.
        if abs(change / changes["fp32"] - 1) > (1e-2 if name.startswith(ROUNDED) else 1e-4):
            raise harness.BenchError(f"{name} changed its weights by {change}, fp32 by {changes['fp32']}: "
                                     "they did not do the same work")


def ours(count, *works):
    return {work: [harness.program("bench_adam_race"), str(count), str(harness.cores()), work]
            for work in works}


def measure():
    harness.build("bench_adam_race")
    python = harness.peers("torch", "numpy", "deepspeed")
    environment = harness.path_with(python)
    peer = [python, harness.ROOT / "bench" / "peers" / "torch_adam.py"]
    size = [str(COUNT), str(harness.cores())]
    commands = ours(COUNT, "fp32", "split", *ROUNDED) | {p: [*peer, p, *size] for p in ("deepspeed", "torch")}
    with Race(commands, environment) as race:
        race.run(PAIRS, WARM_UP, check_same_work)
    with Race(ours(COUNT_BESIDE_COPY, "fp32", "copy"), environment) as beside:
        beside.run(PAIRS, WARM_UP)

    figures = harness.Figures()
    for work in ("fp32", *ROUNDED):
        for other in ("deepspeed", "torch"):
            figures.add(f"{work.replace('-', '_')}_over_{other}", harness.ratios(race.seconds(other), race.seconds(work)))
    for work in ("split", *ROUNDED):
        figures.add(f"{work.replace('-', '_')}_over_fp32", harness.ratios(race.seconds("fp32"), race.seconds(work)))
    per_byte = BYTES["fp32"] / BYTES["copy"]
    figures.add("fp32_over_copy", [per_byte * r for r in harness.ratios(beside.seconds("copy"), beside.seconds("fp32"))])
    for name in ("fp32", "split", *ROUNDED, "deepspeed", "torch"):
        figures.add(f"{name.replace('-', '_')}_seconds", race.seconds(name))
    figures.add("copy_gbytes_per_second",
                [1e-9 * BYTES["copy"] * COUNT_BESIDE_COPY / statistics.median(beside.seconds("copy"))])
    return figures.line("adam", parameters=COUNT, threads=harness.cores(), pairs=PAIRS)
