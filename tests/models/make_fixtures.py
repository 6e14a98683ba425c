#!/usr/bin/env python3
"""Regenerates fixtures/*.safetensors: reference values of small models from PyTorch in fp32.

    pip install torch transformers safetensors
    python tests/models/make_fixtures.py [NAME...]

The models are those of `transformers` themselves, two or three layers of odd sizes, with random weights that
bfloat16 can hold. Each file holds, under Hugging Face names and in Hugging Face storage order:

    NAME                  bf16  weights
    grad.NAME             f32   gradients of the sum of the losses over targets times gradient_scale
    tokens, targets       i32   (B, T); a negative target is none
    losses                f32   (B T), 0 where not a target
    logits                f32   (V) of the last position of sequence 0
    trajectory.tokens     i32   (steps, B, T)
    trajectory.targets    i32   (steps, B, T)
    trajectory.losses     f64   (steps): mean over targets before each step's update

and, as metadata, `config` (the model's config.json), `gradient_scale` and `optimizer`. The script also
runs every model in double precision and refuses to write where fp32 strays too far from it.
"""
import json
import math
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
STEPS = 20
# A gradient next to a bf16 rounding boundary rounds either way, and larger steps let that grow beyond the bar:
# at 1e-3, PyTorch's own fp32 and double trajectories part by up to 1.9e-4.
OPTIMIZER = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def models():
    common = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    llama = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, **common}
    yield "gpt2", (3, 7), transformers.GPT2LMHeadModel, transformers.GPT2Config(
        n_positions=19, n_embd=36, n_layer=2, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common)
    yield "llama3", (2, 13), transformers.LlamaForCausalLM, transformers.LlamaConfig(
        hidden_size=48, intermediate_size=77, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16}, **llama)
    yield "qwen2", (3, 7), transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        hidden_size=24, intermediate_size=55, max_position_embeddings=32, tie_word_embeddings=True, **llama)
    yield "qwen3", (2, 13), transformers.Qwen3ForCausalLM, transformers.Qwen3Config(
        hidden_size=40, intermediate_size=61, head_dim=16, max_position_embeddings=32, tie_word_embeddings=False,
        **llama)
    # A window shorter than the sequences, and RoPE of a type that stretches nothing within the positions.
    yield "mistral", (2, 13), transformers.MistralForCausalLM, transformers.MistralConfig(
        hidden_size=24, intermediate_size=41, max_position_embeddings=32, sliding_window=5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}, **llama)
    # Fused tensors, a window, three quarters of each head rotated, and the factors of long sequences.
    yield "phi3", (2, 13), transformers.Phi3ForCausalLM, transformers.Phi3Config(
        hidden_size=48, intermediate_size=43, max_position_embeddings=32, original_max_position_embeddings=8,
        sliding_window=7, tie_word_embeddings=False, pad_token_id=None,
        rope_parameters={"rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75,
                         "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]},
        **llama)
    # A layer that knows no positions, where a bias of its keys would change nothing, and biases of the MLP.
    yield "smollm3", (3, 9), transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config(
        hidden_size=36, intermediate_size=41, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=None,
        no_rope_layer_interval=2, mlp_bias=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                         "original_max_position_embeddings": 16}, **llama)
    # Norms after attention and MLP, and over all heads of query and key at once; biases of attention.
    yield "olmo2", (2, 9), transformers.Olmo2ForCausalLM, transformers.Olmo2Config(
        hidden_size=48, intermediate_size=41, max_position_embeddings=32, tie_word_embeddings=False, pad_token_id=None,
        attention_bias=True, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, **llama)
    # A layer with a window, whose RoPE is not scaled, between layers whose is.
    yield "olmo3", (2, 13), transformers.Olmo3ForCausalLM, transformers.Olmo3Config(
        hidden_size=36, intermediate_size=41, max_position_embeddings=64, sliding_window=4, tie_word_embeddings=False,
        pad_token_id=None, layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": {"rope_type": "yarn", "rope_theta": 300.0, "factor": 8.0,
                                            "original_max_position_embeddings": 8, "attention_factor": 1.25},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
        **{**llama, "num_hidden_layers": 3})


    # Factors of embedding, attention, residuals and logits; biases, and a table that is embedding and head.
    yield "granite", (2, 13), transformers.GraniteForCausalLM, transformers.GraniteConfig(
        hidden_size=36, intermediate_size=41, max_position_embeddings=32, tie_word_embeddings=True, pad_token_id=None,
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.5,
        attention_bias=True, mlp_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **llama)
    # Norms of 1 + weight, four a block; GeGLU; a table that is scaled; layers with a window have RoPE of their own.
    yield "gemma3", (2, 9), transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(
        hidden_size=48, intermediate_size=61, head_dim=16, max_position_embeddings=64, sliding_window=4,
        tie_word_embeddings=True, query_pre_attn_scalar=20, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}},
        **{**llama, "num_hidden_layers": 3})
    yield "gemma", (2, 9), transformers.GemmaForCausalLM, transformers.GemmaConfig(
        hidden_size=48, intermediate_size=77, head_dim=16, max_position_embeddings=32, tie_word_embeddings=True,
        pad_token_id=None, **llama)
    # Experts: more of them than tokens find, with shares that add up to 1 or that do not, and files of either spelling.
    experts = {**llama, "experts_implementation": "eager"}
    yield "mixtral", (3, 7), transformers.MixtralForCausalLM, transformers.MixtralConfig(
        hidden_size=24, intermediate_size=17, max_position_embeddings=32, tie_word_embeddings=False,
        num_local_experts=3, num_experts_per_tok=2, sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **experts)
    yield "qwen3_moe", (3, 7), transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        hidden_size=24, intermediate_size=61, moe_intermediate_size=11, head_dim=16, max_position_embeddings=32,
        tie_word_embeddings=True, num_experts=20, num_experts_per_tok=3, norm_topk_prob=True, **experts)
    yield "olmoe", (2, 9), transformers.OlmoeForCausalLM, transformers.OlmoeConfig(
        hidden_size=48, intermediate_size=13, max_position_embeddings=32, tie_word_embeddings=False, pad_token_id=None,
        num_experts=7, num_experts_per_tok=4, **experts)


