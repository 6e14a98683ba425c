#!/usr/bin/env python3
"""Greedy continuation of a prompt by transformers' generate: prints {"seconds": ..., "tokens": [...]} of the second of two runs.

Usage: transformers_generate.py MODEL --prompt "1 2 3" --tokens N --threads N --dtype TYPE
       transformers_generate.py MODEL --write   (random weights of a small Llama shape in bf16)
"""
import argparse
import json
import time

import torch
import transformers


def write(folder):
    """A Llama of 135 million parameters, so large that its weights lie in no cache."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2304, num_hidden_layers=16,
                                      num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=1024,
                                      tie_word_embeddings=True, initializer_range=0.05, bos_token_id=1, eos_token_id=None,
                                      pad_token_id=None)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def generate(args):
    """Seconds and tokens of a run after one that warms up."""
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    prompt = torch.tensor([[int(word) for word in args.prompt.split()]])
    for _ in range(2):
        begin = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                  max_new_tokens=args.tokens, min_new_tokens=args.tokens, use_cache=True)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": made[0, prompt.shape[1]:].tolist()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--prompt", default="1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    if args.write:
        write(args.model)
    else:
        print(json.dumps(generate(args)))


if __name__ == "__main__":
    main()
