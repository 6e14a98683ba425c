"""Parameters of PyTorch modules whose weights lie in an engine's memory on the device.

The data of each parameter becomes a tensor over `OffloadEngine.resident_weights`, so that a module computes with the weights that
updates write, without a copy. What a program writes into a parameter between steps is noticed by the parameter's version or by a sum
of its bits, and goes into the masters before anything reads them.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy
import torch

from .._core import OffloadEngine, ParameterLayout
from ..errors import MisuseError
from ..types import FloatArray
from .tensors import tensor_of

#: Elements of a layer of the engine, at which the next one begins: a gradient buffer has the size of the largest.
LAYER_ELEMENTS = 1 << 22
#: Dimensions that the engine's layouts know; of more a parameter is laid out flat.
_MOST_DIMENSIONS = 8

#: Types of weights, as the engine names them.
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclasses.dataclass(eq=False)
class Held:
    """One parameter. `name` is the one that users know, `full_name` that of the engine's layout."""

    tensor: torch.nn.Parameter
    name: str
    group: int
    weight: str = ""
    layer: int = -1
    full_name: str = ""
    short_name: str = ""
    data: torch.Tensor | None = None  # over the engine's memory, of the parameter's shape
    version: int = -1  # version of the parameter, as the engine last wrote or saw it
    bits: torch.Tensor | None = None  # sum of the bits of `data` at that time

    def text(self) -> str:
        return f"parameter '{self.name}'"


def check_parameter(tensor: torch.nn.Parameter, name: str, empty: bool = False) -> None:
    """Raises MisuseError for a parameter that an engine cannot hold; with `empty` it may have no memory yet."""
    data = tensor.data
    if type(data) is not torch.Tensor:
        raise MisuseError(f"parameter '{name}' is a {type(data).__name__}: only plain tensors can be held; sharded and quantized "
                          "ones belong to another library")
    if data.layout is not torch.strided or (data.is_meta and not empty):
        raise MisuseError(f"parameter '{name}' has no dense memory ({'meta' if data.is_meta else data.layout}): load its weights first")
    if data.dtype not in DTYPES:
        raise MisuseError(f"parameter '{name}' is {data.dtype}: weights are bfloat16 or float32; convert the model by "
                          "model.to(torch.bfloat16)")


def check_memory(parameters: Sequence[Held]) -> None:
    """Raises MisuseError where two parameters share memory without being one object, which would tear them apart."""
    def extent(held: Held) -> tuple[int, int]:
        data = held.tensor.data
        last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        return data.data_ptr(), data.data_ptr() + (last + 1) * data.element_size()

    placed = sorted((*extent(held), i) for i, held in enumerate(parameters))
    for (_, end, a), (begin, _, b) in zip(placed, placed[1:], strict=False):
        if begin < end:
            raise MisuseError(f"parameters '{parameters[a].name}' and '{parameters[b].name}' share memory and are two objects: tie "
                              "them by making them one torch.nn.Parameter")


def layout_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Shape of a parameter in the engine's layout."""
    return tuple(parameter.shape) if 0 < parameter.dim() <= _MOST_DIMENSIONS else (parameter.numel(),)


