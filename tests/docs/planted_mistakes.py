#!/usr/bin/env python3
"""Shows that check_pages.py can fail: writes one mistake of each kind into a copy of a page.

Usage: planted_mistakes.py ROOT

The pages must be right as they are; each mistake must be reported, with its page and rule, and what is right must not.
"""
import sys
from pathlib import Path

import check_pages

# page, line that is added to it, rule that must be named (None: must pass)
PLANTED = [
    ("README.md", "See [a page](docs/nowhere.md).", "link"),
    ("docs/cuda.md", "See [a part](performance-model.md#no-such-part).", "link"),
    ("README.md", "See [this page](#nowhere).", "link"),
    ("docs/cuda.md", "See [this page](#messages).", "link"),
    ("docs/cuda.md", "See [security](../SECURITY.md).", "link"),
    ("docs/design/0001-host-device-first.md", "See [security](../../SECURITY.md).", "link"),
    ("core/base/README.md", "![a picture](../../docs/pictures/none.svg)", "link"),
    ("docs/architecture.md", "`core/error.hpp` moved.", "path"),
    ("docs/architecture.md", "`core/base/{error,errors}.hpp`", "path"),
    ("CONTRIBUTING.md", "1. `train/config.hpp`: the member", "path"),
    ("CONTRIBUTING.md", "`lower_everything.cpp` emits tasks.", "path"),
    ("offload/README.md", "`no_such_*.hpp`", "path"),
    ("docs/trace.md", "`tools/draw_traces.py trace.json`", "path"),
    ("docs/getting-started.md", "`scripts/quickstarts` trains.", "path"),
    ("docs/fine-tuning.md", "**tandem has not run on a GPU yet**; figures are plans.", "gpu"),
    ("docs/fine-tuning.md", "With a card of 12 GB tandem has\nnot yet been run.", "gpu"),
    ("docs/what-fits.md", "No run on a GPU stands behind them yet.", "gpu"),
    ("README.md", "Smaller cards have not been run.", "gpu"),
    ("README.md", "Several GPUs train one model, which no two GPUs have run yet.", "gpu"),
    ("docs/cuda.md", "None of this has been run below Windows.", "gpu"),
    ("docs/cuda.md", "| H100 | was never run on it |", "gpu"),
    ("bench/README.md", "The CUDA device is untested on an H100.", "gpu"),
    ("docs/trace.md", "- `fold_gradient` of pieces", "stale"),
    ("docs/performance-model.md", "The simulator walks the same unfolder.", "stale"),
    ("bench/results/README.md", "\n| file | on the H100 | on the H200 |\n|---|---|---|\n| `gpu-nothing.json` | all | |", "table"),
    # Right texts must pass, or the check would prove nothing.
    ("README.md", "See [the bundle](docs/cuda.md#the-bundle), [this](#further) and [a site](https://example.org/x).", None),
    ("docs/cuda.md", "It has run on an H100. What has run is in `bench/results/README.md`.", None),
    ("docs/cuda.md", "Nothing runs on a default stream of the GPU, and no GPU is needed to plan.", None),
    ("docs/data.md", "`NAME.mask.bin`, `data/train.bin`, `build/tandem`, `--json`, `model/`, `runs/chat`", None),
    ("docs/architecture.md", "`core/base/{error,hash128}.hpp`, `adam_*.cpp`, `tandem/tandem.hpp`, `scripts/bench NAME`, `core/`", None),
    ("docs/architecture.md", "```\nsee `core/error.hpp` and [x](none.md)\n```", None),
    ("bench/results/README.md", "Any other card has not been run on: that GPU is in the list.", None),
]


def main():
    root = Path(sys.argv[1]).resolve()
    wrong = list(check_pages.mistakes(root))
    tree = check_pages.names_of(root)
    for page, line, rule in PLANTED:
        text = (root / page).read_text()
        first = len(text.splitlines()) + 1
        found = [f for f in check_pages.mistakes_of(root, Path(page), text + "\n" + line + "\n", tree) if f[0] > first - 1]
        if {f[1] for f in found} != ({rule} if rule else set()):
            wrong.append(f"{page}: {line!r} gave {found}, wanted {rule}")
    print("\n".join(wrong) or f"{len(PLANTED)} lines judged rightly")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
