"""Parts that the benchmarks of a GPU share: rates of its copies and products, steps of tandem, and the arithmetic of
models.

With TANDEM_BENCH_SMALL=1 shapes are tiny: to see that everything runs, not for its figures.
"""
import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import harness

SMALL = os.environ.get("TANDEM_BENCH_SMALL") == "1"
REPETITIONS = 1 if SMALL else 5
SECONDS_EACH = 0.001 if SMALL else 0.05  # a dozen times twenty of a kernel's runs
# After so long a run hangs, and is ended: what else there is to measure has the time that is left.
PEER_SECONDS = float(os.environ.get("TANDEM_BENCH_PEER_SECONDS", 240))
OUR_SECONDS = 1200.0
DOES_NOT_FIT = 3  # with what a program of tandem's ends then


class DoesNotFit(harness.BenchError):
    """A policy under a ceiling."""


def failure(lines):
    """Failure in one line, as an entry of the settings."""
    return {"failed": "; ".join(" ".join(line.split()) for line in lines)} if lines else {}


def failures_in(settings, name):
    """Failures of tandem's own, for the end of the benchmark."""
    return [f"{name}: {settings[name]['failed']}"] if "failed" in settings.get(name, {}) else []


@contextlib.contextmanager
def going_on(settings, name):
    try:
        yield
    except harness.BenchError as error:
        settings[name] = failure([str(error)])
        harness.say(f"{name}: {error}")


def steps_of_a_row():
    """TANDEM_BENCH_STEPS, or as many as a figure deserves."""
    steps = os.environ.get("TANDEM_BENCH_STEPS", "1" if SMALL else "8")
    if not steps.isdigit() or int(steps) < 1:
        raise harness.BenchError(f"TANDEM_BENCH_STEPS: {steps} is no number of steps")
    return int(steps)


def chosen(variable, names):
    """The `names` that an environment variable has, for a machine that is lent for minutes; all where it is not set."""
    words = os.environ.get(variable, " ".join(names)).split()
    for word in words:
        if word not in names:
            raise harness.BenchError(f"{variable}: {word} is none of {' '.join(names)}")
    return [name for name in names if name in words]


@dataclass(frozen=True)
class Shape:
    """A model, and how it is trained."""
    name: str
    config: dict  # contents of config.json
    layers: int
    width: int  # elements of all query heads together
    weights: int  # in matrix products, the output layer among them
    sequence: int
    micro_batches: tuple  # sizes that are tried, the largest first

    def flops(self, micro_batch):
        """FLOP of a step: what the model asks for, nothing computed twice, and of attention the lower triangle."""
        tokens = micro_batch * self.sequence
        return tokens * (6 * self.weights + 6 * self.layers * self.width * self.sequence)


def gpt2(name, layers, width, heads, vocabulary, sequence, micro_batches):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": layers, "n_embd": width,
              "n_head": heads, "n_positions": sequence, "vocab_size": vocabulary, "activation_function": "gelu_new"}
    weights = 12 * layers * width**2 + vocabulary * width
    return Shape(name, config, layers, width, weights, sequence, micro_batches)


def llama(name, layers, width, inner, heads, vocabulary, sequence, micro_batches):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
              "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": heads, "vocab_size": vocabulary, "max_position_embeddings": 2 * sequence,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    weights = layers * (4 * width**2 + 3 * width * inner) + vocabulary * width
    return Shape(name, config, layers, width, weights, sequence, micro_batches)


if SMALL:
    GPT2_XL = gpt2("gpt2_xl", 2, 16, 2, 128, 16, (2, 1))
    LLAMA_7B = llama("llama_7b", 2, 16, 24, 2, 128, 16, (2, 1))
else:
    GPT2_XL = gpt2("gpt2_xl", 48, 1600, 25, 50257, 1024, (16, 8))
    LLAMA_7B = llama("llama_7b", 32, 4096, 11008, 32, 32000, 2048, (12, 8, 4, 2, 1))


