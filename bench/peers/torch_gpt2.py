"""A plain PyTorch loop over GPT-2 with fused AdamW, as one would write it: in fp32 on the CPU; on a GPU with weights in fp32
and computing in bf16 (autocast).

torch_gpt2.py [TOKENS.bin] --steps N --sequence T --batch B [--threads K] [--shape NAME] [--device cuda] [--compile]
prints a JSON line: seconds of each step, start to start, and the losses. Without tokens they are random. What is compiled
is each block, and the head with its loss: the blocks share one graph, where that of the whole model takes minutes.
"""
import argparse
import contextlib
import json
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    vocabulary: int = 50257
    positions: int = 1024
    rows: int = 0  # rows of the embedding, which is the head too, where it has more than the vocabulary


# 50,257 columns of logits lie askew in a GPU's memory: on one the head is padded, as is usual.
SHAPES = {"gpt2": Shape(12, 12, 768), "gpt2-xl": Shape(48, 25, 1600, rows=50304), "tiny": Shape(2, 2, 16, 128, 16)}


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x, weight, targets):
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Gpt2(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.rows or shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Head(shape)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.tokens.weight, targets)  # tied to the embedding


def groups(model):
    """Decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def batches(args, device):
    """Endless pairs of tokens and targets, (B, T) each."""
    per_step = args.batch * args.sequence
    if args.tokens:
        stream = torch.from_numpy(np.fromfile(args.tokens, dtype="<u2").astype(np.int64))
    else:
        stream = torch.randint(SHAPES[args.shape].vocabulary, (args.steps * per_step + 1,))
    stream = stream.to(device)
    for step in range(args.steps):
        window = stream[step * per_step:(step + 1) * per_step + 1]
        yield window[:-1].view(args.batch, -1), window[1:].view(args.batch, -1)


def arguments(description, *more):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("tokens", nargs="?")
    for name in ("--steps", "--sequence", "--batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    for name, options in more:
        parser.add_argument(name, **options)
    return parser.parse_args()


def main():
    args = arguments(__doc__, ("--threads", {"type": int}), ("--device", {"default": "cpu"}),
                     ("--compile", {"action": "store_true"}))
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(42)

    on_gpu = args.device == "cuda"
    with torch.device(args.device):  # made where it stays: the CPU takes half a minute for 1.5 billion random numbers
        model = Gpt2(SHAPES[args.shape])
    if args.compile:
        for part in (*model.blocks, model.head):
            part.compile()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    precision = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else contextlib.nullcontext()

    starts, losses = [], []
    for tokens, targets in batches(args, args.device):
        starts.append(time.perf_counter())
        optimizer.zero_grad(set_to_none=True)
        with precision:
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the step
    starts.append(time.perf_counter())
    print(json.dumps({"step_seconds": [b - a for a, b in zip(starts, starts[1:])], "losses": losses}))


if __name__ == "__main__":
    main()