def stored(model, tensors):
    """Tensors as files have them: transformers keeps all experts of a layer in two tensors, files in three for each."""
    mixtral = model.config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    files = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        where, found, part = name.partition(".experts.")
        if not found:
            files[name] = tensor
            continue
        for e, values in enumerate(tensor):
            parts = values.chunk(2) if part == "gate_up_proj" else [values]
            for projection, rows in zip(names[:2] if part == "gate_up_proj" else names[2:], parts):
                files[f"{where}.experts.{e}.{projection}.weight"] = rows.contiguous()
    return files


def check_names(model, tensors):
    """Checks that transformers writes files with these names."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = load_file(pathlib.Path(folder) / "model.safetensors")
    assert written.keys() == tensors.keys(), written.keys() ^ tensors.keys()
    assert all(torch.equal(written[n], tensors[n].float()) for n in written)


def own_parameters(model):
    """Name and parameter, tied ones once."""
    return list(model.named_parameters())


def randomize(model, generator):
    """Weights large enough that attention is far from uniform and no gradient vanishes."""
    with torch.no_grad():
        for name, p in own_parameters(model):
            noise = torch.randn(p.shape, generator=generator)
            is_norm = p.dim() == 1 and name.endswith("weight")
            begins = 0 if model.config.model_type.startswith("gemma") else 1
            p.copy_(begins + 0.2 * noise if is_norm else (0.1 if p.dim() == 1 else 0.2) * noise)
            p.copy_(p.to(torch.bfloat16).float())


def batch(shape, vocabulary, generator, masked):
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    targets = torch.randint(0, vocabulary, shape, generator=generator)
    if masked:
        targets[torch.rand(shape, generator=generator) < 0.3] = -1
    return tokens, targets


def losses_of(model, tokens, targets):
    logits = model(tokens, use_cache=False).logits
    flat = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).clamp(min=-1),
                                             ignore_index=-1, reduction="none")
    return flat, logits


def gradients(model, tokens, targets, scale):
    model.zero_grad()
    losses, logits = losses_of(model, tokens, targets)
    (losses.sum() * scale).backward()
    grads = {name: p.grad.detach().clone() for name, p in own_parameters(model)}
    return losses.detach(), logits.detach(), grads


def check_against_double(model, tokens, targets, scale, grads):
    """fp32 may differ from double by far less than what tandem is held to."""
    _, _, exact = gradients(model.double(), tokens, targets, scale)
    model.float()
    overall = max(g.abs().max().item() for g in exact.values())
    worst = max(((grads[n].double() - g).abs().max() / max(g.abs().max().item(), 1e-3 * overall)).item()
                for n, g in exact.items())
    assert worst < 5e-6, f"fp32 differs from double by {worst}"
    return worst


def weight_of_master(master):
    """bf16 by integer arithmetic, ties away from zero, as fp32."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((bits + 0x8000) >> 16) << 16
    rounded = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded)
    return rounded.to(torch.int32).view(torch.float32)


