"""gpu-training: training without offload, model FLOPs beside the rate of matrix products, and a PyTorch loop beside it.

The shapes of GPT-2 XL (1.5B) and of a Llama model of 7B, in bf16. PyTorch, eager and compiled, trains the first of them
where a Python with torch for this GPU is at hand ($TANDEM_BENCH_PYTHON, else python3). What fails is said in the
settings, and the rest goes on.
"""
import statistics

import gpu
import gpu_kernels
import harness

WITHOUT_OFFLOAD = ["--policy", "device"]
EXACT = ("fp32", "split")
LEAST = "8bit-moments"
MEASURED = 2  # number of fitting micro-batches that are measured: those predicted to make most tokens per second


def formats(device, shape):
    """Formats of state that are measured, by the name of their figures: the most exact one that fits, and where moments
    are rounded in it, the one that leaves most memory to activations."""
    state = device.state_of(shape, *WITHOUT_OFFLOAD)
    if state is None:
        return {}
    also = {f"{shape.name}_8bit_moments": LEAST} if state not in (*EXACT, LEAST) else {}
    return {shape.name: state, **also}


def promising(device, shape, state):
    """Micro-batches that are worth a run, the largest first."""
    predicted = {}
    for micro_batch in shape.micro_batches:
        plan = device.plan(*device.run_of(shape, micro_batch, state, *WITHOUT_OFFLOAD))
        if plan is not None:
            predicted[micro_batch] = plan["predicted"]["step_seconds"]
    best = sorted(predicted, key=lambda micro_batch: predicted[micro_batch] / micro_batch)[:MEASURED]
    return {micro_batch: predicted[micro_batch] for micro_batch in sorted(best, reverse=True)}


def train(device, shape, name, state, product, figures):
    """How the fastest run was set up, in tokens per second, and its step; `failed`: what went wrong."""
    predicted = promising(device, shape, state)
    step_seconds, activations, failed = {}, {}, []
    for micro_batch in predicted:
        try:
            row = device.steps("device", *device.run_of(shape, micro_batch, state))
            step_seconds[micro_batch] = row["measured"]["step_seconds"]
            activations[micro_batch] = row["activations"]
        except harness.BenchError as error:
            failed.append(f"micro-batch {micro_batch}: {error}")
    setting = {"state": state, **gpu.failure(failed)}
    if not step_seconds:
        return setting
    best = min(step_seconds, key=lambda micro_batch: step_seconds[micro_batch] / micro_batch)
    seconds = step_seconds[best]
    figures.add(f"{name}_over_product", [shape.flops(best) / seconds / product])
    figures.add(f"{name}_step_seconds", [seconds])
    figures.add(f"{name}_tokens_per_second", [best * shape.sequence / seconds])
    figures.add(f"{name}_predicted_over_measured", [predicted[best] / seconds])
    return {**setting, "micro_batch": best, "step_seconds": step_seconds, "activations": activations}


def train_all(device, shape, product, settings, figures):
    names = formats(device, shape)
    if not names:
        harness.say(f"{shape.name} does not fit without offload: left out")
        settings[shape.name] = {"left_out": "it does not fit without offload"}
    for name, state in names.items():
        with gpu.going_on(settings, name):
            settings[name] = train(device, shape, name, state, product, figures)


def race_torch(device, python, shape, name, flags, seconds_of_a_sequence, figures):
    """PyTorch with the largest micro-batch that it runs, by the sequence: it may need more memory, or less."""
    steps = device.step_count + 3
    failed = []
    for micro_batch in shape.micro_batches:
        try:
            theirs = device.peer(python, harness.ROOT / "bench" / "peers" / "torch_gpt2.py", "--steps", steps, "--sequence",
                                 shape.sequence, "--batch", micro_batch, "--shape", "tiny" if gpu.SMALL else "gpt2-xl",
                                 "--device", "cpu" if gpu.SMALL else "cuda", *flags)
        except harness.BenchError as error:
            failed.append(f"micro-batch {micro_batch}: {error}")
            if getattr(error, "returncode", 0) is None:
                break  # it hangs, and would again
            continue
        seconds = theirs["step_seconds"][3:]  # the first of them compile and allocate
        figures.add(f"torch_{name}_step_seconds", seconds)
        figures.add(f"torch_{name}_over_ours", [each / micro_batch / seconds_of_a_sequence for each in seconds])
        return {"micro_batch": micro_batch, **gpu.failure(failed)}
    return gpu.failure(failed)


def measure():
    harness.build("tandem", "bench_gpu")
    shapes = gpu.shapes()
    figures = harness.Figures()
    settings = {}
    with gpu.the_gpu() as device:
        product = statistics.median(device.rates(gpu_kernels.SQUARE)[gpu_kernels.SQUARE])
        figures.add("product_flop_per_second", [product])
        device.calibrate()
        for shape in shapes:
            with gpu.going_on(settings, shape.name):
                train_all(device, shape, product, settings, figures)
        failed = [line for name in settings for line in gpu.failures_in(settings, name)]
        ours = settings.get(gpu.GPT2_XL.name, {})
        if "micro_batch" in ours and (python := gpu.python_with("numpy")):
            (shape,) = (shape for shape in shapes if shape.name == gpu.GPT2_XL.name)
            of_a_sequence = ours["step_seconds"][ours["micro_batch"]] / ours["micro_batch"]
            for name, flags in {"eager": [], "compiled": ["--compile"]}.items():
                settings[f"torch_{name}"] = race_torch(device, python, shape, name, flags, of_a_sequence, figures)
    return figures.line("gpu-training", settings=settings, failed=failed, **device.facts)
