"""gpu-policies: 7B under 16 GiB of a GPU and 1.5B under 4 GiB, in every policy, with one digest each.

Where a Python with torch and deepspeed for this GPU is at hand, ZeRO-3 with parameters and optimizer on the host trains the
smaller of them too, and tandem once more under the memory that it took.
"""
import json

import gpu
import harness

POLICIES = ["host", "static:0.5", "interleave:2", "stream", "auto"]
CEILINGS = {"llama_7b": "512MiB" if gpu.SMALL else "16GiB", "gpt2_xl": "512MiB" if gpu.SMALL else "4GiB"}


def compare(device, shape, ceiling, figures):
    """How it was trained; figures of each policy that fits."""
    under = ["--device-memory", ceiling]
    found = device.settings(shape, *under, "--policy", "host")
    if found is None:
        raise harness.BenchError(f"{shape.name} does not fit under {ceiling}")
    state, (micro_batch, *_) = found
    policies = gpu.chosen("TANDEM_BENCH_POLICIES", POLICIES)
    rows = device.steps(policies, *device.run_of(shape, micro_batch, state, *under))
    ran = {row["policy"]: row for row in rows if row["fits"]}
    for policy, row in ran.items():
        name = f"{shape.name}_{policy.replace(':', '_')}"
        measured, predicted = row["measured"], row["predicted"]
        figures.add(f"{name}_step_seconds", [measured["step_seconds"]])
        figures.add(f"{name}_exposed_update_seconds", [measured["exposed_update_seconds"]])
        figures.add(f"{name}_predicted_over_measured", [predicted["step_seconds"] / measured["step_seconds"]])
    fixed = [row["measured"]["step_seconds"] for policy, row in ran.items() if policy != "auto"]
    if "auto" in ran and fixed:
        figures.add(f"{shape.name}_auto_over_best", [ran["auto"]["measured"]["step_seconds"] / min(fixed)])
    digests = {row["state_digest"] for row in ran.values()}
    figures.add(f"{shape.name}_different_digests", [len(digests)])
    if len(digests) != 1:
        raise harness.BenchError(f"{shape.name}: {len(digests)} different state digests")
    return {"ceiling": ceiling, "micro_batch": micro_batch, "state": state, "policies": list(ran),
            "state_digest": digests.pop()}


def race_deepspeed(device, python, shape, micro_batch, figures):
    command = [python, harness.ROOT / "bench" / "deepspeed_gpt2.py", "--steps", gpu.STEPS + 3, "--sequence", shape.sequence,
               "--batch", micro_batch, "--shape", "tiny" if gpu.SMALL else "gpt2-xl"]
    # Before the figures come words about what it builds.
    theirs = json.loads(harness.output([str(word) for word in command]).splitlines()[-1])
    memory = theirs["device_bytes"]
    under = ["--device-memory", memory] if memory else []
    (row,) = device.steps(["auto"], *device.run_of(shape, micro_batch, "fp32", *under))
    if not row["fits"]:
        raise harness.BenchError(f"{shape.name} does not fit into what DeepSpeed takes, {memory} bytes")
    seconds = row["measured"]["step_seconds"]
    figures.add("deepspeed_over_ours", [each / seconds for each in theirs["step_seconds"][3:]])
    figures.add("deepspeed_device_bytes", [memory])


def measure():
    harness.build("tandem", "bench_gpu")
    figures = harness.Figures()
    with gpu.the_gpu() as device:
        device.rates("copy/")
        device.calibrate()
        settings = {shape.name: compare(device, shape, CEILINGS[shape.name], figures) for shape in gpu.shapes()}
        if gpu.GPT2_XL.name in settings and (python := gpu.python_with("deepspeed")):
            race_deepspeed(device, python, gpu.GPT2_XL, settings[gpu.GPT2_XL.name]["micro_batch"], figures)
    return figures.line("gpu-policies", settings=settings, **device.facts)
