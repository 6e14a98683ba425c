"""The instruction sets that this machine has, and how a program is limited to one of them.

  instruction_sets.py SET PROGRAM ARGUMENT...   runs PROGRAM under SET; ends with 77, which CTest counts as skipped, where
                                                there is nothing to add to a run without a limit
"""
import os
import pathlib
import sys

# Least first. By TANDEM_MAX_ISA for tandem's own loops, by ONEDNN_MAX_CPU_ISA for oneDNN.
LIMITS = {"scalar": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
FLAGS = {"scalar": "sse4_1", "avx2": "avx2", "avx512": "avx512bw"}  # of /proc/cpuinfo


def sets_here():
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    return [name for name in LIMITS if FLAGS[name] in flags]


def limits(name):
    return {"TANDEM_MAX_ISA": name, "ONEDNN_MAX_CPU_ISA": LIMITS[name]}


def main(name, *command):
    here = sets_here()
    if name not in here:
        print(f"this processor has no {name}: tested are {' and '.join(here)}")
        return 77
    if name == here[-1]:
        print(f"{name} is the best that this processor has: what runs without a limit tests it")
        return 77
    os.execvpe(command[0], command, {**os.environ, **limits(name)})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