def trajectory(model, tokens, targets, gradients=gradients):
    """Losses of a plain loop before each step."""
    def step(i):
        count = int((targets[i] >= 0).sum())
        flat, _, grads = gradients(model, tokens[i], targets[i], 1.0 / count)
        return flat.double().sum().item() / count, grads
    return torch.tensor(train(model, step, STEPS), dtype=torch.float64)


def train(model, gradients_of, steps):
    """A plain loop: fp32 master, bf16 weights and gradients, AdamW with clipping by global norm. `gradients_of(i)` gives what is
    kept of step i, and the gradients. Returns what is kept; the model is as it was."""
    o = OPTIMIZER
    start = {n: p.detach().clone() for n, p in own_parameters(model)}
    parameters = own_parameters(model)
    master = {n: p.detach().clone() for n, p in parameters}
    m = {n: torch.zeros_like(p) for n, p in parameters}
    v = {n: torch.zeros_like(p) for n, p in parameters}
    kept = []
    for step in range(1, steps + 1):
        of_step, grads = gradients_of(step - 1)
        kept.append(of_step)
        grads = {n: g.to(torch.bfloat16).float() for n, g in grads.items()}
        norm = math.sqrt(sum((g.double() ** 2).sum().item() for g in grads.values()))
        scale = min(1.0, o["clip"] / norm)
        correction1, correction2 = 1 - o["beta1"] ** step, 1 - o["beta2"] ** step
        with torch.no_grad():
            for n, p in parameters:
                g = grads[n] * scale
                m[n] = o["beta1"] * m[n] + (1 - o["beta1"]) * g
                v[n] = o["beta2"] * v[n] + (1 - o["beta2"]) * g * g
                decay = o["weight_decay"] if p.dim() > 1 else 0.0
                update = (m[n] / correction1) / ((v[n] / correction2).sqrt() + o["eps"])
                master[n] = master[n] * (1 - o["lr"] * decay) - o["lr"] * update
                p.copy_(weight_of_master(master[n]))
    with torch.no_grad():
        for n, p in parameters:
            p.copy_(start[n])
    return kept


def double_gradients(model, tokens, targets, scale):
    flat, logits, grads = gradients(model.double(), tokens, targets, scale)
    model.float()
    return flat, logits, {n: g.float() for n, g in grads.items()}


def make(name, shape, model_class, config):
    generator = torch.Generator().manual_seed(2410)
    config.architectures = [model_class.__name__]
    model = model_class(config).float().eval()
    randomize(model, generator)
    tokens, targets = batch(shape, config.vocab_size, generator, masked=True)
    scale = 1.0 / int((targets >= 0).sum())
    losses, logits, grads = gradients(model, tokens, targets, scale)
    worst = check_against_double(model, tokens, targets, scale, grads)
    tensors = stored(model, {n: p.detach().to(torch.bfloat16).clone() for n, p in own_parameters(model)})
    check_names(model, tensors)
    tensors |= {f"grad.{n}": g for n, g in stored(model, grads).items()}
    tensors |= {"tokens": tokens.int(), "targets": targets.int(), "losses": losses, "logits": logits[0, -1].clone()}
    steps = [batch(shape, config.vocab_size, generator, masked=True) for _ in range(STEPS)]
    # Four batches, again and again, so that there is something to learn.
    all_tokens, all_targets = (torch.stack([steps[i % 4][k] for i in range(STEPS)]) for k in (0, 1))
    loss = trajectory(model, all_tokens, all_targets)
    apart = (trajectory(model, all_tokens, all_targets, double_gradients) / loss - 1).abs().max().item()
    assert apart < 5e-5, f"the trajectory's fp32 and double losses part by {apart}"
    tensors |= {"trajectory.tokens": all_tokens.int(), "trajectory.targets": all_targets.int(),
                "trajectory.losses": loss}
    path = HERE / "fixtures" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"config": config.to_json_string(use_diff=False),
                                       "gradient_scale": repr(scale), "optimizer": json.dumps(OPTIMIZER),
                                       "made_by": f"torch {torch.__version__}, transformers {transformers.__version__}"})
    path.chmod(0o644)
    print(f"{name}: {path.stat().st_size} bytes, fp32 within {worst:.1e} of double, "
          f"loss {loss[0]:.4f} to {loss[-1]:.4f}, within {apart:.1e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, *arguments in models():
        if name in sys.argv[1:] or len(sys.argv) == 1:
            make(name, *arguments)
