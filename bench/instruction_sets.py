"""Instruction sets that this machine has, and the limits by which programs keep to one of them; for benchmarks and tests."""
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InstructionSet:
    flag: str   # word in /proc/cpuinfo
    dnnl: str   # ONEDNN_MAX_CPU_ISA
    torch: str  # ATEN_CPU_CAPABILITY
    mkl: str    # MKL_ENABLE_INSTRUCTIONS


# Least first, by the names of TANDEM_MAX_ISA.
SETS = {"scalar": InstructionSet("sse4_1", "SSE41", "default", "SSE4_2"),
        "avx2": InstructionSet("avx2", "AVX2", "avx2", "AVX2"),
        "avx512": InstructionSet("avx512bw", "AVX512_CORE", "avx512", "AVX512")}


def sets_here():
    """Names of those that the processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return [name for name, of in SETS.items() if of.flag in flags]


def limits(name):
    """Environment that limits tandem's own loops and oneDNN."""
    return {"TANDEM_MAX_ISA": name, "ONEDNN_MAX_CPU_ISA": SETS[name].dnnl}


def limits_of_peers(name):
    """Environment that limits PyTorch and its MKL to an instruction set."""
    return {"ATEN_CPU_CAPABILITY": SETS[name].torch, "MKL_ENABLE_INSTRUCTIONS": SETS[name].mkl}
