#!/usr/bin/env python3
"""Regenerates fixtures/fp8/*.safetensors: reference values of models whose linear layers multiply eight-bit factors.

    pip install torch transformers safetensors
    python tests/models/make_fp8_fixtures.py

Every linear layer of a block takes input, weight and the gradient of its output rounded to PyTorch's own float8_e4m3fn,
each as a whole under the power of two that its largest magnitude decides; everything else is fp32. Files are as those of
make_fixtures.py, without a trajectory. Each also holds

    exact.losses         f32   (B T): losses of the same model without rounding
"""
import math
import pathlib

import torch
import transformers
from safetensors.torch import save_file

from make_fixtures import batch, gradients, own_parameters, randomize, stored

HERE = pathlib.Path(__file__).parent
LARGEST = 448.0


def models():
    common = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    llama = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, **common}
    yield "gpt2", (2, 16), transformers.GPT2LMHeadModel, transformers.GPT2Config(
        n_positions=16, n_embd=48, n_layer=2, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common)
    yield "llama", (2, 24), transformers.LlamaForCausalLM, transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, max_position_embeddings=32, tie_word_embeddings=False, **llama)
    # An MLP whose sizes are no multiples of 16: its layers stay as they are.
    yield "partly", (1, 16), transformers.Qwen3ForCausalLM, transformers.Qwen3Config(
        hidden_size=32, intermediate_size=41, head_dim=16, max_position_embeddings=32, tie_word_embeddings=False,
        **llama)


def rounded(x):
    """To the nearest of float8_e4m3fn times a power of two, the least under which nothing is beyond the largest."""
    largest = x.abs().max().item()
    fraction, exponent = math.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    scale = 2.0 ** (exponent - 9 + (1 if fraction > LARGEST / 512 else 0))
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Product(torch.autograd.Function):
    """y (N, O) = x (N, I) w (O, I)^T."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return rounded(x) @ rounded(w).T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return rounded(dy) @ rounded(w), rounded(dy).T @ rounded(x)


def quieten(model):
    """Weights as small as those that training begins with: the larger they are, the further rounding carries."""
    with torch.no_grad():
        for name, p in own_parameters(model):
            if p.dim() > 1:
                p.copy_((p / 4).to(torch.bfloat16).float())


def multiples(*sizes):
    return all(n % 16 == 0 for n in sizes)


def patch(model):
    """Lets the linear layers of all blocks multiply so."""
    for name, module in model.named_modules():
        conv = type(module).__name__ == "Conv1D"
        if not (conv or isinstance(module, torch.nn.Linear)) or name == "lm_head":
            continue

        def forward(x, module=module, conv=conv):
            w = module.weight.T if conv else module.weight
            rows = x.reshape(-1, x.shape[-1])
            y = Product.apply(rows, w) if multiples(*rows.shape, *w.shape) else rows @ w.T
            if module.bias is not None:
                y = y + module.bias
            return y.reshape(*x.shape[:-1], w.shape[0])

        module.forward = forward


def make(name, shape, model_class, config):
    generator = torch.Generator().manual_seed(2511)
    config.architectures = [model_class.__name__]
    model = model_class(config).float().eval()
    randomize(model, generator)
    quieten(model)
    tokens, targets = batch(shape, config.vocab_size, generator, masked=True)
    scale = 1.0 / int((targets >= 0).sum())
    exact, _, exact_grads = gradients(model, tokens, targets, scale)
    patch(model)
    losses, logits, grads = gradients(model, tokens, targets, scale)
    tensors = stored(model, {n: p.detach().to(torch.bfloat16).clone() for n, p in own_parameters(model)})
    tensors |= {f"grad.{n}": g for n, g in stored(model, grads).items()}
    tensors |= {"tokens": tokens.int(), "targets": targets.int(), "losses": losses, "logits": logits[0, -1].clone(),
                "exact.losses": exact}
    path = HERE / "fixtures" / "fp8" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"config": config.to_json_string(use_diff=False), "gradient_scale": repr(scale),
                                       "made_by": f"torch {torch.__version__}, transformers {transformers.__version__}"})
    path.chmod(0o644)
    apart = max(((grads[n] - g).norm() / g.norm()).item() for n, g in exact_grads.items())
    print(f"{name}: {path.stat().st_size} bytes, mean loss {exact.sum() * scale:.6f}, of eight-bit products "
          f"{losses.sum() * scale:.6f}, gradients at most {apart:.3f} apart in norm")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for arguments in models():
        make(*arguments)
