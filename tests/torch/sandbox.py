"""Parts that the tests beside PyTorch share: the built package, small modules, and the reference for comparisons."""
import os
import pathlib
import sys

PACKAGE = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None  # the folder that holds tandem/
if PACKAGE:
    sys.path.insert(0, str(PACKAGE))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

import tandem  # noqa: E402
import tandem.optim  # noqa: E402
from tandem.pytorch import held_parameters  # noqa: E402

held_parameters.LAYER_ELEMENTS = 2000  # so that a small module has several layers

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

POLICIES = ("device", "host", "static:0.4", "interleave:2", "interleave:3,resident=0.3", "stream", "auto")
STATES = ("fp32", "split", "bf16-moments", "8bit-moments")


class Small(torch.nn.Module):
    """bf16 layers of odd sizes, a norm in fp32, a tied head, a part that only some inputs use."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(53, 31)
        self.inner = torch.nn.Linear(31, 77)
        self.outer = torch.nn.Linear(77, 31, bias=False)
        self.rare = torch.nn.Linear(31, 31)
        self.norm = torch.nn.LayerNorm(31)
        self.head = torch.nn.Linear(31, 53, bias=False)
        self.head.weight = self.table.weight
        self.to(dtype)
        self.norm.float()

    def forward(self, tokens, rare=False):
        x = self.table(tokens)
        x = x + self.outer(torch.tanh(self.inner(x)))
        if rare:
            x = x + self.rare(x)
        return self.head(self.norm(x.float()).to(x.dtype)).float()

    def loss(self, tokens, rare=False):
        logits = self(tokens[:, :-1], rare)
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def batches(count, seed=7):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 53, (3, 11), generator=random) for _ in range(count)]


def make(of, **options):
    return tandem.optim.AdamW(of.named_parameters(), **{"lr": 1e-2, "device_memory": "8MiB", **options})


def train(module, optimizer, steps=6, first=0):
    """Steps of one backward each, the second of three with the rare part; returns the losses."""
    losses = []
    for step, tokens in enumerate(batches(first + steps)[first:], first):
        loss = module.loss(tokens, rare=step % 3 == 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Reference:
    """Fused AdamW on fp32 masters of each parameter, with weights rounded from them."""

    def __init__(self, module, groups, **values):
        self.parameters = [p for group in groups for p in group["params"]]
        masters = {p: torch.nn.Parameter(p.detach().float().clone()) for p in self.parameters}
        self.masters = masters
        self.optimizer = torch.optim.AdamW([{**g, "params": [masters[p] for p in g["params"]]} for g in groups], fused=True, **values)

    def step(self):
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, master in self.masters.items():
                p.copy_(master)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
