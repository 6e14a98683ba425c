"""Trainers of Hugging Face's libraries over the engine. Imports torch."""
from .errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise UsageError("tandem.hf: PyTorch is not installed; pip install torch") from None

from .pytorch.trainer import Config, trainer

__all__ = ["Config", "trainer"]
