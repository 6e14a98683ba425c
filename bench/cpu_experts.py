"""cpu-experts: training mixtures of experts on the host device against transformers on PyTorch's CPU kernels.

Two layers of Qwen3 MoE's class, of 64 experts of which a token takes 8 and of 8 wide ones of which it takes 2; sequence
256, micro-batch 4, two threads. transformers multiplies by experts as it does by default. Runs alternate, and the first
step of each is left out.
"""
import json

import harness
from cpu_train import Work

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


WORK = Work(SEQUENCE, BATCH, THREADS, STEPS)


def measure():
    harness.build("tandem")
    python = harness.peers("torch", "transformers")
    figures = harness.Figures()
    for shape in SHAPES:
        work = harness.BUILD / "bench-cpu-experts" / shape
        work.mkdir(parents=True, exist_ok=True)
        model = work / "config.json"
        model.write_text(json.dumps(config(shape)))
        text = work / "text.txt"  # the time of a step does not depend on what it says
        text.write_text("".join(f"{i} times {i} is {i * i}. " for i in range(SEQUENCE * BATCH * (STEPS + 4) // 16)))
        tandem, other = [], []
        for _ in range(PAIRS):
            tandem.append(WORK.rate(WORK.tandem(work, model, text, "--policy", "device")[0]))
            other.append(WORK.rate(WORK.peer(python, "transformers_experts.py", model)))
        figures.add(f"{shape}_tokens_over_transformers", harness.ratios(tandem, other))
        figures.add(f"{shape}_tokens_per_second", tandem)
        figures.add(f"{shape}_transformers_tokens_per_second", other)
    return figures.line("cpu-experts", shapes=SHAPES, sequence=SEQUENCE, micro_batch=BATCH, threads=THREADS, steps=STEPS)
