"""Tensors over memory of the engine, and streams of PyTorch's as streams of tandem's."""
from __future__ import annotations

import torch

from .. import _core
from .._core import Device, Stream, Tensor, Weights
from ..errors import MisuseError

#: DLPack's word for "the consumer orders its own work".
NO_ORDER = -1


def tensor_of(view: Tensor) -> torch.Tensor:
    """A tensor over the memory of a view. On the host it waits until the memory has its contents; on a GPU the caller sees to it
    that the current stream of PyTorch is one that the memory was asked for on, or waits for."""
    on_host = view.__dlpack_device__()[0] == 1
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(view.__dlpack__(stream=None if on_host else NO_ORDER))
    return made


def tensors_of(guard: Weights, on_host: bool) -> list[torch.Tensor]:
    """Tensors over all weights of a guard, in the layer's order, each as `tensor_of` makes it."""
    return [torch._C._from_dlpack(capsule) for capsule in guard.capsules(stream=None if on_host else NO_ORDER)]


def is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the bytes at the address of a tensor are its elements, dense and in order."""
    return tensor.dtype is dtype and tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() != 0


def open_device_for(device: str | Device, parameters: torch.device | None) -> tuple[Device, torch.device]:
    """A device of tandem's by name, or one that is open; and the same as PyTorch names it. "auto" is that of the parameters where they
    have memory. Raises MisuseError where they are elsewhere."""
    if isinstance(device, str):
        wanted = device if device != "auto" or parameters is None else "host" if parameters.type == "cpu" else f"cuda:{parameters.index or 0}"
        device = _core.open_device(wanted)
    number = device.name.partition(":")[2].partition(" ")[0]
    target = torch.device("cpu") if device.kind == "host" else torch.device("cuda", int(number or 0))
    if parameters is not None and parameters.type != target.type:
        raise MisuseError(f"parameters are on {parameters}, and the device is {device.name}: move the module first")
    return device, parameters or target


class CurrentStream:
    """The stream that PyTorch works on: on a GPU its current one, on the host a stream of tandem's, where work of PyTorch is done
    when the call that made it returns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._own = device.make_stream("torch") if device.kind == "host" else None

    def get(self) -> Stream:
        """The stream of this moment and this thread."""
        return self._own or self._device.wrap_stream(torch.cuda.current_stream().cuda_stream)

    def wait_on_host(self) -> None:
        """Waits for the work queued on the host's stream; on a GPU PyTorch's own work is queued behind it."""
        if self._own is not None:
            self._own.synchronize()
