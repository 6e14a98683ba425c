"""Optimizer of PyTorch that trains like the engine: fused AdamW on fp32 masters of bf16 weights, for Trainers."""
from sandbox import torch


class WithMasters(torch.optim.AdamW):
    """Fused AdamW on fp32 masters, clipped in fp32. Gradients of the passes of a step are added up as autograd does in `.grad`, or,
    with whole=False, in fp32, and rounded once to the weight's type, as those that an engine takes."""

    factor = 1.0

    def __init__(self, module, weight_decay, whole=True, **values):
        self.weights = list(module.parameters())
        masters = [torch.nn.Parameter(p.detach().float()) for p in self.weights]
        groups = [{"params": [m for m in masters if m.dim() > 1], "weight_decay": weight_decay},
                  {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0}]  # norms
        super().__init__(groups, fused=True, **values)
        self.masters = masters
        self.sums = {}
        if not whole:
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self.add)

    def add(self, weight):
        known = self.sums.get(weight)
        self.sums[weight] = weight.grad.float() if known is None else known + weight.grad.float()
        weight.grad = None

    def gradients(self):
        return [self.sums[weight].to(weight.dtype) if weight in self.sums else weight.grad for weight in self.weights]

    def clip(self, parameters, max_norm, norm_type=2):
        norm = torch.stack([gradient.double().norm() for gradient in self.gradients() if gradient is not None]).norm()
        self.factor = min(1.0, max_norm / (norm.item() + 1e-6))
        return norm

    def step(self, closure=None):
        for gradient, master in zip(self.gradients(), self.masters, strict=True):
            master.grad = self.factor * gradient.float()
        self.sums.clear()
        super().step(closure)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if weight.dtype is torch.float32:
                    weight.copy_(master)
                    continue
                upper = (master.view(torch.int32).to(torch.int64) + 0x8000) >> 16  # to nearest, ties away from zero, as the engine
                weight.copy_((upper << 16).to(torch.int32).view(torch.float32))
