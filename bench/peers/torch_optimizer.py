"""Optimizers of a PyTorch program, with the protocol of bench_adam_race: torch_optimizer.py KIND COUNT THREADS.

Parameters and gradients are bf16, 4 million elements each, as a model of PyTorch's has them. KIND is `torch` or `deepspeed`: fused
AdamW of PyTorch, or DeepSpeedCPUAdam, the optimizer of its CPU offload, on fp32 masters, with the casts of gradients to fp32 and of
masters to bf16 weights; `torchao`: its CPUOffloadOptimizer; or a policy of tandem.optim.AdamW.
"""
import sys
import time

import torch
from race_protocol import serve

SHAPE = (2048, 2048)
VALUES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(count):
    torch.manual_seed(0)
    made = [torch.nn.Parameter((0.02 * torch.randn(SHAPE)).bfloat16()) for _ in range(max(1, count // (SHAPE[0] * SHAPE[1])))]
    for parameter in made:
        parameter.grad = (0.1 * torch.randn(SHAPE)).bfloat16()
    return made


def fused(masters):
    return torch.optim.AdamW(masters, fused=True, **VALUES)


def deepspeed(masters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam(masters, adamw_mode=True, **VALUES)


class WithMasters:
    def __init__(self, weights, optimizer=fused):
        self.weights = weights
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = optimizer(self.masters)

    def step(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad.copy_(weight.grad)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)


def make(kind, weights):
    if kind in ("torch", "deepspeed"):
        return WithMasters(weights, {"torch": fused, "deepspeed": deepspeed}[kind])
    if kind == "torchao":
        from torchao.optim import CPUOffloadOptimizer
        return CPUOffloadOptimizer(weights, torch.optim.AdamW, fused=True, **VALUES)
    import tandem.optim
    return tandem.optim.AdamW(weights, device_memory="8GiB", policy=kind, **VALUES)


class Race:
    def __init__(self, kind, count):
        self.weights = parameters(count)
        self.before = [p.detach().clone() for p in self.weights]
        self.optimizer = make(kind, self.weights)

    def step(self):
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def change(self):
        return sum((p.detach().float() - b.float()).abs().sum().item() for p, b in zip(self.weights, self.before, strict=True))


def main():
    kind, count, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve(lambda: Race(kind, count), threads)


if __name__ == "__main__":
    main()
