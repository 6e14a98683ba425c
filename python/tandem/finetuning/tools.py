"""The modules that prepare data: of the installed package, or of the source tree that it was built in."""
from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from .refusal import Refusal


def folder() -> Path:
    """The folder of `preparation` and prepare_data.py. Raises Refusal where there is none."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "share" / "tandem" / "tools", *(parent / "tools" for parent in package.parents[:3])):
        if (place / "preparation" / "run.py").is_file():
            return place
    raise Refusal(f"{package}: the tools that prepare data are missing; install tandem-trainer again", 1)


def load(name: str) -> Any:
    """A module of that folder, such as preparation.run."""
    place = str(folder())
    if place not in sys.path:
        sys.path.insert(0, place)
    return importlib.import_module(name)
