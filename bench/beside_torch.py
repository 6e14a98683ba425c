"""torch: tandem.optim.AdamW and tandem.stream beside PyTorch, on the host device.

A step of the optimizer, with all state on the device and with all of it on the host, beside fused AdamW: 100 million parameters in
bf16, fp32 masters on both sides, PyTorch's casts included. Then training steps of a decoder of 36 million parameters, streamed with
all state on the host, beside PyTorch with checkpointing and without. Processes that all exist at once step in turn.
"""
import harness
from race import Race

COUNT = 100_000_000
WARM_UP = 2
PAIRS = 15
TRAININGS = ("plain", "checkpointing", "stream", "stream-none")
TURNS = 9
POLICIES = ("device", "host")


def check_same_work(contestants):
    changes = {c.name: c.ask("change") for c in contestants}
    for name, change in changes.items():
        if abs(change / changes["torch"] - 1) > 1e-3:
            raise harness.BenchError(f"{name} changed its weights by {change}, torch by {changes['torch']}: they did not do the same work")


def check_same_training(contestants):
    falls = {c.name: c.ask("change") for c in contestants}
    if max(falls.values()) > 1.01 * min(falls.values()):
        raise harness.BenchError(f"losses fell by {falls}: they did not do the same work")


def measure():
    harness.build("tandem_python", "tandem_python_files")
    python = harness.peers("torch", "numpy")
    package = harness.BUILD / "python"
    environment = {**harness.QUIET, "PYTHONPATH": str(package)}
    script = [python, harness.ROOT / "bench" / "peers" / "torch_optimizer.py"]
    commands = {kind: [*script, kind, str(COUNT), str(harness.cores())] for kind in ("torch", *POLICIES)}
    with Race(commands, environment) as race:
        race.run(PAIRS, WARM_UP, check_same_work)
    script[1] = script[1].with_name("torch_stream.py")
    with Race({kind: [*script, kind, str(harness.cores())] for kind in TRAININGS}, environment) as trainings:
        trainings.run(TURNS, WARM_UP, check_same_training)
    figures = harness.Figures()
    for policy in POLICIES:
        figures.add("optimizer_step_over_torch" + ("" if policy == "device" else f"_{policy}"),
                    harness.ratios(race.seconds(policy), race.seconds("torch")))
    for figure, kind, other in (("stream_over_checkpointing", "stream", "checkpointing"), ("stream_over_plain", "stream", "plain"),
                                ("stream_without_recompute_over_plain", "stream-none", "plain")):
        figures.add(figure, harness.ratios(trainings.seconds(kind), trainings.seconds(other)))
    for kind in TRAININGS:
        figures.add(f"{kind.replace('-', '_')}_training_seconds", trainings.seconds(kind))
    for name in ("torch", *POLICIES):
        figures.add(f"{name}_seconds", race.seconds(name))
    return figures.line("torch", parameters=COUNT, threads=harness.cores(), pairs=PAIRS)
