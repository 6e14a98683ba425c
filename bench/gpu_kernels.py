"""gpu-kernels: kernels that memory bounds beside the GPU's own copies, and products and attention beside a square product."""
import statistics

import gpu
import harness

COPY, SQUARE = "copy/device_to_device", "product/forward/square"


def figure_name(name):
    return name.replace("/", "_")


def measure():
    harness.build("bench_gpu")
    figures = harness.Figures()
    with gpu.the_gpu() as device:
        samples = device.rates(".")
    medians = {name: statistics.median(rates) for name, rates in samples.items()}
    over_copy = {name: medians[name] / medians[COPY] for name in medians if name.startswith("kernel/")}
    figures.add("worst_kernel_over_copy", [min(over_copy.values())])
    for name, rates in samples.items():
        if name.startswith("copy/"):
            figures.add(f"{figure_name(name)}_bytes_per_second", rates)
        elif name in over_copy:
            figures.add(f"{figure_name(name)}_over_copy", [rate / medians[COPY] for rate in rates])
        else:
            figures.add(f"{figure_name(name)}_flop_per_second", rates)
            figures.add(f"{figure_name(name)}_over_square", [rate / medians[SQUARE] for rate in rates])
    return figures.line("gpu-kernels", **device.facts)
