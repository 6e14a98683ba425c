#!/usr/bin/env python3
"""Prints what each compiled kernel takes, and checks that none keeps anything in a stack frame.

Usage: check_resources.py CUOBJDUMP FILE

FILE is an object, archive or program with CUDA code. One line for each kernel and architecture: registers, shared
bytes, and how many of a multiprocessor's threads the registers allow (65,536 of them, of 2,048 threads). Registers
that spill lie in the stack frame, so that a frame of any size is a fault. Ends with 1 where there is one, or where
FILE has no kernel at all.
"""
import re
import subprocess
import sys

REGISTERS = 65536
THREADS = 2048
FUNCTION = re.compile(r"Function (\S+):")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
ARCHITECTURE = re.compile(r"arch = (sm_\d+)")
NAME = re.compile(r"\d([a-z_]+_kernel)(.*)")


def short(symbol):
    """The kernel's own name and the types that it is made for, from its mangled name."""
    found = NAME.search(symbol)
    if not found:
        return symbol
    types = re.match(r"I(.*?)E+v", found.group(2))
    return found.group(1) + (f" <{types.group(1)}>" if types else "")


def main(arguments):
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    text = subprocess.run([arguments[1], "--dump-resource-usage", arguments[2]], check=True, capture_output=True,
                          text=True).stdout
    architecture, symbol, kernels, faults = "", "", 0, 0
    for line in text.splitlines():
        architecture = (ARCHITECTURE.search(line) or [None, architecture])[1]
        symbol = (FUNCTION.search(line) or [None, symbol])[1]
        usage = USAGE.search(line)
        if not usage:
            continue
        registers, stack, shared = map(int, usage.groups())
        kernels += 1
        faults += stack > 0
        # Registers are given out by 8 for each thread of a warp.
        occupancy = min(THREADS, REGISTERS // (-(-registers // 8) * 8) // 32 * 32) / THREADS
        print(f"{architecture} {registers:4} registers {shared:6} shared {occupancy:5.0%}  {short(symbol)}"
              + (f"  STACK {stack}" if stack else ""))
    print(f"{kernels} kernels, {faults} with a stack frame")
    return 1 if faults or kernels == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
