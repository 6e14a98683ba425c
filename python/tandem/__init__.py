"""tandem: trains models that do not fit on their GPU, in Python over the public C++ interface.

Weights, gradients and Adam state of a layered model are kept where a plan says; each layer is brought to the device just in
time, and updated on the CPU or the GPU. Results have the same bits under every plan. A trainer with a forward and backward
of its own uses `OffloadEngine`; docs/python.md is a walk through it. `tandem.optim` has an optimizer for PyTorch.
"""
import importlib as _importlib
import typing as _typing

from ._core import (
    AdamW,
    Candidate,
    Choice,
    Device,
    DeviceInfo,
    EngineCounters,
    Evaluation,
    Figure,
    Gradients,
    GroupValues,
    LaneSeconds,
    Layer,
    LayerBuilder,
    LayerSeconds,
    MachineProfile,
    MemoryEntry,
    OffloadEngine,
    OffloadOptions,
    Parameter,
    ParameterLayout,
    ParameterOptions,
    Plan,
    PlanningFacts,
    Shares,
    Simulation,
    StepReport,
    Stream,
    Subgroup,
    Tensor,
    Weights,
    make_plan,
    open_device,
    parse_profile,
    read_profile,
    smallest_device_memory,
    version,
)
from .errors import (
    DeviceError,
    Error,
    InputError,
    MisuseError,
    PeerError,
    PlanError,
    StalledError,
    TrainingError,
    UsageError,
    WriteError,
)
from .planning import calibrate, plan, profile, shipped_profiles, simulate

if _typing.TYPE_CHECKING:
    from . import hf as hf
    from . import optim as optim
    from .streaming import empty_parameters as empty_parameters
    from .streaming import stream as stream

__version__: str = version


def __getattr__(name: str) -> _typing.Any:
    """Names that import torch, when they are first used."""
    if name in ("optim", "hf"):
        return _importlib.import_module(f"tandem.{name}")
    if name in ("stream", "empty_parameters"):
        return getattr(_importlib.import_module("tandem.streaming"), name)
    raise AttributeError(f"module 'tandem' has no attribute '{name}'")


__all__ = [
    "__version__",
    "AdamW",
    "calibrate",
    "Candidate",
    "Choice",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "EngineCounters",
    "Error",
    "Evaluation",
    "Figure",
    "Gradients",
    "GroupValues",
    "InputError",
    "LaneSeconds",
    "Layer",
    "LayerBuilder",
    "LayerSeconds",
    "MachineProfile",
    "make_plan",
    "MemoryEntry",
    "MisuseError",
    "OffloadEngine",
    "OffloadOptions",
    "open_device",
    "Parameter",
    "ParameterLayout",
    "ParameterOptions",
    "parse_profile",
    "PeerError",
    "Plan",
    "plan",
    "PlanError",
    "PlanningFacts",
    "profile",
    "read_profile",
    "Shares",
    "shipped_profiles",
    "simulate",
    "Simulation",
    "smallest_device_memory",
    "StalledError",
    "StepReport",
    "Stream",
    "Subgroup",
    "Tensor",
    "TrainingError",
    "UsageError",
    "Weights",
    "WriteError",
]
