#!/usr/bin/env python3
"""Prints what each compiled kernel takes, and checks that none keeps anything in a stack frame.

Usage: check_resources.py CUOBJDUMP FILE [TABLE NVCC]

FILE is an object, archive or program with CUDA code. One line for each kernel and architecture: registers, static
shared bytes, threads of a block, and how many of a multiprocessor's threads can be resident at once. Registers that
spill lie in the stack frame, so that a frame of any size is a fault. Ends with 1 where there is one, or where FILE has
no kernel at all. With TABLE, the same is written there for people, with the version that NVCC says.
"""
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

REGISTERS = 65536  # registers of a multiprocessor
THREADS = 2048
BLOCKS = 32
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
FUNCTION = re.compile(r"Function (\S+):")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
ARCHITECTURE = re.compile(r"arch = (sm_\d+)")
QUALIFIER = re.compile(r"tandem::|gpu::|\(anonymous namespace\)::")
NAME = re.compile(r"(\w+_kernel)(<.*>)?\(")
INFO = re.compile(r"^\.nv\.info\.(\S+)")
BLOCK = re.compile(r"Value:\s+0x([0-9a-f]+) 0x1 0x1")

Kernel = namedtuple("Kernel", "architecture name registers stack shared threads occupancy")


def short(symbol):
    """The kernel's own name and what it is made for."""
    text = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    text = QUALIFIER.sub("", text)
    found = NAME.search(text)
    return found[1] + (found[2] or "") if found else text


def occupancy(architecture, registers, shared, threads):
    """The share of a multiprocessor's threads that its blocks of this kernel come to."""
    # Registers are given out by 256 for each warp, shared memory with a KiB of the system's for each block, which what
    # is said of sm_90 already holds.
    warps = -(-threads // 32)
    blocks = min(BLOCKS, THREADS // threads, REGISTERS // (-(-registers * 32 // 256) * 256) // warps)
    if architecture in SHARED:
        blocks = min(blocks, SHARED[architecture] // (max(shared, 1024) if architecture == "sm_90" else shared + 1024))
    return blocks * threads / THREADS


def dump(cuobjdump, what, file):
    return subprocess.run([cuobjdump, what, file], check=True, capture_output=True, text=True).stdout.splitlines()


def threads_of_blocks(cuobjdump, file):
    """Most threads of a block by architecture and symbol."""
    found, architecture, symbol, next_is = {}, "", "", False
    for line in dump(cuobjdump, "--dump-elf", file):
        architecture = (ARCHITECTURE.search(line) or [None, architecture])[1]
        symbol = (INFO.match(line) or [None, symbol])[1]
        value = BLOCK.search(line)
        if value and next_is:
            found[architecture, symbol] = int(value[1], 16)
        next_is = "EIATTR_MAX_THREADS" in line or (next_is and not value)
    return found


def kernels_of(cuobjdump, file):
    threads = threads_of_blocks(cuobjdump, file)
    architecture, symbol = "", ""
    for line in dump(cuobjdump, "--dump-resource-usage", file):
        architecture = (ARCHITECTURE.search(line) or [None, architecture])[1]
        symbol = (FUNCTION.search(line) or [None, symbol])[1]
        usage = USAGE.search(line)
        if usage:
            registers, stack, shared = map(int, usage.groups())
            block = threads.get((architecture, symbol), 1024)
            yield Kernel(architecture, short(symbol), registers, stack, shared, block,
                         occupancy(architecture, registers, shared, block))


def write_table(path, nvcc, kernels):
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    version = re.search(r"release [\d.]+, V([\d.]+)", version)[1]
    lines = ["# What the kernels take", "",
             "Written by `cmake --build build --target kernel_resources` from the compiled code, with nvcc "
             f"{version}.", "",
             "Occupancy is the share of a multiprocessor's 2,048 threads that can be resident at once, as registers, "
             "static shared",
             "memory and the threads of a block allow. Attention, backward of norms, and products of experts on tensor "
             "cores",
             "ask for dynamic shared memory beside it, which is not counted.", "",
             "| kernel | architecture | threads of a block | registers | static shared bytes | occupancy |",
             "|---|---|---:|---:|---:|---:|"]
    for k in sorted(kernels, key=lambda k: (k.name, k.architecture)):
        lines.append(f"| `{k.name}` | {k.architecture} | {k.threads} | {k.registers} | {k.shared} | {k.occupancy:.0%} |")
    Path(path).write_text("\n".join(lines) + "\n")


def main(arguments):
    if len(arguments) not in (3, 5):
        print(__doc__, file=sys.stderr)
        return 2
    kernels = list(kernels_of(arguments[1], arguments[2]))
    for k in kernels:
        print(f"{k.architecture} {k.registers:4} registers {k.shared:6} shared {k.threads:5} threads "
              f"{k.occupancy:5.0%}  {k.name}" + (f"  STACK {k.stack}" if k.stack else ""))
    faults = sum(k.stack > 0 for k in kernels)
    print(f"{len(kernels)} kernels, {faults} with a stack frame")
    if len(arguments) == 5:
        write_table(arguments[3], arguments[4], kernels)
    return 1 if faults or not kernels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
