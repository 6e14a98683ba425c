"""Values of command lines."""
from __future__ import annotations

import argparse
from collections.abc import Callable


def number(least: float, most: float, kind: type[float] = float, *, above: bool = False) -> Callable[[str], float]:
    """Reader of a number in a range; `kind` is float or int. `above`: whether the least itself is refused."""
    def convert(text: str) -> float:
        value = kind(text)
        if above and value == least:
            raise argparse.ArgumentTypeError(f"{text} is not above {least:g}")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
        return value

    convert.__name__ = "whole number" if kind is int else "number"
    return convert
