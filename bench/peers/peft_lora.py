"""Training steps of LoRA by PEFT and transformers, with the protocol of bench_steps:
peft_lora.py THREADS LAYERS WIDTH SEQUENCE BATCH VOCABULARY RANK.

A Llama with random weights in fp32, adapters on all linear layers of its blocks, fused AdamW, gradients clipped at 1.
"""
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from race_protocol import serve
from transformers import LlamaConfig, LlamaForCausalLM

STEPS_AT_ONCE = 4


class Race:
    def __init__(self, layers, width, sequence, batch, vocabulary, rank):
        torch.manual_seed(0)
        heads = width // 64
        config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                             num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=sequence,
                             use_cache=False)
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
        self.model = get_peft_model(LlamaForCausalLM(config), adapters).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.tokens = torch.randint(0, vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(1))

    def step(self):
        begin = time.perf_counter()
        for _ in range(STEPS_AT_ONCE):
            self.model(self.tokens, labels=self.tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - begin) / STEPS_AT_ONCE

    def facts(self):
        return {"parameters": sum(p.numel() for p in self.trained)}


def main():
    threads, *shape = map(int, sys.argv[1:])
    serve(lambda: Race(*shape), threads)


if __name__ == "__main__":
    main()
