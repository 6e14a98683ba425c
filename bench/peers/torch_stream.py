"""Training steps of one decoder in PyTorch, with the protocol of bench_adam_race: torch_stream.py KIND THREADS ROWS.

Eight blocks of width 512, a vocabulary of 8,192, ROWS rows of 256 tokens, weights in bf16 with fp32 masters. KIND: `plain` and
`checkpointing` keep all on the device and update by fused AdamW, casts included; `stream` and `stream-none` are tandem.stream with
recomputing and without, all state on the host.
"""
import sys
import time

import torch
from race_protocol import serve
from torch.utils.checkpoint import checkpoint
from torch_optimizer import VALUES, WithMasters

WIDTH, HEADS, BLOCKS, WORDS, LENGTH = 512, 8, 8, 8192, 256
F = torch.nn.functional


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = torch.nn.Linear(WIDTH, 6 * WIDTH, bias=False), torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(torch.nn.Module):
    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.embed, self.blocks = torch.nn.Embedding(WORDS, WIDTH), torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.to(torch.bfloat16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))

    def loss(self, tokens):
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Plain:
    def __init__(self, recompute):
        self.model = Decoder(recompute)
        self.optimizer = WithMasters(list(self.model.parameters()))

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def update(self):
        self.optimizer.step()
        self.model.zero_grad()


class Streamed:
    def __init__(self, recompute):
        import tandem
        from engine_clock import EngineClock
        self.clock = EngineClock()
        self.model = tandem.stream(Decoder(False), device_memory="256MiB", policy="host", recompute=recompute)
        self.optimizer = self.model.tandem.optimizer(**VALUES)

    def clip(self):
        self.optimizer.clip_grad_norm_(1.0)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Race:
    def __init__(self, kind, rows):
        self.side = Streamed({"stream": "units", "stream-none": "none"}[kind]) if kind.startswith("stream") else Plain(kind == "checkpointing")
        self.tokens = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        self.losses = []
        self.engine_share = 0.0

    def step(self):
        begin = time.perf_counter()
        loss = self.side.model.loss(self.tokens)
        loss.backward()
        self.side.clip()
        self.side.update()
        self.losses.append(loss.item())
        seconds = time.perf_counter() - begin
        if isinstance(self.side, Streamed):
            self.engine_share = self.side.clock.take() / seconds
        return seconds

    def facts(self):
        """Share of the last step that was the engine's own, by engine_clock.py; 0 for PyTorch alone."""
        return self.engine_share

    def change(self):
        """Fall of the loss since the first step: of all kinds the same."""
        return self.losses[0] - self.losses[-1]


def main():
    kind, threads, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve(lambda: Race(kind, rows), threads)


if __name__ == "__main__":
    main()
