"""cpu-experts: training mixtures of experts on the host device against transformers on PyTorch's CPU kernels.

Two layers of Qwen3 MoE's class, of 64 experts of which a token takes 8 and of 8 wide ones of which it takes 2; sequence
256, micro-batch 4, two threads. transformers multiplies by experts as it does by default. Runs alternate, and the first
step of each is left out.
"""
import json
import shutil
import statistics
import subprocess

import harness

SEQUENCE, BATCH, THREADS = 256, 4, 2
STEPS, PAIRS = 6, 3
VOCABULARY = 256  # text, as bytes
SHAPES = {"many": (64, 8, 512), "few": (8, 2, 4096)}  # experts, those that a token takes, inner width


def config(shape):
    experts, chosen, width = SHAPES[shape]
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCABULARY,
            "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": width, "moe_intermediate_size": width, "num_experts": experts,
            "num_experts_per_tok": chosen, "norm_topk_prob": True, "max_position_embeddings": SEQUENCE,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}


def train_tandem(work, text):
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    harness.run([harness.program("tandem"), "train", "--model", work / "config.json", "--data", text, "--out", out,
                 "--device", "host", "--threads", str(THREADS), "--update-threads", str(THREADS), "--policy", "device",
                 "--seq-len", str(SEQUENCE), "--micro-batch", str(BATCH), "--steps", str(STEPS)], env=harness.QUIET)
    return [json.loads(line)["step_seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_transformers(python, work):
    command = [python, harness.ROOT / "bench" / "transformers_experts.py", work / "config.json", "--steps", str(STEPS),
               "--sequence", str(SEQUENCE), "--batch", str(BATCH), "--threads", str(THREADS)]
    harness.say("$ " + " ".join(str(word) for word in command))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=harness.QUIET)
    if done.returncode != 0:
        raise harness.BenchError("the loop over transformers failed")
    return json.loads(done.stdout)["step_seconds"]


def rate(step_seconds):
    """Tokens per second of the median step, the first left out."""
    return SEQUENCE * BATCH / statistics.median(step_seconds[1:])


def measure():
    harness.build("tandem")
    python = harness.peers("torch", "transformers")
    figures = harness.Figures()
    for shape in SHAPES:
        work = harness.BUILD / "bench-cpu-experts" / shape
        work.mkdir(parents=True, exist_ok=True)
        (work / "config.json").write_text(json.dumps(config(shape)))
        text = work / "text.txt"  # the time of a step does not depend on what it says
        text.write_text("".join(f"{i} times {i} is {i * i}. " for i in range(SEQUENCE * BATCH * (STEPS + 4) // 16)))
        tandem, other = [], []
        for _ in range(PAIRS):
            tandem.append(rate(train_tandem(work, text)))
            other.append(rate(train_transformers(python, work)))
        figures.add(f"{shape}_tokens_over_transformers", harness.ratios(tandem, other))
        figures.add(f"{shape}_tokens_per_second", tandem)
        figures.add(f"{shape}_transformers_tokens_per_second", other)
    return figures.line("cpu-experts", shapes=SHAPES, sequence=SEQUENCE, micro_batch=BATCH, threads=THREADS, steps=STEPS)
