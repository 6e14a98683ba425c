"""A plain loop over a model of transformers in fp32 on the CPU, with fused AdamW.

transformers_experts.py CONFIG.json --steps N --sequence T --batch B --threads K
prints a JSON line: seconds of each step, start to start, the versions, and how it multiplies by experts.
"""
import argparse
import json
import time

import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    for name in ("--steps", "--sequence", "--batch", "--threads"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    config = transformers.AutoConfig.from_pretrained(args.config)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    starts = []
    for _ in range(args.steps):
        tokens = torch.randint(config.vocab_size, (args.batch, args.sequence + 1))
        starts.append(time.perf_counter())
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()  # waits for the step
    starts.append(time.perf_counter())
    print(json.dumps({"step_seconds": [b - a for a, b in zip(starts, starts[1:])],
                      "experts": getattr(config, "_experts_implementation", None), "torch": torch.__version__,
                      "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
