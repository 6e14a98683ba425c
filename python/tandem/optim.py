"""Optimizers of PyTorch's interface over the engine. Imports torch."""
from .errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise UsageError("tandem.optim: PyTorch is not installed; pip install torch") from None

from .pytorch.adamw import AdamW

__all__ = ["AdamW"]
