"""Peers of bench_adam_race, with its protocol: torch_adam.py deepspeed|torch COUNT THREADS.

Their optimizers take fp32 gradients and leave fp32 weights, so a step is three parts: the bf16 gradient is
cast to fp32, the optimizer steps, the fp32 master is cast to the bf16 weight. All buffers exist beforehand.
"""
import os
import sys
import time

import torch
from race_protocol import serve

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def spread(count, factor, shift):
    """Values of adam_race.cpp, evenly spread over [-1/2, 1/2). Made in parts, so that temporaries stay small."""
    values = torch.empty(count, dtype=torch.float32)
    part = 1 << 22
    for begin in range(0, count, part):
        index = torch.arange(begin, min(begin + part, count), dtype=torch.int64)
        hashed = (index * factor + shift) & 0xFFFFFFFF
        values[begin:begin + part] = (hashed.double() / 4294967296.0 - 0.5).float()
    return values


def initial_master(count):
    return spread(count, 2654435761, 0)


def limit_deepspeed(builder):
    """DeepSpeed compiles its optimizer for the processor it is on. The limits of scripts/bench --instruction-set are others."""
    flags = {"scalar": ("-march=x86-64-v2", "-D__SCALAR__"), "avx2": ("-march=x86-64-v3", "-D__AVX256__")}.get(os.environ.get("TANDEM_MAX_ISA"))
    if flags:
        builder.cpu_arch = lambda self: flags[0]
        builder.simd_width = lambda self: flags[1]


def make_optimizer(kind, parameter):
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    if kind == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder
        limit_deepspeed(CPUAdamBuilder)
        return DeepSpeedCPUAdam([parameter], adamw_mode=True, **options)
    return torch.optim.AdamW([parameter], fused=True, **options)


class Race:
    def __init__(self, kind, count):
        self.parameter = torch.nn.Parameter(initial_master(count))
        self.parameter.grad = torch.zeros(count)
        self.gradient = spread(count, 2246822519, 12345).bfloat16()
        self.weight = torch.zeros(count, dtype=torch.bfloat16)
        self.optimizer = make_optimizer(kind, self.parameter)

    def step(self):
        begin = time.perf_counter()
        self.parameter.grad.copy_(self.gradient)
        self.optimizer.step()
        self.weight.copy_(self.parameter.data)
        return time.perf_counter() - begin

    def change(self):
        difference = (self.parameter.data.double() - initial_master(self.parameter.numel()).double()).abs_()
        return difference.sum().item()


def main():
    kind, count, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve(lambda: Race(kind, count), threads)


if __name__ == "__main__":
    main()
