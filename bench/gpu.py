"""What the benchmarks of a GPU share: rates of its copies and products, steps of tandem, and the arithmetic of models.

With TANDEM_BENCH_SMALL=1 shapes are tiny: to see that everything runs, not for its figures.
"""
import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import harness

SMALL = os.environ.get("TANDEM_BENCH_SMALL") == "1"
STEPS = 1 if SMALL else 8
REPETITIONS = 1 if SMALL else 5


def chosen(variable, names):
    """Of `names` those that an environment variable has, for a machine that is lent for minutes; all where it is not set."""
    words = os.environ.get(variable, " ".join(names)).split()
    for word in words:
        if word not in names:
            raise harness.BenchError(f"{variable}: {word} is none of {' '.join(names)}")
    return [name for name in names if name in words]


@dataclass(frozen=True)
class Shape:
    """A model, and how it is trained."""
    name: str
    config: dict  # what config.json holds
    layers: int
    width: int  # of all query heads together
    weights: int  # in matrix products, the output layer among them
    sequence: int
    micro_batches: tuple  # that are tried, the largest first

    def flops(self, micro_batch):
        """Of a step: what the model asks for, nothing computed twice, and of attention the lower triangle."""
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
    GPT2_XL = gpt2("gpt2_xl", 48, 1600, 25, 50257, 1024, (8, 4, 2, 1))
    LLAMA_7B = llama("llama_7b", 32, 4096, 11008, 32, 32000, 2048, (4, 2, 1))


class Gpu:
    """The programs, on the first GPU; with a calibration of their own, made once."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        self.facts = {}

    def rates(self, pattern):
        """Samples by name of what `bench_gpu` measures: bytes or operations per second."""
        out = self.folder / "rates.json"
        out.unlink(missing_ok=True)
        harness.run([harness.program("bench_gpu"), *(["--small"] if SMALL else []), f"--benchmark_filter={pattern}",
                     f"--benchmark_min_time={0.001 if SMALL else 0.2}", f"--benchmark_repetitions={REPETITIONS}",
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
        """For --model."""
        config = self.folder / f"{shape.name}.json"
        config.write_text(json.dumps(shape.config))
        return config

    def run_of(self, shape, micro_batch, state, *flags):
        return ["--model", self.model(shape), "--device", "cuda", "--seq-len", shape.sequence, "--micro-batch",
                micro_batch, "--state", state, *flags]

    def fits(self, *run):
        command = [str(word) for word in (harness.program("tandem"), "plan", *run, "--json")]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=self.environment)
        if done.returncode not in (0, 3):
            raise harness.BenchError(f"tandem plan failed: {done.stderr.strip()}")
        return done.returncode == 0

    def settings(self, shape, *flags):
        """State format, as exact as it gets, and the micro-batches that fit with it, the largest first; None where none does."""
        for state in ("fp32", "split", "bf16-moments"):
            fitting = [m for m in shape.micro_batches if self.fits(*self.run_of(shape, m, state, *flags))]
            if fitting:
                return state, fitting
        return None

    def steps(self, policies, *run):
        """Rows of `tandem bench`, one a policy."""
        words = [str(word) for word in ("bench", *run, "--policies", *policies, "--steps", STEPS)]
        rows = self.folder / ("rows-" + hashlib.sha256(" ".join([harness.commit(), *words]).encode()).hexdigest()[:16])
        command = [harness.program("tandem"), *words, "--out", rows, "--resume", "--json"]
        return json.loads(harness.output([str(word) for word in command], env=self.environment))["policies"]


def shapes():
    all_of_them = {shape.name: shape for shape in (LLAMA_7B, GPT2_XL)}
    return [all_of_them[name] for name in chosen("TANDEM_BENCH_SHAPES", list(all_of_them))]


@contextlib.contextmanager
def the_gpu():
    """With TANDEM_BENCH_WORK=FOLDER what has been measured of tandem stays there: who is ended goes on when run again."""
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
