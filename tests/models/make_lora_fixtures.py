#!/usr/bin/env python3
"""Regenerates fixtures/lora/*.safetensors: reference values of low-rank adapters from PEFT in fp32.

    pip install torch transformers safetensors peft
    python tests/models/make_lora_fixtures.py [NAME...]

The base of each is the model of fixtures/NAME.safetensors, whose weights are not stored again; B is not zero, so that
every gradient has something to say. Each file holds

    KEY                  f32   adapter and saved modules, under the names of PEFT's adapter_model.safetensors; values
                               that bfloat16 can hold
    grad.KEY             f32   gradients of the sum of the losses over targets times gradient_scale
    tokens, targets      i32   (B, T); a negative target is none
    losses               f32   (B T), 0 where not a target
    logits               f32   (V) of the last position of sequence 0
    trajectory.tokens    i32   (steps, B, T)
    trajectory.targets   i32   (steps, B, T)
    trajectory.losses    f64   (steps): mean over targets before each step's update, with weights and gradients
                               rounded to bf16 as in make_fixtures.py
    stream               i32   (4 T + 1): text of which each token is to predict the next, in windows of T
    stream.losses        f64   (2): mean over all windows, with the adapter and without it

and, as metadata, `config` (config.json of the base), `adapter` (adapter_config.json as PEFT writes it),
`gradient_scale` and `optimizer`.
"""
import json
import math
import pathlib
import sys
import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

import make_fixtures
from make_fixtures import HERE, OPTIMIZER, batch, losses_of, weight_of_master

STEPS = 10


def adapters():
    """Name of the base and its adapter's configuration."""
    c = peft.LoraConfig
    yield "gpt2", c(r=4, lora_alpha=9, target_modules=["c_attn", "mlp.c_proj", "attn.c_proj", "c_fc"],
                    fan_in_fan_out=True)
    yield "llama3", c(r=5, lora_alpha=7, target_modules="all-linear", modules_to_save=["lm_head", "norm"])
    yield "qwen3", c(r=3, lora_alpha=8, target_modules=r".*\.1\.self_attn\.(q|v)_proj|.*\.0\.mlp\.down_proj")
    yield "gemma3", c(r=4, lora_alpha=3, target_modules="all-linear", use_rslora=True)
    yield "qwen3_moe", c(r=2, lora_alpha=5, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def base_model(name):
    """The model of fixtures/NAME.safetensors, and the shape of its batch."""
    for known, shape, model_class, config in make_fixtures.models():
        if known == name:
            config.architectures = [model_class.__name__]
            model = model_class(config).float().eval()
            make_fixtures.randomize(model, torch.Generator().manual_seed(2410))
            check_base(model, load_file(HERE / "fixtures" / f"{name}.safetensors"))
            return model, shape
    raise KeyError(name)


def check_base(model, fixture):
    own = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}
    for name, tensor in make_fixtures.stored(model, own).items():
        assert torch.equal(fixture[name], tensor), name


def trained(model):
    """PEFT's file name of each trained parameter, and the parameter."""
    return {n.replace(".default", "").replace(".modules_to_save", ""): p
            for n, p in model.named_parameters() if p.requires_grad}


def randomize(model, generator):
    with torch.no_grad():
        for name, p in trained(model).items():
            if ".lora_" not in name:
                continue  # a copy of the base's
            p.copy_((0.3 * torch.randn(p.shape, generator=generator)).to(torch.bfloat16).float())


