"""Gradients of a training by PyTorch, for bench_speculate: a GPT of 2.6 million parameters learns bytes of the licenses of this
system, and writes its weights and then each step's rate, clipping factor and bf16 gradients to standard output.

    torch_gradients.py STEPS THREADS
"""
import struct
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

TEXTS = Path("/usr/share/common-licenses")
WIDTH, LAYERS, HEADS, CONTEXT, BATCH, ROWS = 192, 4, 6, 128, 8, 4096  # bytes touch a few of the ROWS only
RATE, WARM_UP, CLIP = 1e-3, 20, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens):
        x = self.blocks(self.tokens(tokens) + self.places.weight)
        return F.linear(self.norm(x), self.tokens.weight[:256])


def main(steps, threads):
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    text = b"".join(file.read_bytes() for file in sorted(TEXTS.iterdir()) if file.is_file())
    data = torch.tensor(list(text), dtype=torch.long)
    model = Gpt()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def write(tensors, dtype, bits):
        flat = torch.cat([t.detach().reshape(-1) for t in tensors]).to(dtype)
        sys.stdout.buffer.write(flat.view(bits).numpy().tobytes())

    sys.stdout.buffer.write(struct.pack("<qq", sum(p.numel() for p in parameters), steps))
    write(parameters, torch.float32, torch.int32)
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / WARM_UP)
        optimizer.param_groups[0]["lr"] = rate
        at = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
        inputs = torch.stack([data[i:i + CONTEXT] for i in at])
        targets = torch.stack([data[i + 1:i + CONTEXT + 1] for i in at])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        gradients = [p.grad for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])).item()
        factor = min(1.0, CLIP / norm)
        sys.stdout.buffer.write(struct.pack("<dd", rate, factor))
        write(gradients, torch.bfloat16, torch.int16)
        for gradient in gradients:
            gradient.mul_(factor)
        optimizer.step()
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
