"""speculate-kernels: of speculate the kernels and their records alone, for when kernels change."""
import harness
import speculate


def measure():
    harness.build("bench_speculate")
    figures = harness.Figures()
    speculate.add_kernels(figures)
    speculate.add_bytes(figures)
    return speculate.line("speculate-kernels", figures)
