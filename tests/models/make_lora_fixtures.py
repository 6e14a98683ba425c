#!/usr/bin/env python3
"""Regenerates fixtures/lora/*.safetensors: reference values of low-rank adapters from PEFT in fp32.

    pip install torch transformers safetensors peft
    python tests/models/make_lora_fixtures.py [NAME...]

The base of each is the model of fixtures/BASE.safetensors, where NAME is BASE or begins with BASE and a dot, whose weights are not stored again; B is not zero, so that
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

A file of experts' modules, which PEFT takes over into the one parameter that transformers has of all experts, has no
trajectory: what PEFT trains then is not what the file holds.

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
    yield "phi3", c(r=3, lora_alpha=2, target_modules="all-linear")
    yield "mixtral", c(r=2, lora_alpha=5, target_modules=["q_proj", "v_proj"],
                       target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    yield "olmoe", c(r=3, lora_alpha=5, target_modules=[], use_rslora=True,
                     target_parameters=["layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj"],
                     rank_pattern={"gate_up_proj": 4}, alpha_pattern={"gate_up_proj": 2})
    yield "qwen3_moe.router", c(r=3, lora_alpha=4, target_modules=["q_proj"], target_parameters=["layers.1.mlp.gate.weight"])
    yield "olmoe.router", c(r=2, lora_alpha=3, target_modules="all-linear")  # takes routers and experts, too
    yield "qwen3_moe.modules", c(r=2, lora_alpha=5, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])


def base_model(name):
    """The model of fixtures/NAME.safetensors, and the shape of its batch."""
    name = name.partition(".")[0]
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
    """Checks that PEFT's file has tensors with these names."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
        config = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
    assert written.keys() == tensors.keys(), written.keys() ^ tensors.keys()
    assert all(torch.equal(written[n], tensors[n]) for n in written)
    return config


def module_tensors(base, config, generator):
    """Random tensors of an adapter whose experts are modules, as transformers had them before it made them one."""
    c, r = base.config, config.r
    sizes = {"gate_proj": (c.hidden_size, c.moe_intermediate_size), "up_proj": (c.hidden_size, c.moe_intermediate_size),
             "down_proj": (c.moe_intermediate_size, c.hidden_size)}
    shapes = {}
    for layer in range(c.num_hidden_layers):
        block = f"base_model.model.model.layers.{layer}"
        for expert in range(c.num_experts):
            for name, (inputs, outputs) in sizes.items():
                module = f"{block}.mlp.experts.{expert}.{name}"
                shapes |= {f"{module}.lora_A.weight": (r, inputs), f"{module}.lora_B.weight": (outputs, r)}
        query = f"{block}.self_attn.q_proj"
        shapes |= {f"{query}.lora_A.weight": (r, c.hidden_size),
                   f"{query}.lora_B.weight": (c.num_attention_heads * c.head_dim, r)}
    return {n: (0.3 * torch.randn(s, generator=generator)).to(torch.bfloat16).float() for n, s in shapes.items()}


def load_modules(base, config, tensors):
    """PEFT's model of such an adapter, and its adapter_config.json."""
    with tempfile.TemporaryDirectory() as folder:
        config.task_type = "CAUSAL_LM"
        config.save_pretrained(folder)
        save_file(tensors, pathlib.Path(folder) / "adapter_model.safetensors")
        written = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
        model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    assert any("experts" in n for n in trained(model)), "PEFT has not taken the experts over"
    return model, written


def of_modules(fused, name, rank):
    """The part of PEFT's tensors of all experts (values or gradients) that is a module's of one."""
    where, found, rest = name.partition(".experts.")
    if not found:
        return fused[name]
    expert, projection, matrix = rest.split(".")[:3]
    wrapper = f"{where}.experts." + ("" if projection == "down_proj" else "base_layer.")
    whole, of = fused[f"{wrapper}{matrix}.weight"], int(expert)
    experts = fused[f"{where}.experts.lora_A.weight"].shape[0] // rank
    columns = rank * (1 if projection == "down_proj" else 2)
    first = rank if projection == "up_proj" else 0
    if matrix == "lora_A":
        return whole.reshape(experts, columns, -1)[of, first:first + rank].contiguous()
    one = whole.reshape(whole.shape[0], columns, experts)[:, first:first + rank, of]
    half = whole.shape[0] // 2
    rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}[projection]
    return one[rows].contiguous()


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
    modules = name.endswith(".modules")
    if modules:
        tensors = module_tensors(base, config, generator)
        model, written = load_modules(base, config, tensors)
    else:
        model = peft.get_peft_model(base, config)
        randomize(model, generator)
    model.eval()  # no dropout
    tokens, targets = batch(shape, vocabulary, generator, masked=True)
    scale = 1.0 / int((targets >= 0).sum())
    losses, logits, grads = gradients(model, tokens, targets, scale)
    worst = check_against_double(model, tokens, targets, scale, grads)
    if modules:
        fused = {n: p.detach() for n, p in trained(model).items()}
        assert all(torch.equal(of_modules(fused, n, config.r), t) for n, t in tensors.items())
        grads = {n: of_modules(grads, n, config.r) for n in tensors}
    else:
        tensors = {n: p.detach().clone() for n, p in trained(model).items()}
        written = check_names(model, tensors)
    written["target_modules"] = (sorted(written["target_modules"]) if isinstance(written["target_modules"], list)
                                 else written["target_modules"])
    tensors |= {f"grad.{n}": g for n, g in grads.items()}
    tensors |= {"tokens": tokens.int(), "targets": targets.int(), "losses": losses, "logits": logits[0, -1].clone()}
    steps = [batch(shape, vocabulary, generator, masked=True) for _ in range(4)]
    all_tokens, all_targets = (torch.stack([steps[i % 4][k] for i in range(STEPS)]) for k in (0, 1))
    rounded = torch.zeros(STEPS) if modules else trajectory(model, all_tokens, all_targets)
    stream = torch.randint(0, vocabulary, (4 * shape[1] + 1,), generator=generator)
    with_it = stream_loss(model, stream, shape[1])
    with model.disable_adapter():
        without = stream_loss(model, stream, shape[1])
    tensors |= {"trajectory.tokens": all_tokens.int(), "trajectory.targets": all_targets.int(),
                "trajectory.losses": rounded, "stream": stream.int(),
                "stream.losses": torch.tensor([with_it, without], dtype=torch.float64)}
    if modules:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("trajectory.")}
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
