"""gpu-policies: 7B under 16 GiB of a GPU and 1.5B under 4 GiB, in every policy, with one digest each.

Where a Python with torch and deepspeed for this GPU is at hand, ZeRO-3 with parameters and optimizer on the host trains
the smaller of them too, and tandem once more under the memory that it took. What fails is said in the settings, and the
rest goes on.

Figures `..._without_norm_...` are of `host` and `auto` once more in steps that neither clip nor skip, whose updates run in
backward: a bound of what hiding updates there can bring.
"""
import gpu
import harness

# Half of the state of a 7B model would not fit under 16 GiB.
POLICIES = ["host", "static:0.9", "interleave:2", "stream", "auto"]
CEILINGS = {"llama_7b": "512MiB" if gpu.SMALL else "16GiB", "gpt2_xl": "512MiB" if gpu.SMALL else "4GiB"}


WITHOUT_NORM = ["--clip", "0", "--on-nonfinite", "stop"]


def add_figures(name, row, figures):
    measured, predicted = row["measured"], row["predicted"]
    figures.add(f"{name}_step_seconds", [measured["step_seconds"]])
    figures.add(f"{name}_exposed_update_seconds", [measured["exposed_update_seconds"]])
    figures.add(f"{name}_predicted_over_measured", [predicted["step_seconds"] / measured["step_seconds"]])


def compare(device, shape, ceiling, figures):
    """How it was trained, what did not fit, and what `failed`; figures of each policy that ran."""
    under = ["--device-memory", ceiling]
    found = device.settings(shape, *under, "--policy", "host")
    if found is None:
        raise harness.BenchError(f"it does not fit under {ceiling}")
    state, micro_batch = found
    run = device.run_of(shape, micro_batch, state, *under)
    ran, refused, failed = {}, {}, []
    for policy in gpu.chosen("TANDEM_BENCH_POLICIES", POLICIES):
        try:
            row = device.steps(policy, *run)
        except gpu.DoesNotFit as error:
            refused[policy] = str(error)
        except harness.BenchError as error:
            failed.append(f"{policy}: {error}")
        else:
            ran[policy] = row
            add_figures(f"{shape.name}_{policy.replace(':', '_')}", row, figures)
    failed += measure_without_norm(device, shape, [p for p in ("host", "auto") if p in ran], run, figures)
    fixed = [row["measured"]["step_seconds"] for policy, row in ran.items() if policy != "auto"]
    if "auto" in ran and fixed:
        figures.add(f"{shape.name}_auto_over_best", [ran["auto"]["measured"]["step_seconds"] / min(fixed)])
    digests = {policy: row["state_digest"] for policy, row in ran.items()}
    if different := len(set(digests.values())):
        figures.add(f"{shape.name}_different_digests", [different])
    if different > 1:
        failed.append(f"{different} different state digests")
    return {"ceiling": ceiling, "micro_batch": micro_batch, "state": state, "policies": list(ran),
            "does_not_fit": refused, **gpu.failure(failed),
            "state_digest": digests if different > 1 else next(iter(digests.values()), None)}


def measure_without_norm(device, shape, policies, run, figures):
    """Adds the figures; returns what failed. What is trained is unclipped: the digest is another, one for all policies."""
    failed, digests = [], set()
    for policy in policies:
        try:
            row = device.steps(policy, *run, *WITHOUT_NORM)
        except harness.BenchError as error:
            failed.append(f"{policy} without the norm: {error}")
        else:
            add_figures(f"{shape.name}_{policy}_without_norm", row, figures)
            digests.add(row["state_digest"])
    return failed + ([f"{len(digests)} different state digests without the norm"] if len(digests) > 1 else [])


def race_deepspeed(device, python, shape, micro_batch, figures):
    """Races DeepSpeed within the same memory; returns the failure of either side, if there is one."""
    try:
        theirs = device.peer(python, harness.ROOT / "bench" / "peers" / "deepspeed_gpt2.py", "--steps", device.step_count + 3,
                             "--sequence", shape.sequence, "--batch", micro_batch, "--shape",
                             "tiny" if gpu.SMALL else "gpt2-xl")
    except harness.BenchError as error:
        return {"deepspeed": gpu.failure([str(error)])}
    memory = theirs["device_bytes"]
    figures.add("deepspeed_device_bytes", [memory])
    figures.add("deepspeed_step_seconds", theirs["step_seconds"][3:])
    under = ["--device-memory", memory] if memory else []
    try:
        row = device.steps("auto", *device.run_of(shape, micro_batch, "fp32", *under))
    except harness.BenchError as error:
        return {"beside_deepspeed": gpu.failure([f"under its {memory} bytes: {error}"])}
    seconds = row["measured"]["step_seconds"]
    figures.add("deepspeed_over_ours", [each / seconds for each in theirs["step_seconds"][3:]])
    return {}


def measure():
    harness.build("tandem", "bench_gpu")
    figures = harness.Figures()
    settings, failed = {}, []
    shapes = gpu.shapes()
    with gpu.the_gpu() as device:
        device.rates("copy/")
        device.calibrate()
        for shape in shapes:
            with gpu.going_on(settings, shape.name):
                settings[shape.name] = compare(device, shape, CEILINGS[shape.name], figures)
            failed += gpu.failures_in(settings, shape.name)
        ours = settings.get(gpu.GPT2_XL.name, {})
        if "micro_batch" in ours and (python := gpu.python_with("deepspeed")):
            settings |= race_deepspeed(device, python, gpu.GPT2_XL, ours["micro_batch"], figures)
            failed += gpu.failures_in(settings, "beside_deepspeed")
    return figures.line("gpu-policies", settings=settings, failed=failed, **device.facts)
