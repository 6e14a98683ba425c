#!/usr/bin/env python3
"""scripts/bench: run one benchmark with its peers, and end with one line of JSON.

  scripts/bench --list
  scripts/bench adam
  scripts/bench cpu-train --save
"""
import argparse
import json
import sys

import acceptance
import adam
import adam_before
import adapters
import beside_torch
import checkpoint
import cpu_experts
import cpu_train
import engine
import five_policies
import gpu_kernels
import gpu_policies
import gpu_training
import harness
import instruction_sets
import metrics
import overlap
import packing
import predict
import published
import ranks
import sample
import simulate
import speculate
import speculate_kernels
import state_file
import streaming

BENCHMARKS = {"acceptance": acceptance, "adam": adam, "adam-before": adam_before, "adapters": adapters,
              "checkpoint": checkpoint, "cpu-experts": cpu_experts, "cpu-train": cpu_train,
              "engine": engine,
              "five-policies": five_policies, "gpu-kernels": gpu_kernels, "gpu-policies": gpu_policies,
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
    # What could be measured is kept; that a figure of tandem's own is missing is told by the end.
    for what in (failed := result.get("failed", [])):
        print(f"bench: {what}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