def common_device(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.device:
    """The device that all parameters are on. Raises MisuseError where there are several, or it is neither CPU nor CUDA."""
    devices = {parameter.device: name for name, parameter in parameters}
    if len(devices) > 1:
        raise MisuseError("parameters are on several devices: " + ", ".join(f"'{name}' on {device}" for device, name in devices.items()))
    device = next(iter(devices))
    if device.type not in ("cpu", "cuda"):
        raise MisuseError(f"parameters are on {device}: tandem knows the devices cpu and cuda")
    return device


class HeldParameters:
    """The parameters of one engine, in the order in which forward is taken to use them. Their gradients are declared whole."""

    def __init__(self, parameters: Sequence[Held]) -> None:
        self.all = list(parameters)
        self.layers: list[list[Held]] = []
        self.layout = ParameterLayout()
        self._assign_layers()
        self._declare()

    def _assign_layers(self) -> None:
        """Parameters that follow each other share a layer until it is full."""
        elements = 0
        for held in self.all:
            count = held.tensor.numel()
            if not self.layers or elements + count > LAYER_ELEMENTS:
                self.layers.append([])
                elements = 0
            elements += count
            held.layer = len(self.layers) - 1
            self.layers[-1].append(held)

    def _declare(self) -> None:
        for index, members in enumerate(self.layers):
            layer = self.layout.add_layer(f"unit{index}")
            for held in members:
                held.weight = held.weight or DTYPES[held.tensor.dtype]
                held.short_name, held.full_name = held.name, f"unit{index}.{held.name}"
                layer.add(held.short_name, layout_shape(held.tensor), group=held.group, weight=held.weight,
                          gradient="bf16" if held.weight == "bf16" else "f32")

    def move_into(self, engine: OffloadEngine) -> None:
        """Gives the weights to an engine and makes each parameter's data the engine's memory."""
        by_name = {held.full_name: held for held in self.all}
        engine.initialize(lambda parameter: by_name[parameter.full_name].tensor.detach().contiguous().cpu())
        for held in self.all:
            held.data = tensor_of(engine.resident_weights(held.full_name)).view(held.tensor.shape)
            held.tensor.data = held.data
            held.version = held.tensor._version
        self.remember(self.all)

    def move_out(self) -> None:
        """Gives each parameter that is still the engine's memory of its own."""
        for held in self.all:
            if held.data is not None and held.tensor.data_ptr() == held.data.data_ptr():
                held.tensor.data = held.data.clone()
            held.data = None

    def mark_updated(self, changed: Iterable[Held]) -> None:
        """Says that the engine writes weights: autograd refuses graphs that were made with the older ones. To be remembered once
        they are written."""
        for held in changed:
            torch.autograd.graph.increment_version(held.tensor)
            held.version = held.tensor._version

    @staticmethod
    def remember(written: Iterable[Held]) -> None:
        """Notes which weights the engine has written, to know what the program writes later."""
        for held in written:
            assert held.data is not None
            held.bits = sum_of_bits(held.data)

    def require_unchanged(self) -> None:
        """Raises MisuseError for a parameter that has changed its device, type or shape since the engine took it."""
        for held in self.all:
            mine, now = held.data, held.tensor.data
            assert mine is not None
            if (now.device, now.dtype, now.shape) == (mine.device, mine.dtype, mine.shape):
                continue
            raise MisuseError(f"{held.text()} is {now.dtype} of {tuple(now.shape)} on {now.device}, and was {mine.dtype} of "
                              f"{tuple(mine.shape)} on {mine.device} when the optimizer was made: move and convert the model first, then "
                              "make the optimizer")

    def take_writes(self, engine: OffloadEngine) -> None:
        """Takes over what the program has written into parameters since the last update."""
        self.take_marked_writes(engine)
        self.take_written(engine, self.written([(held, sum_of_bits(held.tensor.detach())) for held in self.all]))

    def take_marked_writes(self, engine: OffloadEngine) -> None:
        """Takes over writes that versions and addresses tell of: all but those by way of `.data`, which bits alone show."""
        self.require_unchanged()
        self.take_written(engine, [held for held in self.all if held.tensor._version != held.version or self._moved(held)])

    @staticmethod
    def written(sums: Sequence[tuple[Held, torch.Tensor]]) -> list[Held]:
        """Parameters whose bits, by their sums now, are others than the engine wrote."""
        now = torch.stack([bits for _, bits in sums])
        then = torch.stack([held.bits for held, _ in sums if held.bits is not None])
        return [held for (held, _), differs in zip(sums, (now != then).tolist(), strict=True) if differs]

    def take_written(self, engine: OffloadEngine, written: Iterable[Held]) -> None:
        """Takes over what the program has written into these."""
        for held in written:
            self._take_write(engine, held)

    @staticmethod
    def _moved(held: Held) -> bool:
        assert held.data is not None
        return held.tensor.data_ptr() != held.data.data_ptr()

    def _take_write(self, engine: OffloadEngine, held: Held) -> None:
        assert held.data is not None
        written = held.tensor.detach().contiguous().cpu().clone()
        engine.write(held.full_name, masters_of(written, engine.read(held.full_name)))
        if self._moved(held):
            held.tensor.data = held.data
        held.version = held.tensor._version
        self.remember([held])


def sum_of_bits(data: torch.Tensor) -> torch.Tensor:
    """Sum of the memory's 64-bit words modulo 2^64, and of what is left over: int64, of no dimension, on the data's device."""
    flat = (data if data.is_contiguous() else data.contiguous()).view(-1).view(torch.int16)
    whole = flat.numel() // 4 * 4
    if flat.storage_offset() % 4 or whole == 0:
        return flat.sum(dtype=torch.int64)
    words = flat[:whole].view(torch.int64).sum()
    return words if whole == flat.numel() else words + flat[whole:].sum(dtype=torch.int64)


def masters_of(written: torch.Tensor, before: FloatArray) -> FloatArray:
    """Masters (fp32) whose weights are what was written: with the lower 16 bits of those before, so that where nothing was
    written no bit changes, and the same under every plan, whether or not the weight is part of the stored master."""
    if written.dtype is torch.float32:
        return written.numpy()
    upper = written.view(torch.int16).numpy().view(numpy.uint16).reshape(before.shape).astype(numpy.uint32)
    lower = before.view(numpy.uint32) & 0xFFFF
    lower = numpy.where((upper & 0x7FFF == 0) & (lower >= 0x8000), 0, lower)  # would be carried below zero
    carried = (upper - (lower >> 15)) & 0xFFFF  # see join_master in docs/numerics.md
    return (carried << 16 | lower).astype(numpy.uint32).view(numpy.float32)
