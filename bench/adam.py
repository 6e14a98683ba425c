"""adam: the CPU update against DeepSpeedCPUAdam and PyTorch's fused AdamW, bf16 gradient in, bf16 weight out.

Contestants are processes that all exist at once and step in turn, so that each pair sees the same machine.
"""
import statistics
import subprocess

import harness

COUNT = 64_000_000
WARM_UP = 2
PAIRS = 15


class Contestant:
    def __init__(self, name, command, environment):
        self.name, self.seconds = name, []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment)

    def expect(self):
        line = self.process.stdout.readline()
        if not line:
            raise harness.BenchError(f"{self.name} ended with {self.process.wait()}")
        return line.strip()

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return float(self.expect())

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(python):
    here = harness.ROOT / "bench"
    size = [str(COUNT), str(harness.cores())]
    environment = harness.path_with(python)
    commands = {"tandem": [harness.BUILD / "bench" / "bench_adam_race", *size],
                "deepspeed": [python, here / "torch_adam.py", "deepspeed", *size],
                "torch": [python, here / "torch_adam.py", "torch", *size]}
    contestants = []
    for name, command in commands.items():
        contestants.append(Contestant(name, command, environment))
        contestants[-1].expect()  # one after another: making the data is work too
        harness.say(f"{name} is ready")
    return contestants


def check_same_work(contestants):
    changes = {c.name: c.ask("change") for c in contestants}
    for name, change in changes.items():
        if abs(change / changes["tandem"] - 1) > 1e-4:
            raise harness.BenchError(f"{name} changed its weights by {change}, tandem by {changes['tandem']}: "
                                     "they did not do the same work")


def measure():
    harness.build("bench_adam_race")
    contestants = start(harness.peers("torch", "numpy", "deepspeed"))
    try:
        for turn in range(WARM_UP + PAIRS):
            for contestant in contestants:
                seconds = contestant.ask("step")
                if turn >= WARM_UP:
                    contestant.seconds.append(seconds)
            if turn + 1 == WARM_UP:
                check_same_work(contestants)
    finally:
        for contestant in contestants:
            contestant.close()

    tandem, deepspeed, torch = (c.seconds for c in contestants)
    figures = harness.Figures()
    figures.add("fp32_over_deepspeed", harness.ratios(deepspeed, tandem))
    figures.add("fp32_over_torch", harness.ratios(torch, tandem))
    for contestant in contestants:
        figures.add(f"{contestant.name}_seconds", contestant.seconds)
    figures.add("tandem_gbytes_per_second", [28e-9 * COUNT / statistics.median(tandem)])
    return figures.line("adam", parameters=COUNT, threads=harness.cores(), pairs=PAIRS)
