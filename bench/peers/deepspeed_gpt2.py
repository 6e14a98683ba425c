"""GPT-2 under DeepSpeed's ZeRO-3 with parameters and optimizer state on the host, bf16.

deepspeed_gpt2.py [TOKENS.bin] --steps N --sequence T --batch B [--shape NAME] prints a JSON line: seconds of each step,
start to start, the losses, and the most memory that PyTorch took on the GPU (0 where there is none).
"""
import json
import os
import time

# One process, which is its own rendezvous. Before the imports: they read it.
for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29531"}.items():
    os.environ.setdefault(variable, value)

import deepspeed
import torch

from torch_gpt2 import SHAPES, Gpt2, arguments, batches, groups


def configuration(batch):
    on_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {"train_micro_batch_size_per_gpu": batch, "gradient_clipping": 1.0, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
            "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True,
                                  "offload_optimizer": on_host, "offload_param": on_host}}


def main():
    args = arguments(__doc__)
    torch.manual_seed(42)
    engine, *_ = deepspeed.initialize(model=(model := Gpt2(SHAPES[args.shape])), model_parameters=groups(model),
                                      config=configuration(args.batch))
    starts, losses = [], []
    for tokens, targets in batches(args, engine.device):
        starts.append(time.perf_counter())
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    starts.append(time.perf_counter())
    memory = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    print(json.dumps({"step_seconds": [b - a for a, b in zip(starts, starts[1:])], "losses": losses,
                      "device_bytes": memory}))


if __name__ == "__main__":
    main()
