#!/usr/bin/env python3
"""scripts/bench: run one benchmark with its peers, and end with one line of JSON.

  scripts/bench --list
  scripts/bench adam
  scripts/bench cpu-train --save
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "losses"))  # benchmarks that compare losses, not times

import acceptance  # noqa: E402
import adam  # noqa: E402
import adam_before  # noqa: E402
import adapters  # noqa: E402
import beside_torch  # noqa: E402
import checkpoint  # noqa: E402
import cpu_experts  # noqa: E402
import cpu_train  # noqa: E402
import engine  # noqa: E402
import five_policies  # noqa: E402
import fp8  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_policies  # noqa: E402
import gpu_training  # noqa: E402
import harness  # noqa: E402
import instruction_sets  # noqa: E402
import metrics  # noqa: E402
import overlap  # noqa: E402
import packing  # noqa: E402
import predict  # noqa: E402
import published  # noqa: E402
import ranks  # noqa: E402
import sample  # noqa: E402
import simulate  # noqa: E402
import speculate  # noqa: E402
import speculate_kernels  # noqa: E402
import state_file  # noqa: E402
import streaming  # noqa: E402

BENCHMARKS = {"acceptance": acceptance, "adam": adam, "adam-before": adam_before, "adapters": adapters,
              "checkpoint": checkpoint, "cpu-experts": cpu_experts, "cpu-train": cpu_train,
              "engine": engine,
              "five-policies": five_policies, "fp8": fp8, "gpu-kernels": gpu_kernels, "gpu-policies": gpu_policies,
              "gpu-training": gpu_training, "metrics": metrics, "overlap": overlap, "packing": packing, "predict": predict,
              "published": published, "ranks": ranks, "sample": sample, "simulate": simulate, "speculate": speculate, "speculate-kernels": speculate_kernels,
              "state-file": state_file, "streaming": streaming,
              "torch": beside_torch}


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="which one")
    parser.add_argument("--list", action="store_true", help="name them and end")
    parser.add_argument("--save", action="store_true", help="also write the line to bench/results/")
    parser.add_argument("--instruction-set", choices=list(instruction_sets.SETS),
                        help="limit of what tandem and its peers may use of the processor; saved as NAME-SET.json")
    args = parser.parse_args()
    if args.list:
        for module in BENCHMARKS.values():
            print(module.__doc__.splitlines()[0])
        return 0
    if args.name is None:
        parser.error("which benchmark? --list names them")
    if args.instruction_set:
        harness.limit_instruction_set(args.instruction_set)
    try:
        result = BENCHMARKS[args.name].measure()
    except (harness.BenchError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.save:
        harness.save(result)
    print(json.dumps(result))
    # Measured figures are kept; the end tells that one of tandem's own is missing.
    for what in (failed := result.get("failed", [])):
        print(f"bench: {what}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
