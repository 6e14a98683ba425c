"""Modules of PyTorch streamed through the device, unit by unit. Imports torch."""
from .errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise UsageError("tandem.stream: PyTorch is not installed; pip install torch") from None

from .pytorch.streaming import StreamedModule, StreamOptimizer, stream
from .pytorch.weight_files import empty_parameters

__all__ = ["StreamedModule", "StreamOptimizer", "empty_parameters", "stream"]
