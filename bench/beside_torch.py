"""torch: tandem.optim.AdamW and tandem.stream beside PyTorch, on the host device.

A step of the optimizer, with all state on the device and with all of it on the host, beside fused AdamW: 100 million parameters in
bf16, fp32 masters on both sides, PyTorch's casts included. Then training steps of a decoder of 36 million parameters on 2,048 tokens,
a usual row of `tandem finetune`, streamed with all state on the host, beside PyTorch with checkpointing and without; and of the
streamed one alone on 512 tokens, a short step. Processes that all exist at once step in turn. DeepSpeed's CPUAdam and torchao's
CPUOffloadOptimizer take part where they run on a CPU; `left_out` of the result says why one does not.
"""
import subprocess

import harness
from race import Race

COUNT = 100_000_000
WARM_UP = 2
PAIRS = 61
TRAININGS = ("plain", "checkpointing", "stream", "stream-none")
ROWS = 8  # rows of 256 tokens, in a step
FEWER_ROWS = 2
TURNS = 21
POLICIES = ("device", "host")
PEERS = ("deepspeed", "torchao")


def check_same_work(contestants):
    changes = {c.name: c.ask("change") for c in contestants}
    for name, change in changes.items():
        if abs(change / changes["torch"] - 1) > 1e-3:
            raise harness.BenchError(f"{name} changed its weights by {change}, torch by {changes['torch']}: they did not do the same work")


def check_same_training(contestants):
    falls = {c.name: c.ask("change") for c in contestants}
    if max(falls.values()) > 1.01 * min(falls.values()):
        raise harness.BenchError(f"losses fell by {falls}: they did not do the same work")


def why_not(peer, script, environment):
    """Why a peer cannot take part, the last thing that it said; None: it can. A peer may compile itself here."""
    try:
        python = harness.peers("torch", "numpy", peer)
        harness.output([python, script, peer, "1", str(harness.cores())], env=environment, stdin=subprocess.DEVNULL)
    except harness.BenchError as error:
        return str(error).rpartition(" failed: ")[2]  # without the path of this machine's Python
    return None


def race_optimizers(python, environment):
    script = harness.ROOT / "bench" / "peers" / "torch_optimizer.py"
    left_out = {peer: why_not(peer, script, environment) for peer in PEERS}
    kinds = ("torch", *POLICIES, *(peer for peer in PEERS if left_out[peer] is None))
    with Race({kind: [python, script, kind, str(COUNT), str(harness.cores())] for kind in kinds}, environment) as race:
        race.run(PAIRS, WARM_UP, check_same_work)
    return {kind: race.seconds(kind) for kind in kinds}, {peer: why for peer, why in left_out.items() if why is not None}


def race_trainings(python, environment, kinds, rows):
    """Seconds of the steps of each kind, and the engine's share of them."""
    script = harness.ROOT / "bench" / "peers" / "torch_stream.py"
    shares = {kind: [] for kind in kinds}
    with Race({kind: [python, script, kind, str(harness.cores()), str(rows)] for kind in kinds}, environment) as race:
        race.run(TURNS, WARM_UP, check_same_training, lambda contestant: shares[contestant.name].append(contestant.ask("facts")))
    return {kind: race.seconds(kind) for kind in kinds}, shares


def measure():
    harness.build("tandem_python", "tandem_python_files")
    python = harness.peers("torch", "numpy")
    environment = {**harness.path_with(python), "PYTHONPATH": str(harness.BUILD / "python")}
    steps, left_out = race_optimizers(python, environment)
    trainings, shares = race_trainings(python, environment, TRAININGS, ROWS)
    _, shares_of_short = race_trainings(python, environment, ("stream",), FEWER_ROWS)
    figures = harness.Figures()
    for other in (kind for kind in steps if kind not in POLICIES):
        for policy in POLICIES:
            figures.add(f"optimizer_step_over_{other}" + ("" if policy == "device" else f"_{policy}"),
                        harness.ratios(steps[policy], steps[other]))
    for figure, kind, other in (("stream_over_checkpointing", "stream", "checkpointing"), ("stream_over_plain", "stream", "plain"),
                                ("stream_without_recompute_over_plain", "stream-none", "plain")):
        figures.add(figure, harness.ratios(trainings[kind], trainings[other]))
    figures.add("engine_share", shares["stream"])
    figures.add("engine_share_without_recompute", shares["stream-none"])
    figures.add("engine_share_of_512_tokens", shares_of_short["stream"])
    for kind, seconds in trainings.items():
        figures.add(f"{kind.replace('-', '_')}_training_seconds", seconds)
    for kind, seconds in steps.items():
        figures.add(f"{kind}_seconds", seconds)
    return figures.line("torch", parameters=COUNT, threads=harness.cores(), pairs=PAIRS, left_out=left_out)
