#!/usr/bin/env python3
"""Say what scripts/quickstart achieved; end with 1 unless the model beats the bigram entropy.

Example: tools/quickstart_report.py --run build/quickstart/run --held-out build/quickstart/text/held-out
"""
import argparse
import json
import sys
from pathlib import Path

from bigram_entropy import conditional_entropy, contents


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--held-out", type=Path, required=True, help="folder of the held-out text")
    parser.add_argument("--program", default="build/tandem", help="how to call tandem in the next command")
    args = parser.parse_args()

    try:
        summary = json.loads((args.run / "summary.json").read_text())
        first, last, held_out = (float(summary[key]) for key in ("first_loss", "final_loss", "eval_loss"))
        bigram = conditional_entropy(contents([args.held_out]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"quickstart_report: cannot judge the run in {args.run}: {error}", file=sys.stderr)
        return 1

    print(f"training loss    {first:.4f} at the first step, {last:.4f} at step {summary['steps']}")
    print(f"validation loss  {held_out:.4f} nats per byte over whole held-out files")
    print(f"bigram entropy   {bigram:.4f} nats per byte of the same text: no bigram model can do better")
    print(f"state digest     {summary.get('state_digest')}")
    if not held_out < bigram:
        print("quickstart_report: the validation loss does not beat the bigram entropy", file=sys.stderr)
        return 1
    print("\nnext: the same training with every update on the CPU; it ends with the same state digest:")
    print(f"  {args.program} train --config {args.run}/config.toml --policy host --out {args.run}-host")
    return 0


if __name__ == "__main__":
    sys.exit(main())
