"""gpu-training: training without offload, model FLOPs beside the rate of matrix products, and a PyTorch loop beside it.

The shapes of GPT-2 XL (1.5B) and of a Llama model of 7B, in bf16. PyTorch, eager and compiled, trains the first of them
where a Python with torch for this GPU is at hand ($TANDEM_BENCH_PYTHON, else python3).
"""
import json
import statistics

import gpu
import gpu_kernels
import harness

WITHOUT_OFFLOAD = ["--policy", "device"]


def train(device, shape, product, figures):
    """How the fastest run was set up, in tokens per second, and its step; None where nothing fits."""
    found = device.settings(shape, *WITHOUT_OFFLOAD)
    if found is None:
        harness.say(f"{shape.name} does not fit without offload: left out")
        return None
    state, micro_batches = found
    step_seconds = {}
    for micro_batch in micro_batches:  # fewer tokens may need nothing computed twice
        (row,) = device.steps(["device"], *device.run_of(shape, micro_batch, state))
        step_seconds[micro_batch] = row["measured"]["step_seconds"]
    best = min(step_seconds, key=lambda micro_batch: step_seconds[micro_batch] / micro_batch)
    seconds = step_seconds[best]
    figures.add(f"{shape.name}_over_product", [shape.flops(best) / seconds / product])
    figures.add(f"{shape.name}_step_seconds", [seconds])
    figures.add(f"{shape.name}_tokens_per_second", [best * shape.sequence / seconds])
    return {"state": state, "micro_batch": best, "step_seconds": step_seconds}


def torch_steps(python, shape, micro_batch, *flags):
    """Seconds of each step, the first of them left out: they compile and allocate."""
    steps = gpu.STEPS + 3
    command = [python, harness.ROOT / "bench" / "torch_gpt2.py", "--steps", steps, "--sequence", shape.sequence, "--batch",
               micro_batch, "--shape", "tiny" if gpu.SMALL else "gpt2-xl", "--device", "cpu" if gpu.SMALL else "cuda", *flags]
    return json.loads(harness.output([str(word) for word in command]))["step_seconds"][3:]


def measure():
    harness.build("tandem", "bench_gpu")
    figures = harness.Figures()
    settings = {}
    with gpu.the_gpu() as device:
        product = statistics.median(device.rates(gpu_kernels.SQUARE)[gpu_kernels.SQUARE])
        figures.add("product_flop_per_second", [product])
        device.calibrate()
        for shape in gpu.shapes():
            if trained := train(device, shape, product, figures):
                settings[shape.name] = trained
    python = gpu.python_with("numpy")
    if python and gpu.GPT2_XL.name in settings:
        ours = settings[gpu.GPT2_XL.name]
        for name, flags in {"eager": [], "compiled": ["--compile"]}.items():
            seconds = torch_steps(python, gpu.GPT2_XL, ours["micro_batch"], *flags)
            figures.add(f"torch_{name}_over_ours", [each / ours["step_seconds"][ours["micro_batch"]] for each in seconds])
    return figures.line("gpu-training", settings=settings, **device.facts)
