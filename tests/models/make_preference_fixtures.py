#!/usr/bin/env python3
"""Regenerates fixtures/preferences/*.safetensors: direct preference optimization of small models by PyTorch in fp32.

    pip install torch transformers safetensors
    python tests/models/make_preference_fixtures.py

Two models of make_fixtures.py, one with a tied table. The loss is that of TRL's DPOTrainer (loss_type sigmoid, no label smoothing):

    -logsigmoid(beta ((log p chosen - log p_ref chosen) - (log p rejected - log p_ref rejected)))

with sums over the targets of each sequence. Each file holds, beside weights as make_fixtures.py has them, of two pairs in four
sequences:

    tokens, targets       i32   (4, T): chosen, rejected, chosen, rejected; a negative target is none
    reference             f32   (4): log-probabilities of a model with other weights
    pairs                 f32   (2, 3): loss, reward of the chosen one, of the rejected one
    grad.NAME             f32   gradients of the mean loss
    trajectory.tokens, trajectory.targets       i32   (steps, 4, T)
    trajectory.reference  f32   (steps, 4): log-probabilities before the first step
    trajectory.losses, trajectory.margins       f64   (steps): means over the pairs before each step's update

and, as metadata, `beta` and what make_fixtures.py writes. Every run is made in double precision, too, and nothing is written where
fp32 strays too far from it.
"""
import json

import torch
from safetensors.torch import save_file

from make_fixtures import HERE, OPTIMIZER, batch, losses_of, models, own_parameters, randomize, stored, train

BETA, STEPS, PAIRS = 0.3, 10, 2


def log_probabilities(model, tokens, targets):
    """Sum over the targets of each sequence."""
    return -losses_of(model, tokens, targets)[0].reshape(tokens.shape).sum(1)


def preference(model, tokens, targets, reference):
    """Loss and rewards of each pair."""
    rewards = BETA * (log_probabilities(model, tokens, targets) - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    return torch.stack([-torch.nn.functional.logsigmoid(chosen - rejected), chosen, rejected], 1)


def gradients(model, tokens, targets, reference):
    model.zero_grad()
    pairs = preference(model, tokens, targets, reference)
    pairs[:, 0].mean().backward()
    return pairs.detach(), {name: p.grad.detach().clone() for name, p in own_parameters(model)}


def exact_gradients(model, *arguments):
    """Pairs and gradients, computed in double precision."""
    pairs, grads = gradients(model.double(), *(a.double() if a.is_floating_point() else a for a in arguments))
    model.float()
    return pairs, {n: g.float() for n, g in grads.items()}


def trajectory(model, steps, gradients):
    """(loss, margin) before each step. `steps`: (tokens, targets, reference) of each."""
    def step(i):
        pairs, grads = gradients(model, *steps[i])
        mean = pairs.double().mean(0)
        return (mean[0].item(), (mean[1] - mean[2]).item()), grads
    return torch.tensor(train(model, step, STEPS), dtype=torch.float64)


def worst_of(grads, exact):
    overall = max(g.abs().max().item() for g in exact.values())
    return max(((grads[n] - g).abs().max() / max(g.abs().max().item(), 1e-3 * overall)).item() for n, g in exact.items())


def make(name, shape, model_class, config):
    generator = torch.Generator().manual_seed(2305)
    config.architectures = [model_class.__name__]
    model = model_class(config).float().eval()
    randomize(model, generator)
    with torch.no_grad():  # the reference has other weights, so that margins are not zero
        reference_of = lambda tokens, targets: log_probabilities(model, tokens, targets)
        shape = (2 * PAIRS, shape[1])
        tokens, targets = batch(shape, config.vocab_size, generator, masked=True)
        reference = reference_of(tokens, targets) + torch.tensor([1.0, -2.0, -3.0, 0.5])
        steps = [batch(shape, config.vocab_size, generator, masked=True) for _ in range(2)]
        steps = [(t, o, reference_of(t, o)) for t, o in (steps[i % 2] for i in range(STEPS))]
    pairs, grads = gradients(model, tokens, targets, reference)
    exact_pairs, exact = exact_gradients(model, tokens, targets, reference)
    worst = worst_of(grads, exact)
    assert worst < 5e-6 and (pairs - exact_pairs).abs().max() < 1e-5, (worst, pairs - exact_pairs)
    run = trajectory(model, steps, gradients)
    apart = (trajectory(model, steps, exact_gradients) - run).abs().max().item()
    assert apart < 1e-4, f"the trajectory's fp32 and double figures part by {apart}"
    tensors = stored(model, {n: p.detach().to(torch.bfloat16).clone() for n, p in own_parameters(model)})
    tensors |= {f"grad.{n}": g for n, g in stored(model, grads).items()}
    tensors |= {"tokens": tokens.int(), "targets": targets.int(), "reference": reference, "pairs": pairs}
    tensors |= {f"trajectory.{n}": torch.stack([s[i] for s in steps]) for i, n in enumerate(("tokens", "targets", "reference"))}
    tensors |= {f"trajectory.{n}": tensors[f"trajectory.{n}"].int() for n in ("tokens", "targets")}
    tensors |= {"trajectory.losses": run[:, 0].clone(), "trajectory.margins": run[:, 1].clone()}
    path = HERE / "fixtures" / "preferences" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"config": config.to_json_string(use_diff=False), "gradient_scale": repr(1 / PAIRS),
                                       "optimizer": json.dumps(OPTIMIZER), "beta": repr(BETA), "made_by": f"torch {torch.__version__}"})
    path.chmod(0o644)
    print(f"{name}: {path.stat().st_size} bytes, fp32 within {worst:.1e} of double, losses of pairs {pairs[:, 0].tolist()}, "
          f"loss {run[0, 0]:.4f} to {run[-1, 0]:.4f}, margin {run[-1, 1]:.4f}, within {apart:.1e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, *arguments in models():
        if name in ("llama3", "qwen2"):
            make(name, *arguments)
