"""sample: continuing a prompt on the host device against transformers' generate, greedy, a Llama of 135M parameters.

96 new tokens behind 16 of the prompt, two threads; runs alternate. transformers runs in bf16 and in fp32, and the faster of
the two counts. Loading is not counted, the prompt is.
"""
import json
import re
import shutil
import subprocess

import harness

TOKENS, THREADS, PAIRS = 96, 2, 5
PROMPT = " ".join(str(5 + 7 * i) for i in range(16))


def tandem(model):
    """Tokens per second of `tandem sample`, and the tokens."""
    command = [str(word) for word in (
        harness.program("tandem"), "sample", "--model", model, "--prompt-ids", PROMPT, "--max-tokens", TOKENS, "--temperature", 0,
        "--device", "host", "--threads", THREADS, "--json", "--log-level", "debug")]
    harness.say("$ " + " ".join(command))
    done = subprocess.run(command, capture_output=True, text=True, env=harness.QUIET)
    took = re.search(r"(\d+) new tokens took ([\d.]+) s", done.stderr)
    if done.returncode != 0 or not took:
        raise harness.BenchError(f"tandem sample failed: {done.stderr.strip()}")
    return int(took[1]) / float(took[2]), json.loads(done.stdout)["tokens"]


def peer(python, model, *flags):
    """Figures that transformers_generate.py prints."""
    command = [str(word) for word in (python, harness.ROOT / "bench" / "peers" / "transformers_generate.py", model, *flags)]
    harness.say("$ " + " ".join(command))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=harness.QUIET)
    if done.returncode != 0:
        raise harness.BenchError("transformers_generate.py failed")
    return done.stdout


def transformers(python, model, dtype):
    """Tokens per second of generate, and the tokens."""
    made = json.loads(peer(python, model, "--prompt", PROMPT, "--tokens", TOKENS, "--threads", THREADS, "--dtype", dtype))
    return TOKENS / made["seconds"], made["tokens"]


def measure():
    harness.build("tandem")
    python = harness.peers("torch", "transformers")
    model = harness.BUILD / "bench-sample"
    shutil.rmtree(model, ignore_errors=True)
    peer(python, model, "--write")
    rates = {"tandem": [], "float32": [], "bfloat16": []}
    for _ in range(PAIRS):
        rate, tokens = tandem(model)
        rates["tandem"].append(rate)
        for dtype in ("float32", "bfloat16"):
            rate, of_peer = transformers(python, model, dtype)
            rates[dtype].append(rate)
            if dtype == "float32" and of_peer != tokens:
                raise harness.BenchError("tandem and transformers make other tokens of the same weights in fp32")
    fastest = max(("float32", "bfloat16"), key=lambda dtype: sorted(rates[dtype])[PAIRS // 2])
    figures = harness.Figures()
    figures.add("tokens_over_transformers", harness.ratios(rates["tandem"], rates[fastest]))
    figures.add("tokens_per_second", rates["tandem"])
    figures.add("transformers_fp32_tokens_per_second", rates["float32"])
    figures.add("transformers_bf16_tokens_per_second", rates["bfloat16"])
    return figures.line("sample", model="a Llama of 135M parameters", new_tokens=TOKENS, threads=THREADS,
                        transformers_dtype=fastest)