class Gpu:
    """The programs, on the first GPU; with a calibration of their own, made once."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        self.facts = {}
        self.step_count = steps_of_a_row()
        # Kept figures belong to one build: a commit may be unknown, or have changes that are in none.
        self.build = hashlib.sha256(harness.program("tandem").read_bytes()).hexdigest()

    def rates(self, pattern):
        """Samples by name of what `bench_gpu` measures: bytes or operations per second."""
        out = self.folder / "rates.json"
        out.unlink(missing_ok=True)
        harness.run([harness.program("bench_gpu"), *(["--small"] if SMALL else []), f"--benchmark_filter={pattern}",
                     f"--benchmark_min_time={SECONDS_EACH}", f"--benchmark_repetitions={REPETITIONS}",
                     f"--benchmark_out={out}", "--benchmark_out_format=json"])
        report = json.loads(out.read_text())
        self.facts = {"gpu": report["context"]["device"], "compute_key": report["context"]["compute_key"]}
        samples = {}
        for row in report["benchmarks"]:
            if row["run_type"] == "iteration":
                rate = row.get("bytes_per_second") or row["flop_per_second"]
                samples.setdefault(row["run_name"].removesuffix("/real_time"), []).append(rate)
        if not samples:
            raise harness.BenchError(f"bench_gpu measures nothing of the name {pattern}")
        return samples

    def calibrate(self):
        if list(self.folder.glob("cache/**/*.toml")):
            return  # by a benchmark that was ended
        memory = ["--device-memory", "64MiB"] if SMALL else []
        harness.run([harness.program("tandem"), "calibrate", "--device", "cuda", *memory], env=self.environment)

    def model(self, shape):
        """File for --model with the shape's config.json."""
        config = self.folder / f"{shape.name}.json"
        config.write_text(json.dumps(shape.config))
        return config

    def run_of(self, shape, micro_batch, state, *flags):
        return ["--model", self.model(shape), "--device", "cuda", "--seq-len", shape.sequence, "--micro-batch",
                micro_batch, "--state", state, *flags]

    def plan(self, *run):
        """Plan that `tandem plan` prints; None where it does not fit."""
        command = [str(word) for word in (harness.program("tandem"), "plan", *run, "--json")]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if done.returncode not in (0, DOES_NOT_FIT):
            raise harness.BenchError(f"tandem plan failed: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def state_of(self, shape, *flags):
        """The most exact state format in which the smallest micro-batch fits; None where there is none. As few plans as may
        be are asked for: with a large model each takes seconds."""
        for state in ("fp32", "split", "bf16-moments", "8bit-moments"):
            if self.plan(*self.run_of(shape, shape.micro_batches[-1], state, *flags)) is not None:
                return state
        return None

    def settings(self, shape, *flags):
        """Format of the state, and the largest micro-batch that fits with it; None where none does."""
        state = self.state_of(shape, *flags)
        if state is None:
            return None
        *larger, smallest = shape.micro_batches
        fitting = (m for m in larger if self.plan(*self.run_of(shape, m, state, *flags)) is not None)
        return state, next(fitting, smallest)

    def _kept(self, kind, *words):
        name = hashlib.sha256(" ".join([self.build, *map(str, words)]).encode()).hexdigest()[:16]
        return self.folder / f"{kind}-{name}"

    def steps(self, policy, *run):
        """The row of `tandem bench` under one policy; DoesNotFit, BenchError. Each is a bench of its own, so that one that
        fails costs no other; what forward and backward take is measured by the first."""
        words = [str(word) for word in ("bench", *run, "--policies", policy, "--steps", self.step_count)]
        command = [harness.program("tandem"), *words, "--out", self._kept("rows", *words), "--resume", "--json",
                   "--compute-factors", self.folder / f"compute-{Path(run[1]).stem}.json"]
        try:
            printed = harness.output([str(word) for word in command], OUR_SECONDS, env=self.environment)
        except harness.CommandFailed as error:
            if error.returncode != DOES_NOT_FIT or not error.printed:
                raise
            printed = error.printed
        (row,) = json.loads(printed)["policies"]
        if not row["fits"]:
            raise DoesNotFit(row["why"])
        return row

    def peer(self, *command):
        """Object that a peer prints last; kept as rows are."""
        file = self._kept("peer", *command).with_suffix(".json")
        if not file.exists():
            printed = harness.output([str(word) for word in command], PEER_SECONDS).splitlines()  # behind words of theirs
            try:
                result = json.loads(printed[-1] if printed else "")
            except ValueError as error:
                raise harness.BenchError(f"{command[0]} printed no figures") from error
            file.with_suffix(".part").write_text(json.dumps(result))
            file.with_suffix(".part").rename(file)
        return json.loads(file.read_text())


def shapes():
    all_of_them = {shape.name: shape for shape in (LLAMA_7B, GPT2_XL)}
    some = [all_of_them[name] for name in chosen("TANDEM_BENCH_SHAPES", list(all_of_them))]
    return [dataclasses.replace(shape, micro_batches=those_of(shape)) for shape in some]


def those_of(shape):
    """The micro-batches that are tried, no larger than TANDEM_BENCH_MICRO_BATCH where that is set."""
    most = os.environ.get("TANDEM_BENCH_MICRO_BATCH", str(shape.micro_batches[0]))
    if not most.isdigit() or int(most) < shape.micro_batches[-1]:
        raise harness.BenchError(f"TANDEM_BENCH_MICRO_BATCH: {most} is less than the least of {shape.name}, "
                                 f"{shape.micro_batches[-1]}")
    return tuple(micro_batch for micro_batch in shape.micro_batches if micro_batch <= int(most))


@contextlib.contextmanager
def the_gpu():
    """The GPU. TANDEM_BENCH_WORK=FOLDER keeps figures of tandem, so that a benchmark that is ended goes on there."""
    if kept := os.environ.get("TANDEM_BENCH_WORK"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Gpu(Path(kept).resolve())
        return
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        yield Gpu(folder)


def python_with(*modules):
    """A Python whose torch reaches the GPU ($TANDEM_BENCH_PYTHON, else python3) and that has `modules`; None where there is
    none: PyPI's build is gigabytes, and nothing here installs it."""
    python = os.environ.get("TANDEM_BENCH_PYTHON", "python3")
    wanted = f"import torch, {', '.join(modules) or 'sys'}; assert {SMALL} or torch.cuda.is_available()"
    try:
        found = subprocess.run([python, "-c", wanted], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        found = False
    if not found:
        harness.say(f"{python} has no {' and '.join(['torch for the GPU', *modules])}: left out")
    return python if found else None
