"""A plain PyTorch loop: GPT-2 in fp32 on the CPU with fused AdamW, as one would write it.

torch_gpt2.py TOKENS.bin --steps N --sequence T --batch B --threads K prints a JSON line: seconds of each step,
start to start, and the losses.
"""
import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, sequence, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, sequence, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is tied to the embedding
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens")
    for name in ("--steps", "--sequence", "--batch", "--threads"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(42)

    model = Gpt2()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    stream = torch.from_numpy(np.fromfile(args.tokens, dtype="<u2").astype(np.int64))
    per_step = args.batch * args.sequence

    starts, losses = [], []
    for step in range(args.steps):
        starts.append(time.perf_counter())
        window = stream[step * per_step:(step + 1) * per_step + 1]
        tokens, targets = window[:-1].view(args.batch, -1), window[1:].view(args.batch, -1)
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    starts.append(time.perf_counter())
    print(json.dumps({"step_seconds": [b - a for a, b in zip(starts, starts[1:])], "losses": losses}))


if __name__ == "__main__":
    main()
