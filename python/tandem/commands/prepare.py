"""`tandem prepare`: the command line of tools/prepare_data.py."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from ..finetuning import tools
from ..finetuning.refusal import Refusal


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        tool = tools.load("prepare_data")
    except Refusal as refusal:
        print(f"tandem: error: {refusal}", file=sys.stderr)
        return refusal.code
    code: int = tool.main(list(arguments), "tandem prepare")
    return code