def check_names(model, tensors):
    """That these are the tensors of PEFT's file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
        config = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
    assert written.keys() == tensors.keys(), written.keys() ^ tensors.keys()
    assert all(torch.equal(written[n], tensors[n]) for n in written)
    return config


def gradients(model, tokens, targets, scale):
    model.zero_grad()
    losses, logits = losses_of(model, tokens, targets)
    (losses.sum() * scale).backward()
    return losses.detach(), logits.detach(), {n: p.grad.detach().clone() for n, p in trained(model).items()}


def check_against_double(model, tokens, targets, scale, grads):
    _, _, exact = gradients(model.double(), tokens, targets, scale)
    model.float()
    overall = max(g.abs().max().item() for g in exact.values())
    worst = max(((grads[n].double() - g).abs().max() / max(g.abs().max().item(), 1e-3 * overall)).item()
                for n, g in exact.items())
    assert worst < 5e-6, f"fp32 differs from double by {worst}"
    return worst


def stream_loss(model, stream, length):
    """Mean loss over windows, as `tandem eval` has it."""
    tokens, targets = stream[:-1].reshape(-1, length), stream[1:].reshape(-1, length)
    with torch.no_grad():
        return losses_of(model, tokens, targets)[0].double().mean().item()


def trajectory(model, tokens, targets):
    """A plain loop: fp32 master, bf16 weights and gradients, AdamW with clipping by global norm."""
    o = OPTIMIZER
    parameters = trained(model)
    start = {n: p.detach().clone() for n, p in parameters.items()}
    master = {n: p.detach().clone() for n, p in parameters.items()}
    m = {n: torch.zeros_like(p) for n, p in parameters.items()}
    v = {n: torch.zeros_like(p) for n, p in parameters.items()}
    losses = []
    for step in range(1, STEPS + 1):
        count = int((targets[step - 1] >= 0).sum())
        flat, _, grads = gradients(model, tokens[step - 1], targets[step - 1], 1.0 / count)
        losses.append(flat.double().sum().item() / count)
        grads = {n: g.to(torch.bfloat16).float() for n, g in grads.items()}
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads.values()))
        scale = min(1.0, o["clip"] / norm)
        correction1, correction2 = 1 - o["beta1"] ** step, 1 - o["beta2"] ** step
        with torch.no_grad():
            for n, p in parameters.items():
                g = grads[n] * scale
                m[n] = o["beta1"] * m[n] + (1 - o["beta1"]) * g
                v[n] = o["beta2"] * v[n] + (1 - o["beta2"]) * g * g
                decay = o["weight_decay"] if p.dim() > 1 else 0.0
                update = (m[n] / correction1) / ((v[n] / correction2).sqrt() + o["eps"])
                master[n] = master[n] * (1 - o["lr"] * decay) - o["lr"] * update
                p.copy_(weight_of_master(master[n]))
    with torch.no_grad():
        for n, p in parameters.items():
            p.copy_(start[n])
    return torch.tensor(losses, dtype=torch.float64)


def make(name, config):
    base, shape = base_model(name)
    vocabulary = base.config.vocab_size
    generator = torch.Generator().manual_seed(2106)
    model = peft.get_peft_model(base, config)
    model.eval()  # no dropout
    randomize(model, generator)
    tokens, targets = batch(shape, vocabulary, generator, masked=True)
    scale = 1.0 / int((targets >= 0).sum())
    losses, logits, grads = gradients(model, tokens, targets, scale)
    worst = check_against_double(model, tokens, targets, scale, grads)
    tensors = {n: p.detach().clone() for n, p in trained(model).items()}
    written = check_names(model, tensors)
    written["target_modules"] = (sorted(written["target_modules"]) if isinstance(written["target_modules"], list)
                                 else written["target_modules"])
    tensors |= {f"grad.{n}": g for n, g in grads.items()}
    tensors |= {"tokens": tokens.int(), "targets": targets.int(), "losses": losses, "logits": logits[0, -1].clone()}
    steps = [batch(shape, vocabulary, generator, masked=True) for _ in range(4)]
    all_tokens, all_targets = (torch.stack([steps[i % 4][k] for i in range(STEPS)]) for k in (0, 1))
    rounded = trajectory(model, all_tokens, all_targets)
    stream = torch.randint(0, vocabulary, (4 * shape[1] + 1,), generator=generator)
    with_it = stream_loss(model, stream, shape[1])
    with model.disable_adapter():
        without = stream_loss(model, stream, shape[1])
    tensors |= {"trajectory.tokens": all_tokens.int(), "trajectory.targets": all_targets.int(),
                "trajectory.losses": rounded, "stream": stream.int(),
                "stream.losses": torch.tensor([with_it, without], dtype=torch.float64)}
    path = HERE / "fixtures" / "lora" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={
        "config": base.config.to_json_string(use_diff=False), "adapter": json.dumps(written), "gradient_scale": repr(scale), "optimizer": json.dumps(OPTIMIZER),
        "made_by": f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"})
    path.chmod(0o644)
    print(f"{name}: {path.stat().st_size} bytes, {len(grads)} gradients, fp32 within {worst:.1e} of double, "
          f"loss {rounded[0]:.4f} to {rounded[8]:.4f}, of the stream {with_it:.4f}, {without:.4f} without")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, config in adapters():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            make(name, config)
